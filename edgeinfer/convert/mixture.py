"""Which type each tensor gets: llama.cpp's mixtures (src/llama-quant.cpp) as a function of the whole tensor list.

The rules count attention and feed-forward tensors in the file's order, so the list must be complete and sorted
(`plan.file_order`). "More bits" goes to the layers at both ends and to every third between.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from edgeinfer.convert.file_types import FileType
from edgeinfer.errors import UnusableInputError, UsageError
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


@dataclass(slots=True)
class _Rules:
    """The state of one walk through the tensors."""

    file_type: FileType
    facts: ModelFacts
    overrides: Overrides
    has_imatrix: bool
    is_tied: bool
    n_attn_v: int
    counts: dict[str, int] = field(default_factory=dict)

    def count(self, what: str) -> int:
        """How many tensors of this kind came before."""
        number = self.counts.get(what, 0)
        self.counts[what] = number + 1
        return number


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
    rules = _Rules(
        file_type,
        facts,
        overrides,
        has_imatrix,
        is_tied="output" not in categories,
        n_attn_v=sum(c in _ATTN_V for c in categories),
    )
    return [
        _choose(rules, name, shape, kind) if may_quantize(name, shape) else Choice(float_type)
        for (name, shape, float_type), kind in zip(tensors, categories, strict=True)
    ]


_CATEGORIES = (
    ("attn_qkv.weight", "attn_qkv"), ("attn_kv_b.weight", "attn_kv_b"), ("attn_v.weight", "attn_v"),
    ("attn_k.weight", "attn_k"), ("attn_q.weight", "attn_q"), ("attn_output.weight", "attn_output"),
    ("ffn_up", "ffn_up"), ("ffn_gate", "ffn_gate"), ("ffn_down", "ffn_down"),
)  # fmt: skip
_ATTN_V = ("attn_v", "attn_qkv", "attn_kv_b")


def category(name: str) -> str:
    """The kind of tensor that a name tells, the first substring that fits."""
    if name == "output.weight":
        return "output"
    if name in ("token_embd.weight", "per_layer_token_embd.weight"):
        return "token_embd"
    return next((kind for part, kind in _CATEGORIES if part in name), "other")


_NEVER_QUANTIZED = (
    "_norm.weight", "ffn_gate_inp.weight", "ffn_gate_tid2eid.weight", "altup", "laurel", "per_layer_model_proj",
    "ssm_conv1d", "shortconv.conv.weight", "indexer.k_proj.weight", "indexer.q_proj.weight", "time_mix_first.weight",
    "time_mix_w0.weight", "time_mix_w1.weight", "time_mix_w2.weight", "time_mix_v0.weight", "time_mix_v1.weight",
    "time_mix_v2.weight", "time_mix_a0.weight", "time_mix_a1.weight", "time_mix_a2.weight", "time_mix_g1.weight",
    "time_mix_g2.weight", "time_mix_decay_w1.weight", "time_mix_decay_w2.weight", "time_mix_lerp_fused.weight",
    "attn_rel_b.weight", ".position_embd", "sam.pos_embd", "sam.neck.", "sam.net_", ".rel_pos", ".patch_embd",
    ".patch_merger", "a.rvq.codebook", "mm.a.code_embd",
)  # fmt: skip


def may_quantize(name: str, shape: tuple[int, ...]) -> bool:
    """Whether llama.cpp quantizes this tensor at all: weights of two dimensions and up, bar small or touchy ones."""
    if len(shape) < 2 or not name.endswith("weight"):
        return False
    if name in ("position_embd.weight", "token_types.weight"):
        return False
    return not any(part in name for part in _NEVER_QUANTIZED)


def requires_imatrix(name: str, choice: GGMLType, file_type: FileType) -> bool:
    """Whether a tensor of this type would be garbage without an importance matrix.

    The embedding and the head never have one, so there llama.cpp only refuses what its quantizers cannot do without.
    """
    if category(name) in ("token_embd", "output"):
        return choice in (T.IQ2_XXS, T.IQ2_XS, T.IQ1_S)
    if choice is T.Q2_K:
        return file_type.name == "Q2_K_S"
    return choice in (T.IQ3_XXS, T.IQ2_XXS, T.IQ2_XS, T.IQ2_S, T.IQ1_M, T.IQ1_S)


def _choose(rules: _Rules, name: str, shape: tuple[int, ...], kind: str) -> Choice:
    overrides, default = rules.overrides, rules.file_type.default
    named = next((wanted for pattern, wanted in overrides.by_name if pattern.search(name)), None)
    if kind == "token_embd" and overrides.token_embedding is not None:
        return Choice(_checked(name, shape, overrides.token_embedding))
    if kind == "output" and overrides.output is not None:
        return Choice(_checked(name, shape, overrides.output))
    if not default.is_quantized:
        return Choice(default)
    if named is not None:
        return _fitted(rules, name, shape, named)
    if overrides.pure:
        return _fitted(rules, name, shape, default)
    return _fitted(rules, name, shape, _mixture(rules, name, shape, kind))


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


def _fitted(rules: _Rules, name: str, shape: tuple[int, ...], wanted: GGMLType) -> Choice:
    if shape[0] % wanted.block_length == 0:
        return Choice(wanted)
    if not rules.overrides.allow_fallback:
        raise UnusableInputError(
            f"{name}: rows of {shape[0]} do not divide into {wanted.name} blocks of {wanted.block_length}",
            "leave out --no-fallback, or choose a type with blocks of 32",
        )
    smaller = _FALLBACKS.get(wanted, wanted)
    return Choice(smaller if shape[0] % smaller.block_length == 0 else T.F16, fallback_from=wanted)


def _mixture(rules: _Rules, name: str, shape: tuple[int, ...], kind: str) -> GGMLType:
    if kind == "output" or (kind == "token_embd" and rules.is_tied):
        return _output(rules, shape)
    if rules.file_type.name == "MXFP4_MOE":
        return T.MXFP4 if len(shape) > 2 and shape[2] > 1 else T.Q8_0
    if kind == "token_embd":
        return _TOKEN_EMBD.get(rules.file_type.name, rules.file_type.default)
    rule = (_LOW_BIT_RULES if rules.file_type.name in _LOW_BIT else _RULES).get(kind)
    return rule(rules, name) if rule else rules.file_type.default


def _output(rules: _Rules, shape: tuple[int, ...]) -> GGMLType:
    name, default = rules.file_type.name, rules.file_type.default
    if rules.overrides.output is not None:
        return rules.overrides.output
    if name == "MXFP4_MOE" or rules.facts.architecture == "falcon" or shape[0] % default.block_length:
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


def _layer(rules: _Rules, name: str, kind: str) -> int:
    """The layer that the rules go by: the running number, or the name's with experts (theirs come in any order)."""
    number = rules.count(kind)
    if rules.facts.n_experts <= 1:
        return number
    match = re.match(r"blk\.(\d+)\.", name)
    if match is None or int(match[1]) >= rules.facts.n_layers:
        raise UnusableInputError(f"tensor {name} of an expert model is in none of its layers", "is the file complete?")
    return int(match[1])


