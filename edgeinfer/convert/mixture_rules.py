"""What llama.cpp's mixtures have for each kind of tensor (src/llama-quant.cpp), as tables and small functions.

"More bits" goes to the layers at both ends and to every third between. What may be quantized at all, what the user
decided and whether rows divide is `mixture`'s business.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field

from edgeinfer.convert.file_types import FileType
from edgeinfer.errors import UnusableInputError
from edgeinfer.ggml_types import GGMLType

T = GGMLType


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What the rules ask about a model."""

    architecture: str
    n_layers: int
    n_heads: int
    n_kv_heads: int
    n_experts: int = 0

    @property
    def gqa(self) -> int:
        """Query heads per key-value head; 0 where there are no key-value heads."""
        return self.n_heads // self.n_kv_heads if self.n_kv_heads else 0

    @property
    def is_70b(self) -> bool:
        """Models that llama.cpp takes for a 70B one: their eight-fold shared attn_v deserves more bits."""
        if self.architecture == "llama":
            return self.n_layers == 80 and self.n_experts != 8 and self.n_heads != self.n_kv_heads
        return self.n_layers == {"qwen2": 80, "deci": 80, "olmo": 80, "jais2": 68}.get(self.architecture)


@dataclass(slots=True)
class Walk:
    """The state of one walk through a model's tensors."""

    file_type: FileType
    facts: ModelFacts
    has_imatrix: bool
    is_tied: bool
    """Whether the embedding serves as the head, too."""
    n_attn_v: int
    """How many tensors have the category of a value projection."""
    counts: dict[str, int] = field(default_factory=dict)

    def count(self, what: str) -> int:
        """How many tensors of this kind came before."""
        number = self.counts.get(what, 0)
        self.counts[what] = number + 1
        return number


_CATEGORIES = (
    ("attn_qkv.weight", "attn_qkv"), ("attn_kv_b.weight", "attn_kv_b"), ("attn_v.weight", "attn_v"),
    ("attn_k.weight", "attn_k"), ("attn_q.weight", "attn_q"), ("attn_output.weight", "attn_output"),
    ("ffn_up", "ffn_up"), ("ffn_gate", "ffn_gate"), ("ffn_down", "ffn_down"),
)  # fmt: skip
ATTN_V = ("attn_v", "attn_qkv", "attn_kv_b")


def category(name: str) -> str:
    """The kind of tensor that a name tells, the first substring that fits."""
    if name == "output.weight":
        return "output"
    if name in ("token_embd.weight", "per_layer_token_embd.weight"):
        return "token_embd"
    return next((kind for part, kind in _CATEGORIES if part in name), "other")


def mixed_type(walk: Walk, name: str, shape: tuple[int, ...], kind: str) -> GGMLType:
    """The type that the mixture has for a tensor of the category `kind`, whether its rows divide or not.

    To be asked once for each tensor, in file order. Raises UnusableInputError for experts outside of the layers.
    """
    if kind == "output" or (kind == "token_embd" and walk.is_tied):
        return _output(walk, shape)
    if walk.file_type.name == "MXFP4_MOE":
        return T.MXFP4 if len(shape) > 2 and shape[2] > 1 else T.Q8_0
    if kind == "token_embd":
        return _TOKEN_EMBD.get(walk.file_type.name, walk.file_type.default)
    rule = (_LOW_BIT_RULES if walk.file_type.name in _LOW_BIT else _RULES).get(kind)
    return rule(walk, name) if rule else walk.file_type.default


def _output(walk: Walk, shape: tuple[int, ...]) -> GGMLType:
    name, default = walk.file_type.name, walk.file_type.default
    if name == "MXFP4_MOE" or walk.facts.architecture == "falcon" or shape[0] % default.block_length:
        return T.Q8_0
    if name in (*_LOW_BIT, "IQ3_XXS"):
        return T.Q5_K
    return T.Q8_0 if default is T.Q8_0 else T.Q6_K


