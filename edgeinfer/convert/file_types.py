"""The file types that a user names (`-t Q4_K_M`), llama.cpp's llama_ftype (include/llama.h)."""

from __future__ import annotations

from dataclasses import dataclass
from difflib import get_close_matches

from edgeinfer.errors import UsageError
from edgeinfer.ggml_types import GGMLType


@dataclass(frozen=True, slots=True)
class FileType:
    """A named mixture: its id in `general.file_type` and the tensor type it starts from."""

    name: str
    id: int
    default: GGMLType


_T = GGMLType
FILE_TYPES = {
    t.name: t
    for t in (
        FileType("F32", 0, _T.F32),
        FileType("F16", 1, _T.F16),
        FileType("BF16", 32, _T.BF16),
        FileType("Q8_0", 7, _T.Q8_0),
        FileType("Q6_K", 18, _T.Q6_K),
        FileType("Q5_K_M", 17, _T.Q5_K),
        FileType("Q5_K_S", 16, _T.Q5_K),
        FileType("Q5_1", 9, _T.Q5_1),
        FileType("Q5_0", 8, _T.Q5_0),
        FileType("Q4_K_M", 15, _T.Q4_K),
        FileType("Q4_K_S", 14, _T.Q4_K),
        FileType("Q4_1", 3, _T.Q4_1),
        FileType("Q4_0", 2, _T.Q4_0),
        FileType("IQ4_NL", 25, _T.IQ4_NL),
        FileType("IQ4_XS", 30, _T.IQ4_XS),
        FileType("Q3_K_L", 13, _T.Q3_K),
        FileType("Q3_K_M", 12, _T.Q3_K),
        FileType("Q3_K_S", 11, _T.Q3_K),
        FileType("IQ3_M", 27, _T.IQ3_S),
        FileType("IQ3_S", 26, _T.IQ3_S),
        FileType("IQ3_XS", 22, _T.IQ3_S),
        FileType("IQ3_XXS", 23, _T.IQ3_XXS),
        FileType("Q2_K", 10, _T.Q2_K),
        FileType("Q2_K_S", 21, _T.Q2_K),
        FileType("IQ2_M", 29, _T.IQ2_S),
        FileType("IQ2_S", 28, _T.IQ2_XS),
        FileType("IQ2_XS", 20, _T.IQ2_XS),
        FileType("IQ2_XXS", 19, _T.IQ2_XXS),
        FileType("IQ1_M", 31, _T.IQ1_M),
        FileType("IQ1_S", 24, _T.IQ1_S),
        FileType("TQ2_0", 37, _T.TQ2_0),
        FileType("TQ1_0", 36, _T.TQ1_0),
        FileType("MXFP4_MOE", 38, _T.MXFP4),
    )
}
DEFAULT = "Q4_K_M"
ALIASES = {"Q3_K": "Q3_K_M", "Q4_K": "Q4_K_M", "Q5_K": "Q5_K_M"}

TENSOR_TYPES = (
    _T.F32, _T.F16, _T.BF16, _T.Q4_0, _T.Q4_1, _T.Q5_0, _T.Q5_1, _T.Q8_0, _T.Q2_K, _T.Q3_K, _T.Q4_K, _T.Q5_K, _T.Q6_K,
    _T.IQ1_S, _T.IQ1_M, _T.IQ2_XXS, _T.IQ2_XS, _T.IQ2_S, _T.IQ3_XXS, _T.IQ3_S, _T.IQ4_NL, _T.IQ4_XS, _T.TQ1_0,
    _T.TQ2_0, _T.MXFP4, _T.NVFP4,
)  # fmt: skip


def file_type(name: str | None) -> FileType:
    """Look up a file type by name, any case; UsageError with the list when there is none. None is the default."""
    upper = (DEFAULT if name is None else name).upper()
    found = FILE_TYPES.get(ALIASES.get(upper, upper))
    if found is None:
        similar = get_close_matches(upper, FILE_TYPES, n=1)
        guess = f"did you mean {similar[0]}? " if similar else ""
        raise UsageError(f"unknown type {name!r}", f"{guess}one of {', '.join(FILE_TYPES)}")
    return found


def file_type_of(tensor_type: GGMLType) -> FileType | None:
    """The file type that starts from this type: the one of its name, or else the middle one."""
    found = [t for t in FILE_TYPES.values() if t.default is tensor_type]
    return min(found, key=lambda t: (t.name != tensor_type.name, not t.name.endswith("_M")), default=None)


def tensor_type(name: str) -> GGMLType:
    """Look up the type of one tensor by name, any case; UsageError with the list when there is none."""
    for candidate in TENSOR_TYPES:
        if candidate.name == name.upper():
            return candidate
    raise UsageError(f"unknown tensor type {name!r}", f"one of {', '.join(t.name for t in TENSOR_TYPES)}")