def _low_bit_attn_v(rules: _Rules, name: str) -> GGMLType:
    rules.count("attn_v")
    if rules.facts.gqa >= 4 or rules.facts.n_experts >= 4:
        return T.Q4_K
    return T.IQ3_S if rules.file_type.name in ("IQ2_S", "IQ2_M") else T.Q2_K


def _low_bit_attn_k(rules: _Rules, name: str) -> GGMLType:
    return T.Q4_K if rules.facts.n_experts == 8 else rules.file_type.default


def _low_bit_ffn_down(rules: _Rules, name: str) -> GGMLType:
    if rules.count("ffn_down") >= rules.facts.n_layers // 8:
        return rules.file_type.default
    return T.IQ3_S if rules.file_type.name in ("IQ2_S", "IQ2_M") else T.Q2_K


def _low_bit_attn_output(rules: _Rules, name: str) -> GGMLType:
    if rules.facts.n_experts == 8:
        return T.Q5_K
    by_name = {"IQ1_S": T.IQ2_XXS, "IQ1_M": T.IQ2_XXS, "IQ2_S": T.IQ3_S, "IQ2_M": T.IQ3_S}
    return by_name.get(rules.file_type.name, rules.file_type.default)


def _attn_v(rules: _Rules, name: str) -> GGMLType:
    i = rules.count("attn_v")
    chosen = _attn_v_by_file_type(rules, i)
    if rules.facts.is_70b and chosen in (T.Q3_K, T.Q4_K):
        chosen = T.Q5_K
    return T.Q8_0 if rules.facts.n_experts == 8 else chosen


def _attn_v_by_file_type(rules: _Rules, i: int) -> GGMLType:
    shared = rules.facts.gqa >= 4
    default = rules.file_type.default
    match rules.file_type.name:
        case "Q2_K":
            return T.Q4_K if shared else T.Q3_K
        case "IQ3_XXS":
            return T.Q4_K if shared else T.IQ3_XXS if rules.has_imatrix else T.IQ3_S
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
        case "Q4_K_M" | "Q5_K_M" if _more_bits(i, rules.n_attn_v):
            return T.Q6_K
        case "Q4_K_S" if i < 4:
            return T.Q5_K
    return default


