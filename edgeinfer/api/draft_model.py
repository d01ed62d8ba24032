"""A model that makes drafts for another one: checked before anything is loaded; a context and a source of its own."""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import TracebackType

from edgeinfer.api.files import checked_header, resolve
from edgeinfer.errors import UnusableInputError
from edgeinfer.gguf_file.header import Header, ValueType
from edgeinfer.native.context import NativeBackend
from edgeinfer.native.model import NativeModel
from edgeinfer.options import RuntimeOptions
from edgeinfer.speculation.model import MAX_READ_TOKENS, ModelSource
from edgeinfer.types import Placement

MAX_UNUSED_TOKENS = 128
"""By which sizes of a family pad one vocabulary to different lengths."""
_TOKENS = "tokenizer.ggml.tokens"
_SHOWN_CHARS = 40


@dataclass(frozen=True, slots=True)
class DraftModel:
    """What `DraftPlan.open` opened; to be closed before the target."""

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


@dataclass(frozen=True, slots=True)
class DraftPlan:
    """What can be known of a draft model before anything is loaded."""

    header: Header
    layers: tuple[int, ...] | None
    """Of the target, whose header it is then; None for a model of its own."""

    @classmethod
    def of(cls, target: Header, options: RuntimeOptions) -> DraftPlan | None:
        """What the options ask for, checked; None where that is no model.

        Raises NotFoundError, UnusableInputError for a damaged file, another vocabulary (with the first difference) or
        a target whose layers make no model.
        """
        if options.draft == "layers":
            from edgeinfer.api.layers import chosen_layers  # here, because every start imports this module

            return cls(target, tuple(chosen_layers(target, options.draft_layers)))
        if not options.draft_is_file:
            return None
        header = checked_header(resolve(options.draft))
        difference = _first_difference(target, header)
        if difference:
            raise UnusableInputError(
                f"{header.path}: cannot draft for {target.path.name}: {difference}",
                "use a smaller model of the same family, or a low-bit copy of the model itself",
            )
        return cls(header, None)

    def open(
        self, target: NativeBackend, options: RuntimeOptions, max_sequences: int, *, repack: bool = True
    ) -> DraftModel:
        """Load it into main memory, with room for as many tokens as the target's cache; `repack` as in `Placement`.

        Raises UnusableInputError for what is no decoder, or cannot take tokens back; ResourceError.
        """
        native = self._load(options, Placement(repack=repack))
        try:
            backend = self._context(native, target, options, max_sequences)
        except BaseException as error:
            native.close()
            if isinstance(error, UnusableInputError):
                raise UnusableInputError(f"{self.header.path}: cannot draft: {error.message}", error.hint) from None
            raise
        name = self.header.path.name if self.layers is None else options.draft
        return DraftModel(native, backend, ModelSource(name, backend, target.n_vocab))

    def _context(
        self, native: NativeModel, target: NativeBackend, options: RuntimeOptions, max_sequences: int
    ) -> NativeBackend:
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

    def _load(self, options: RuntimeOptions, placement: Placement) -> NativeModel:
        if self.layers is None:
            return NativeModel(self.header.path, mmap=options.mmap, mlock=options.mlock, placement=placement)
        from edgeinfer.api.layers import layers_model

        return layers_model(self.header, self.layers)


def _first_difference(target: Header, draft: Header) -> str | None:
    """In what the vocabularies differ first; only the texts of tokens count, for a draft never tokenizes."""
    for header in (target, draft):
        if _TOKENS not in header.metadata or not _is_list_of_texts(header):
            return f"{header.path.name} has no vocabulary"
    if target.metadata.encoded(_TOKENS) == draft.metadata.encoded(_TOKENS):
        return None
    there, here = target.metadata[_TOKENS], draft.metadata[_TOKENS]
    for token, (wanted, found) in enumerate(zip(there, here, strict=False)):
        if wanted != found:
            return f"its token {token} is {_shown(found)}, not {_shown(wanted)}"
    if abs(len(there) - len(here)) > MAX_UNUSED_TOKENS:
        return f"it has {len(here)} tokens, not {len(there)}"
    return None


def _is_list_of_texts(header: Header) -> bool:
    value_type, count = header.metadata.value_type(_TOKENS)
    return value_type is ValueType.STRING and count is not None


def _shown(token: str) -> str:
    return repr(token if len(token) <= _SHOWN_CHARS else token[:_SHOWN_CHARS] + "…")
