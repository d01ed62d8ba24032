"""What a model takes that makes drafts for another one: it runs beside it, with settings of its own."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from edgeinfer.gguf_file.header import Header
from edgeinfer.runtime.footprint import EMBEDDING_NAME, Footprint, Needs, Settings, layer_of
from edgeinfer.speculation.model import MAX_READ_TOKENS


class DraftFootprint(Footprint):
    """The sizes of a draft model, or of the draft that some `layers` of the target make, whose headers it has then.

    It reads few tokens at a time, keeps `logit_rows` rows of logits, and nothing of it is written to the prefix cache.
    """

    def __init__(
        self,
        headers: Sequence[Header],
        features: Collection[str],
        *,
        logit_rows: int,
        layers: Collection[int] | None = None,
    ) -> None:
        super().__init__(headers, features)
        self._logit_rows = logit_rows
        self._layers = layers

    def needs(self, settings: Settings, on_gpu: Collection[str] = ()) -> Needs:
        """What it takes beside a target that runs with `settings`."""
        own = replace(
            settings,
            prefix_cache=False,
            ubatch_size=min(settings.ubatch_size, MAX_READ_TOKENS),
            logit_rows=self._logit_rows,
        )
        needs = super().needs(own, on_gpu)
        if self._layers is None:
            return needs
        kv = needs.kv * len(self._layers) // max(1, self.n_layer)
        return replace(needs, weights=self._pages_nbytes(settings), repacked=0, read_once=0, kv=kv)

    def _pages_nbytes(self, settings: Settings) -> int:
        """Of the mapped file, what the target does not keep: where it has copies, the draft reads the originals."""
        assert self._layers is not None
        total = 0
        for tensor in self.tensors:
            layer = layer_of(tensor)
            is_shared = settings.mmap and (
                tensor.name == EMBEDDING_NAME or not settings.repack or not self.repacked_nbytes(tensor)
            )
            if not is_shared and (layer is None or layer in self._layers):
                total += tensor.nbytes
        return total
