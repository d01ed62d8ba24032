"""A model that makes drafts for another one, loaded: a context and a source of its own."""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import TracebackType

from edgeinfer.api.draft_plan import DraftPlan
from edgeinfer.errors import UnusableInputError
from edgeinfer.native.context import NativeBackend
from edgeinfer.native.model import NativeModel
from edgeinfer.options import RuntimeOptions
from edgeinfer.speculation.model import MAX_READ_TOKENS, ModelSource
from edgeinfer.types import Placement


@dataclass(frozen=True, slots=True)
class DraftModel:
    """What `open_draft` opened; to be closed before the target."""

    native: NativeModel
    backend: NativeBackend
    source: ModelSource

    def close(self) -> None:
        """Free context and weights."""
        self.backend.close()
        self.native.close()

    def __enter__(self) -> DraftModel:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


def open_draft(
    plan: DraftPlan, target: NativeBackend, options: RuntimeOptions, max_sequences: int, *, repack: bool = True
) -> DraftModel:
    """Load it into main memory, with room for as many tokens as the target's cache; `repack` as in `Placement`.

    Raises UnusableInputError for what is no decoder, or cannot take tokens back; ResourceError.
    """
    native = _load(plan, options, Placement(repack=repack))
    try:
        backend = _context(native, target, options, max_sequences)
    except BaseException as error:
        native.close()
        if isinstance(error, UnusableInputError):
            raise UnusableInputError(f"{plan.header.path}: cannot draft: {error.message}", error.hint) from None
        raise
    name = plan.header.path.name if plan.layers is None else options.draft
    return DraftModel(native, backend, ModelSource(name, backend, target.n_vocab))


def _context(native: NativeModel, target: NativeBackend, options: RuntimeOptions, max_sequences: int) -> NativeBackend:
    if native.is_stateful:
        raise UnusableInputError("its memory cannot take tokens back", "use another model for drafts")
    own = replace(
        options,
        ctx_size=target.n_ctx,
        batch_size=MAX_READ_TOKENS,
        ubatch_size=MAX_READ_TOKENS,
        threads=target.threads,
    )
    return NativeBackend(native, own, max_sequences=max_sequences)


def _load(plan: DraftPlan, options: RuntimeOptions, placement: Placement) -> NativeModel:
    if plan.layers is None:
        return NativeModel(plan.header.path, mmap=options.mmap, mlock=options.mlock, placement=placement)
    from edgeinfer.api.layers import layers_model

    return layers_model(plan.header, plan.layers)
