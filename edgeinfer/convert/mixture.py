"""Which type each tensor gets: llama.cpp's choice (src/llama-quant.cpp) as a function of the whole tensor list.

The rules count attention and feed-forward tensors in the file's order, so the list must be complete and sorted
(`plan.file_order`).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from edgeinfer.convert.file_types import FileType
from edgeinfer.convert.mixture_rules import ATTN_V, ModelFacts, Walk, category, mixed_type
from edgeinfer.errors import UnusableInputError, UsageError
from edgeinfer.ggml_types import GGMLType

T = GGMLType


@dataclass(frozen=True, slots=True)
class Overrides:
    """What the user decided; see options.ConvertOptions."""

    by_name: tuple[tuple[re.Pattern[str], GGMLType], ...] = ()
    output: GGMLType | None = None
    token_embedding: GGMLType | None = None
    pure: bool = False
    allow_fallback: bool = True


@dataclass(frozen=True, slots=True)
class Choice:
    """A tensor's type, and the one that its row length did not allow, if so."""

    type: GGMLType
    fallback_from: GGMLType | None = None


def assign(
    tensors: Sequence[tuple[str, tuple[int, ...], GGMLType]],
    file_type: FileType,
    facts: ModelFacts,
    overrides: Overrides,
    *,
    has_imatrix: bool = False,
) -> list[Choice]:
    """Choose the type of each tensor.

    `tensors` are (name, shape with the row length first, the type it has when it isn't quantized), in file order.
    Raises UsageError when an override does not divide a tensor's rows, or when fallbacks were refused.
    """
    categories = [category(name) for name, _, _ in tensors]
    walk = Walk(
        file_type,
        facts,
        has_imatrix,
        is_tied="output" not in categories,
        n_attn_v=sum(kind in ATTN_V for kind in categories),
    )
    return [
        _choose(walk, overrides, name, shape, kind) if may_quantize(name, shape) else Choice(float_type)
        for (name, shape, float_type), kind in zip(tensors, categories, strict=True)
    ]


_NEVER_QUANTIZED = (
    "_norm.weight", "ffn_gate_inp.weight", "ffn_gate_tid2eid.weight", "altup", "laurel", "per_layer_model_proj",
    "ssm_conv1d", "shortconv.conv.weight", "indexer.k_proj.weight", "indexer.q_proj.weight", "time_mix_first.weight",
    "time_mix_w0.weight", "time_mix_w1.weight", "time_mix_w2.weight", "time_mix_v0.weight", "time_mix_v1.weight",
    "time_mix_v2.weight", "time_mix_a0.weight", "time_mix_a1.weight", "time_mix_a2.weight", "time_mix_g1.weight",
    "time_mix_g2.weight", "time_mix_decay_w1.weight", "time_mix_decay_w2.weight", "time_mix_lerp_fused.weight",
    "attn_rel_b.weight", ".position_embd", "sam.pos_embd", "sam.neck.", "sam.net_", ".rel_pos", ".patch_embd",
    ".patch_merger", "a.rvq.codebook", "mm.a.code_embd",
)  # fmt: skip


_EITHER_PRECISION = (
    "altup_proj.weight", "altup_unembd_proj.weight", "altup_router.weight", "laurel_l.weight", "laurel_r.weight",
    "per_layer_model_proj.weight", "time_mix_a1.weight", "time_mix_a2.weight", "time_mix_v1.weight",
    "time_mix_v2.weight", "time_mix_g1.weight", "time_mix_g2.weight",
)  # fmt: skip


def may_quantize(name: str, shape: tuple[int, ...]) -> bool:
    """Whether llama.cpp quantizes this tensor at all: weights of two dimensions and up, bar small or touchy ones."""
    if len(shape) < 2 or not name.endswith("weight"):
        return False
    if name in ("position_embd.weight", "token_types.weight"):
        return False
    return not any(part in name for part in _NEVER_QUANTIZED)


def is_decided(overrides: Overrides, name: str, *, is_tied: bool) -> bool:
    """Whether the user decided this tensor's type; `is_tied` where the embedding serves as the head, too."""
    match category(name):
        case "token_embd" if overrides.token_embedding is not None or (is_tied and overrides.output is not None):
            return True
        case "output" if overrides.output is not None:
            return True
    return any(pattern.search(name) for pattern, _ in overrides.by_name)


def may_be_half(name: str) -> bool:
    """Whether a tensor of two dimensions that is never quantized stays in half precision all the same."""
    return any(part in name for part in _EITHER_PRECISION)


def requires_imatrix(name: str, choice: GGMLType, file_type: FileType) -> bool:
    """Whether a tensor of this type would be garbage without an importance matrix.

    The embedding and the head never have one, so there llama.cpp only refuses what its quantizers cannot do without.
    """
    if category(name) in ("token_embd", "output"):
        return choice in (T.IQ2_XXS, T.IQ2_XS, T.IQ1_S)
    if choice is T.Q2_K:
        return file_type.name == "Q2_K_S"
    return choice in (T.IQ3_XXS, T.IQ2_XXS, T.IQ2_XS, T.IQ2_S, T.IQ1_M, T.IQ1_S)


def _choose(walk: Walk, overrides: Overrides, name: str, shape: tuple[int, ...], kind: str) -> Choice:
    default = walk.file_type.default
    if kind == "token_embd" and overrides.token_embedding is not None:
        return Choice(_checked(name, shape, overrides.token_embedding))
    if kind == "output" and overrides.output is not None:
        return Choice(_checked(name, shape, overrides.output))
    if not default.is_quantized:
        return Choice(default)
    wanted = next((named for pattern, named in overrides.by_name if pattern.search(name)), None)
    if wanted is None and overrides.pure:
        wanted = default
    if wanted is None and kind == "token_embd" and walk.is_tied:
        wanted = overrides.output
    return _fitted(overrides, name, shape, mixed_type(walk, name, shape, kind) if wanted is None else wanted)


def _checked(name: str, shape: tuple[int, ...], wanted: GGMLType) -> GGMLType:
    if shape[0] % wanted.block_length:
        raise UsageError(
            f"{name}: rows of {shape[0]} do not divide into {wanted.name} blocks of {wanted.block_length}",
            "choose another type for it",
        )
    return wanted


_FALLBACKS = {
    **dict.fromkeys((T.IQ1_S, T.IQ1_M, T.IQ2_XXS, T.IQ2_XS, T.IQ2_S, T.IQ3_XXS, T.IQ3_S, T.IQ4_XS), T.IQ4_NL),
    **dict.fromkeys((T.Q2_K, T.Q3_K, T.TQ1_0, T.TQ2_0), T.Q4_0),
    T.Q4_K: T.Q5_0,
    T.Q5_K: T.Q5_1,
    T.Q6_K: T.Q8_0,
}


def _fitted(overrides: Overrides, name: str, shape: tuple[int, ...], wanted: GGMLType) -> Choice:
    if shape[0] % wanted.block_length == 0:
        return Choice(wanted)
    if not overrides.allow_fallback:
        raise UnusableInputError(
            f"{name}: rows of {shape[0]} do not divide into {wanted.name} blocks of {wanted.block_length}",
            "leave out --no-fallback, or choose a type with blocks of 32",
        )
    smaller = _FALLBACKS.get(wanted, wanted)
    return Choice(smaller if shape[0] % smaller.block_length == 0 else T.F16, fallback_from=wanted)
