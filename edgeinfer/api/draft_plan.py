"""Which model makes drafts for another one: found and checked before anything is loaded."""

from __future__ import annotations

from dataclasses import dataclass

from edgeinfer.api.files import checked_header, resolve
from edgeinfer.errors import UnusableInputError
from edgeinfer.gguf_file.header import Header, ValueType
from edgeinfer.options import RuntimeOptions

MAX_UNUSED_TOKENS = 128
"""By which sizes of a family pad one vocabulary to different lengths."""
_TOKENS = "tokenizer.ggml.tokens"
_SHOWN_CHARS = 40


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
