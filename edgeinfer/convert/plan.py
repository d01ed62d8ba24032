"""Decides the whole file before one weight is read: every tensor's name, shape, type and place, and the metadata."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from edgeinfer.convert.architectures.base import (
    Architecture,
    ConstantRule,
    RowTransform,
    TensorRule,
    n_kv_heads,
    n_layers,
)
from edgeinfer.convert.checkpoint import Checkpoint, TensorSpec
from edgeinfer.convert.config import Config
from edgeinfer.convert.file_types import FileType, file_type, tensor_type
from edgeinfer.convert.metadata import general_metadata
from edgeinfer.convert.mixture import ModelFacts, Overrides, assign, may_quantize, requires_imatrix
from edgeinfer.errors import NotFoundError, UnusableInputError, UsageError
from edgeinfer.ggml_types import GGMLType
from edgeinfer.options import ConvertOptions

QUANTIZATION_VERSION = 2
FLOAT_TYPES = {"F32": GGMLType.F32, "F16": GGMLType.F16, "BF16": GGMLType.BF16}


@dataclass(frozen=True, slots=True)
class TensorPlan:
    """One tensor of the output. `shape` is ggml's order: the row length first.

    The rows of `sources`, one after the other, are its rows, each source reordered by `transform`;
    without sources, `constant` holds its F32 bytes.
    """

    name: str
    shape: tuple[int, ...]
    type: GGMLType
    sources: tuple[TensorSpec, ...]
    transform: RowTransform | None = None
    constant: bytes = b""
    fallback_from: GGMLType | None = None

    @property
    def n_elements(self) -> int:
        """The product of the shape."""
        count = 1
        for length in self.shape:
            count *= length
        return count

    @property
    def nbytes(self) -> int:
        """Bytes in the output."""
        return self.type.row_nbytes(self.shape[0]) * (self.n_elements // self.shape[0])


@dataclass(frozen=True, slots=True)
class ConvertPlan:
    """Everything about the output but the weights."""

    architecture: str
    file_type: FileType
    metadata: dict[str, Any]
    tensors: tuple[TensorPlan, ...]
    dropped: tuple[str, ...] = ()
    """Tensors of the checkpoint that the output does without, with the reason."""

    @property
    def fallbacks(self) -> tuple[TensorPlan, ...]:
        """The tensors whose rows did not divide into the blocks of the type they should have had."""
        return tuple(t for t in self.tensors if t.fallback_from is not None)

    @property
    def n_parameters(self) -> int:
        """Elements of all tensors."""
        return sum(t.n_elements for t in self.tensors)

    @property
    def tensor_nbytes(self) -> int:
        """Bytes of all tensors in the output."""
        return sum(t.nbytes for t in self.tensors)

    @property
    def bits_per_weight(self) -> float:
        """Mean bits per element, as llama-quantize counts them."""
        return 8 * self.tensor_nbytes / self.n_parameters


def build(
    checkpoint: Checkpoint, architecture: Architecture, tokenizer_metadata: dict[str, Any], options: ConvertOptions
) -> ConvertPlan:
    """Plan the conversion of a checkpoint.

    Raises UsageError for options that contradict each other, NotFoundError for a pattern that fits no tensor,
    UnusableInputError when tensors are missing, surplus or wrongly shaped (all of them are named) or of a type that
    has no place in a GGUF file.
    """
    wanted = file_type(options.type)
    overrides = _overrides(options, wanted)
    config = checkpoint.config
    rules, dropped = _resolve(checkpoint, list(architecture.tensors(config)))
    draft = sorted((_unquantized(checkpoint, rule) for rule in rules), key=lambda t: file_order(t.name))
    _refuse_idle_patterns(overrides, draft)
    choices = assign(
        [(t.name, t.shape, _float_type(t, wanted)) for t in draft], wanted, _facts(architecture, config), overrides
    )
    tensors = tuple(
        replace(t, type=choice.type, fallback_from=choice.fallback_from)
        for t, choice in zip(draft, choices, strict=True)
    )
    _refuse_without_imatrix(tensors, wanted)
    n_parameters = sum(t.n_elements for t in tensors)
    general = general_metadata(checkpoint, n_parameters)
    metadata = {
        "general.architecture": architecture.name,
        "general.type": "model",
        **{f"general.{key}": value for key, value in general.items()},
        **{f"{architecture.name}.{key}": value for key, value in architecture.metadata(config).items()},
        **tokenizer_metadata,
        "general.quantization_version": QUANTIZATION_VERSION,
        "general.file_type": wanted.id,
    }
    return ConvertPlan(architecture.name, wanted, metadata, tensors, dropped)


def file_order(name: str) -> tuple[int, bytes]:
    """The order in which llama.cpp's quantizer writes tensors: outside the layers, then by layer, then by name."""
    layer = re.match(r"blk\.(\d+)\.", name)
    return (int(layer[1]) if layer else -1, name.encode())


def _overrides(options: ConvertOptions, wanted: FileType) -> Overrides:
    if options.tensor_type and not wanted.default.is_quantized:
        raise UsageError(f"--tensor-type has no effect with -t {wanted.name}", "choose a quantized type")
    return Overrides(
        by_name=tuple((_pattern(pattern), tensor_type(name)) for pattern, name in options.tensor_type),
        output=tensor_type(options.output_tensor_type) if options.output_tensor_type else None,
        token_embedding=tensor_type(options.token_embedding_type) if options.token_embedding_type else None,
        pure=options.pure,
        allow_fallback=options.fallback,
    )