_LOW_BIT = ("IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ2_M", "IQ1_S", "IQ1_M")
_TOKEN_EMBD = {
    **dict.fromkeys(("IQ2_XXS", "IQ2_XS", "IQ1_S", "IQ1_M"), T.Q2_K),
    **dict.fromkeys(("IQ2_S", "IQ2_M", "IQ3_XXS"), T.IQ3_S),
    **dict.fromkeys(("TQ1_0", "TQ2_0"), T.Q4_K),
}


def _more_bits(i: int, n: int) -> bool:
    return i < n // 8 or i >= 7 * n // 8 or (i - n // 8) % 3 == 2


def _layer(walk: Walk, name: str, kind: str) -> int:
    """The layer that the rules go by: the running number, or the name's with experts (theirs come in any order)."""
    number = walk.count(kind)
    if walk.facts.n_experts <= 1:
        return number
    match = re.match(r"blk\.(\d+)\.", name)
    if match is None or int(match[1]) >= walk.facts.n_layers:
        raise UnusableInputError(f"tensor {name} of an expert model is in none of its layers", "is the file complete?")
    return int(match[1])


def _low_bit_attn_v(walk: Walk, name: str) -> GGMLType:
    walk.count("attn_v")
    if walk.facts.gqa >= 4 or walk.facts.n_experts >= 4:
        return T.Q4_K
    return T.IQ3_S if walk.file_type.name in ("IQ2_S", "IQ2_M") else T.Q2_K


def _low_bit_attn_k(walk: Walk, name: str) -> GGMLType:
    return T.Q4_K if walk.facts.n_experts == 8 else walk.file_type.default


def _low_bit_ffn_down(walk: Walk, name: str) -> GGMLType:
    if walk.count("ffn_down") >= walk.facts.n_layers // 8:
        return walk.file_type.default
    return T.IQ3_S if walk.file_type.name in ("IQ2_S", "IQ2_M") else T.Q2_K


def _low_bit_attn_output(walk: Walk, name: str) -> GGMLType:
    if walk.facts.n_experts == 8:
        return T.Q5_K
    by_name = {"IQ1_S": T.IQ2_XXS, "IQ1_M": T.IQ2_XXS, "IQ2_S": T.IQ3_S, "IQ2_M": T.IQ3_S}
    return by_name.get(walk.file_type.name, walk.file_type.default)


def _attn_v(walk: Walk, name: str) -> GGMLType:
    i = walk.count("attn_v")
    chosen = _attn_v_by_file_type(walk, i)
    if walk.facts.is_70b and chosen in (T.Q3_K, T.Q4_K):
        chosen = T.Q5_K
    return T.Q8_0 if walk.facts.n_experts == 8 else chosen


def _attn_v_by_file_type(walk: Walk, i: int) -> GGMLType:
    shared = walk.facts.gqa >= 4
    default = walk.file_type.default
    match walk.file_type.name:
        case "Q2_K":
            return T.Q4_K if shared else T.Q3_K
        case "IQ3_XXS":
            return T.Q4_K if shared else T.IQ3_XXS if walk.has_imatrix else T.IQ3_S
        case "Q2_K_S" | "IQ3_XS" | "IQ3_S" if shared:
            return T.Q4_K
        case "IQ3_M":
            return T.Q4_K
        case "Q3_K_M":
            return T.Q5_K if i < 2 else T.Q4_K
        case "Q3_K_L":
            return T.Q5_K
        case "IQ4_NL" | "IQ4_XS" if shared:
            return T.Q5_K
        case "Q4_K_M" | "Q5_K_M" if _more_bits(i, walk.n_attn_v):
            return T.Q6_K
        case "Q4_K_S" if i < 4:
            return T.Q5_K
    return default


def _attn_k(walk: Walk, name: str) -> GGMLType:
    return T.Q8_0 if walk.facts.n_experts == 8 else _attn_q(walk, name)