def _attn_k(rules: _Rules, name: str) -> GGMLType:
    return T.Q8_0 if rules.facts.n_experts == 8 else _attn_q(rules, name)


def _attn_q(rules: _Rules, name: str) -> GGMLType:
    return {"IQ3_XS": T.IQ3_XXS, "IQ3_XXS": T.IQ2_S}.get(rules.file_type.name, rules.file_type.default)


def _attn_output(rules: _Rules, name: str) -> GGMLType:
    file_type, default = rules.file_type.name, rules.file_type.default
    if rules.facts.architecture == "falcon":
        return T.Q4_K if file_type == "Q3_K_L" else default
    if rules.facts.n_experts == 8:
        return T.Q5_K if file_type in _ATTN_OUTPUT_8_EXPERTS else default
    return _ATTN_OUTPUT.get(file_type, default)


_ATTN_OUTPUT = {"Q2_K": T.Q3_K, "IQ3_XXS": T.IQ3_S, "Q3_K_M": T.Q4_K, "Q3_K_L": T.Q5_K, "IQ3_M": T.Q4_K}
_ATTN_OUTPUT_8_EXPERTS = (
    "Q2_K", "IQ3_XS", "IQ3_XXS", "Q3_K_S", "Q3_K_M", "IQ4_NL", "Q4_K_S", "Q4_K_M", "IQ3_S", "IQ3_M", "IQ4_XS",
)  # fmt: skip


def _ffn_down(rules: _Rules, name: str) -> GGMLType:
    i, n = _layer(rules, name, "ffn_down"), rules.facts.n_layers
    default, is_falcon = rules.file_type.default, rules.facts.architecture == "falcon"
    first_eighth = i < n // 8
    match rules.file_type.name:
        case "Q2_K":
            return T.Q3_K
        case "Q2_K_S" if first_eighth:
            return T.Q4_K
        case "IQ3_XXS" if not rules.has_imatrix:
            return T.Q4_K if first_eighth else T.Q3_K
        case "Q3_K_M":
            if i < n // 16:
                return T.Q5_K
            return T.Q3_K if is_falcon and not _more_bits(i, n) else T.Q4_K
        case "IQ3_M" if first_eighth or (rules.facts.n_experts == 8 and _more_bits(i, n)):
            return T.Q4_K
        case "Q3_K_L":
            return T.Q4_K if is_falcon else T.Q5_K
        case "Q4_K_M" if is_falcon:
            return T.Q6_K if i < n // 16 else T.Q5_K if _more_bits(i, n) else T.Q4_K
        case "Q4_K_M" | "Q5_K_M" if _more_bits(i, n):
            return T.Q6_K
        case "IQ4_NL" | "IQ4_XS" if first_eighth and not rules.has_imatrix:
            return T.Q5_K
        case "Q4_K_S" if first_eighth and not is_falcon:
            return T.Q5_K
        case "Q4_0" | "Q5_0" if first_eighth and rules.has_imatrix:
            return T.Q4_1 if default is T.Q4_0 else T.Q5_1
    return default


def _ffn_gate_or_up(kind: str) -> Callable[[_Rules, str], GGMLType]:
    def rule(rules: _Rules, name: str) -> GGMLType:
        i, n = _layer(rules, name, kind), rules.facts.n_layers
        middle = n // 8 <= i < 7 * n // 8
        return T.IQ3_XXS if rules.file_type.name == "IQ3_XS" and middle else rules.file_type.default

    return rule


_RULES: dict[str, Callable[[_Rules, str], GGMLType]] = {
    **dict.fromkeys(_ATTN_V, _attn_v),
    "attn_k": _attn_k,
    "attn_q": _attn_q,
    "attn_output": _attn_output,
    "ffn_down": _ffn_down,
    "ffn_gate": _ffn_gate_or_up("ffn_gate"),
    "ffn_up": _ffn_gate_or_up("ffn_up"),
}
_LOW_BIT_RULES: dict[str, Callable[[_Rules, str], GGMLType]] = {
    **dict.fromkeys(_ATTN_V, _low_bit_attn_v),
    "attn_k": _low_bit_attn_k,
    "ffn_down": _low_bit_ffn_down,
    "attn_output": _low_bit_attn_output,
}