def _pattern(text: str) -> re.Pattern[str]:
    try:
        # llama-quantize lowers the pattern, which would make `\S` a `\s`.
        return re.compile(text, re.IGNORECASE)
    except re.error as error:
        raise UsageError(f"--tensor-type: {text!r} is not a regular expression ({error})", "see Python's re") from None


def _refuse_idle_patterns(overrides: Overrides, tensors: Iterable[TensorPlan]) -> None:
    names = [t.name for t in tensors]
    for pattern, _ in overrides.by_name:
        if not any(map(pattern.search, names)):
            raise NotFoundError(
                f"--tensor-type: {pattern.pattern!r} fits no tensor", f"names are like {names[-1]}: see --dry-run"
            )


def _facts(architecture: Architecture, config: Config) -> ModelFacts:
    heads = config.integer("num_attention_heads")
    return ModelFacts(architecture.name, n_layers(config), heads, n_kv_heads(config))


# Buffers that old checkpoints saved along with the weights.
_BUFFERS = (".rotary_emb.inv_freq", ".attention.bias", ".attention.masked_bias")


def _resolve(
    checkpoint: Checkpoint, rules: Sequence[TensorRule | ConstantRule]
) -> tuple[list[TensorRule | ConstantRule], tuple[str, ...]]:
    """Drop the optional rules whose tensor isn't there; complain about all that doesn't fit at once."""
    there = checkpoint.tensors
    sources = {rule.source: rule for rule in rules if isinstance(rule, TensorRule)}
    missing = [name for name, rule in sources.items() if name not in there and not rule.optional]
    surplus = [name for name in there if name not in sources and not name.endswith(_BUFFERS)]
    wrong = [
        f"{name} has {list(there[name].shape)}, expected {list(rule.shape)}"
        for name, rule in sources.items()
        if name in there and there[name].shape != rule.shape
    ]
    untyped = [
        f"{name} is {there[name].dtype}" for name in sources if name in there and there[name].dtype not in FLOAT_TYPES
    ]
    problems = [
        f"{len(names)} {what}: {', '.join(names)}"
        for what, names in (
            ("tensors are missing", missing),
            ("tensors are surplus", surplus),
            ("tensors have the wrong shape", wrong),
            ("tensors are not floating-point", untyped),
        )
        if names
    ]
    if problems:
        raise UnusableInputError(
            f"{checkpoint.path}: {'; '.join(problems)}", "do config.json and the weights belong together?"
        )
    kept = [rule for rule in rules if isinstance(rule, ConstantRule) or rule.source in there]
    return _without_tied_copy(checkpoint, kept)


def _without_tied_copy(
    checkpoint: Checkpoint, rules: list[TensorRule | ConstantRule]
) -> tuple[list[TensorRule | ConstantRule], tuple[str, ...]]:
    """A head that is tied and stored all the same is left out if it really is the embedding, kept if it isn't."""
    head = next((r for r in rules if isinstance(r, TensorRule) and r.name == "output.weight" and r.optional), None)
    embedding = next((r for r in rules if r.name == "token_embd.weight"), None)
    if head is None or not isinstance(embedding, TensorRule):
        return rules, ()
    if not same_bytes(checkpoint.tensors[head.source], checkpoint.tensors[embedding.source]):
        return rules, ()
    return [rule for rule in rules if rule is not head], (f"{head.source} (the same as {embedding.source})",)


def same_bytes(a: TensorSpec, b: TensorSpec) -> bool:
    """Whether two tensors hold the same bytes; reads them only when size and type agree."""
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return False
    step = 1 << 20
    try:
        with open(a.path, "rb") as file_a, open(b.path, "rb") as file_b:
            file_a.seek(a.offset)
            file_b.seek(b.offset)
            return all(
                file_a.read(min(step, a.nbytes - done)) == file_b.read(min(step, a.nbytes - done))
                for done in range(0, a.nbytes, step)
            )
    except OSError as error:
        raise UnusableInputError(f"{a.path}: cannot be read ({error.strerror})", "was it changed meanwhile?") from None


def _unquantized(checkpoint: Checkpoint, rule: TensorRule | ConstantRule) -> TensorPlan:
    if isinstance(rule, ConstantRule):
        data = rule.values.astype("<f4").tobytes()
        return TensorPlan(rule.name, rule.values.shape[::-1], GGMLType.F32, (), constant=data)
    spec = checkpoint.tensors[rule.source]
    return TensorPlan(rule.name, spec.shape[::-1], GGMLType.F32, (spec,), rule.transform)


def _float_type(tensor: TensorPlan, wanted: FileType) -> GGMLType:
    """The type of a tensor that isn't quantized: F32 for vectors and norms, else the asked or the checkpoint's own."""
    if len(tensor.shape) < 2 or not may_quantize(tensor.name, tensor.shape):
        return GGMLType.F32
    return FLOAT_TYPES[tensor.sources[0].dtype] if wanted.default.is_quantized else wanted.default


def _refuse_without_imatrix(tensors: Iterable[TensorPlan], wanted: FileType) -> None:
    needy = [t for t in tensors if requires_imatrix(t.name, t.type, wanted)]
    if needy:
        raise UsageError(
            f"{wanted.name} needs an importance matrix (for {len(needy)} tensors, the first {needy[0].name} "
            f"as {needy[0].type.name})",
            "choose a type that does without, such as IQ3_S or Q2_K",
        )