def _attn_q(walk: Walk, name: str) -> GGMLType:
    return {"IQ3_XS": T.IQ3_XXS, "IQ3_XXS": T.IQ2_S}.get(walk.file_type.name, walk.file_type.default)


def _attn_output(walk: Walk, name: str) -> GGMLType:
    file_type, default = walk.file_type.name, walk.file_type.default
    if walk.facts.architecture == "falcon":
        return T.Q4_K if file_type == "Q3_K_L" else default
    if walk.facts.n_experts == 8:
        return T.Q5_K if file_type in _ATTN_OUTPUT_8_EXPERTS else default
    return _ATTN_OUTPUT.get(file_type, default)


_ATTN_OUTPUT = {"Q2_K": T.Q3_K, "IQ3_XXS": T.IQ3_S, "Q3_K_M": T.Q4_K, "Q3_K_L": T.Q5_K, "IQ3_M": T.Q4_K}
_ATTN_OUTPUT_8_EXPERTS = (
    "Q2_K", "IQ3_XS", "IQ3_XXS", "Q3_K_S", "Q3_K_M", "IQ4_NL", "Q4_K_S", "Q4_K_M", "IQ3_S", "IQ3_M", "IQ4_XS",
)  # fmt: skip


def _ffn_down(walk: Walk, name: str) -> GGMLType:
    i, n = _layer(walk, name, "ffn_down"), walk.facts.n_layers
    default, is_falcon = walk.file_type.default, walk.facts.architecture == "falcon"
    first_eighth = i < n // 8
    match walk.file_type.name:
        case "Q2_K":
            return T.Q3_K
        case "Q2_K_S" if first_eighth:
            return T.Q4_K
        case "IQ3_XXS" if not walk.has_imatrix:
            return T.Q4_K if first_eighth else T.Q3_K
        case "Q3_K_M":
            if i < n // 16:
                return T.Q5_K
            return T.Q3_K if is_falcon and not _more_bits(i, n) else T.Q4_K
        case "IQ3_M" if first_eighth or (walk.facts.n_experts == 8 and _more_bits(i, n)):
            return T.Q4_K
        case "Q3_K_L":
            return T.Q4_K if is_falcon else T.Q5_K
        case "Q4_K_M" if is_falcon:
            return T.Q6_K if i < n // 16 else T.Q5_K if _more_bits(i, n) else T.Q4_K
        case "Q4_K_M" | "Q5_K_M" if _more_bits(i, n):
            return T.Q6_K
        case "IQ4_NL" | "IQ4_XS" if first_eighth and not walk.has_imatrix:
            return T.Q5_K
        case "Q4_K_S" if first_eighth and not is_falcon:
            return T.Q5_K
        case "Q4_0" | "Q5_0" if first_eighth and walk.has_imatrix:
            return T.Q4_1 if default is T.Q4_0 else T.Q5_1
    return default


def _ffn_gate_or_up(kind: str) -> Callable[[Walk, str], GGMLType]:
    def rule(walk: Walk, name: str) -> GGMLType:
        i, n = _layer(walk, name, kind), walk.facts.n_layers
        middle = n // 8 <= i < 7 * n // 8
        return T.IQ3_XXS if walk.file_type.name == "IQ3_XS" and middle else walk.file_type.default

    return rule


_RULES: dict[str, Callable[[Walk, str], GGMLType]] = {
    **dict.fromkeys(ATTN_V, _attn_v),
    "attn_k": _attn_k,
    "attn_q": _attn_q,
    "attn_output": _attn_output,
    "ffn_down": _ffn_down,
    "ffn_gate": _ffn_gate_or_up("ffn_gate"),
    "ffn_up": _ffn_gate_or_up("ffn_up"),
}
_LOW_BIT_RULES: dict[str, Callable[[Walk, str], GGMLType]] = {
    **dict.fromkeys(ATTN_V, _low_bit_attn_v),
    "attn_k": _low_bit_attn_k,
    "ffn_down": _low_bit_ffn_down,
    "attn_output": _low_bit_attn_output,
}
