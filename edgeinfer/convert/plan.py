"""Decides the whole file before one weight is read: every tensor's name, shape, type and place, and the metadata."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from edgeinfer.convert.architectures.base import Architecture
from edgeinfer.convert.checkpoint import Checkpoint
from edgeinfer.convert.file_types import FileType, file_type, tensor_type
from edgeinfer.convert.imatrix import ExpectedMatrix, ImportanceMatrix
from edgeinfer.convert.kept_nvfp4 import with_factors
from edgeinfer.convert.metadata import general_metadata
from edgeinfer.convert.mixture import Overrides, assign, may_be_half, may_quantize, requires_imatrix
from edgeinfer.convert.mixture_rules import ModelFacts, category
from edgeinfer.convert.resolve import TensorPlan, resolve
from edgeinfer.convert.split import OutputFile, share_out
from edgeinfer.convert.tokenizer.templates import with_templates
from edgeinfer.errors import NotFoundError, UsageError
from edgeinfer.ggml_types import GGMLType
from edgeinfer.gguf_file.shards import shard_name, shard_parts
from edgeinfer.options import ConvertOptions

QUANTIZATION_VERSION = 2


@dataclass(frozen=True, slots=True)
class ConvertPlan:
    """Everything about the output but the weights."""

    architecture: str
    file_type: FileType
    metadata: dict[str, Any]
    tensors: tuple[TensorPlan, ...]
    dropped: tuple[str, ...] = ()
    """Tensors of the checkpoint that the output does without, with the reason."""
    split_max_nbytes: int | None = None
    """Bytes of tensors that a file may hold; None makes one file."""

    @property
    def files(self) -> tuple[OutputFile, ...]:
        """The file, or the shards."""
        return share_out(self.metadata, self.tensors, self.split_max_nbytes)

    def paths(self, first: Path) -> tuple[Path, ...]:
        """Where all files lie when the first one is `first`."""
        shard = shard_parts(first.name) if self.split_max_nbytes is not None else None
        if shard is None:
            return (first,)
        prefix, _, count = shard
        return tuple(first.with_name(shard_name(prefix, number, count)) for number in range(1, count + 1))

    @property
    def fallbacks(self) -> tuple[TensorPlan, ...]:
        """The tensors whose rows did not divide into the blocks of the type they should have had."""
        return tuple(t for t in self.tensors if t.fallback_from is not None)

    @property
    def is_encoder(self) -> bool:
        """Whether the model makes vectors or scores of texts, rather than further text."""
        causal, pooling = (self.metadata.get(f"{self.architecture}.{k}") for k in ("attention.causal", "pooling_type"))
        return causal is False or bool(pooling)

    @property
    def is_adapter(self) -> bool:
        """Whether the file adds to a model, rather than being one."""
        return self.metadata.get("general.type") == "adapter"

    @property
    def bits_per_weight_without_fallbacks(self) -> float:
        """What `bits_per_weight` would be if the rows had divided."""
        return 8 * (self.tensor_nbytes - sum(t.fallback_extra_nbytes for t in self.tensors)) / self.n_parameters

    @property
    def unweighted(self) -> tuple[TensorPlan, ...]:
        """The layers' tensors that are quantized without weights although there is an importance matrix."""
        if "quantize.imatrix.file" not in self.metadata:
            return ()
        quantized = (t for t in self.tensors if t.type.is_quantized and t.importance is None)
        return tuple(t for t in quantized if category(t.name) not in ("token_embd", "output"))

    @property
    def weights_by_type(self) -> dict[str, int]:
        """How many weights have which type, most first."""
        counts: Counter[str] = Counter()
        for tensor in self.tensors:
            counts[tensor.type.name] += tensor.n_elements
        return dict(counts.most_common())

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
    checkpoint: Checkpoint,
    architecture: Architecture,
    tokenizer_metadata: dict[str, Any],
    options: ConvertOptions,
    matrix: ImportanceMatrix | None = None,
) -> ConvertPlan:
    """Plan the conversion of a checkpoint, with an importance matrix if there is (or, to calibrate, will be) one.

    Raises UsageError for options that contradict each other, NotFoundError for a pattern that fits no tensor,
    UnusableInputError when tensors are missing, surplus or wrongly shaped (all of them are named) or of a type that
    has no place in a GGUF file.
    """
    wanted = file_type(options.file_type)
    config = checkpoint.config
    hyperparameters = architecture.metadata(config)
    draft, dropped = resolve(checkpoint, architecture.tensors(config))
    draft.sort(key=lambda t: file_order(t.name))
    draft = [replace(t, type=_float_type(t, wanted)) for t in draft]
    matrix = expected_matrix(options, matrix)
    tensors = choose_types(draft, wanted, _facts(architecture, hyperparameters), options, matrix)
    tensors = with_factors(architecture.name, tensors)
    general = general_metadata(checkpoint, tensors)
    metadata = {
        "general.architecture": architecture.name,
        "general.type": "model",
        **{f"general.{key}": value for key, value in general.items()},
        **{f"{architecture.name}.{key}": value for key, value in hyperparameters.items()},
        **with_templates(tokenizer_metadata, architecture.templates(config)),
        "general.quantization_version": QUANTIZATION_VERSION,
        "general.file_type": wanted.id,
        **(matrix.metadata() if matrix else {}),
    }
    return ConvertPlan(
        architecture.name, wanted, metadata, tensors, checkpoint.left_out + dropped, options.split_max_size
    )


def expected_matrix(options: ConvertOptions, given: ImportanceMatrix | None) -> ImportanceMatrix | None:
    """The importance matrix to plan with: the one that was given, or the one that is going to be computed."""
    return ExpectedMatrix(Path(options.calibrate)) if options.calibrate else given


def choose_types(
    draft: Sequence[TensorPlan],
    wanted: FileType,
    facts: ModelFacts,
    options: ConvertOptions,
    matrix: ImportanceMatrix | None,
) -> tuple[TensorPlan, ...]:
    """Give each tensor its type; `draft` is in file order, with the types that hold where nothing is quantized.

    Raises UsageError for options that contradict each other or the model, NotFoundError for a pattern that fits no
    tensor, UnusableInputError for an importance matrix of another model.
    """
    overrides = overrides_of(options, wanted)
    _refuse_idle_patterns(overrides, draft)
    choices = assign([(t.name, t.shape, t.type) for t in draft], wanted, facts, overrides, has_imatrix=bool(matrix))
    tensors = tuple(
        replace(t, type=choice.type, fallback_from=choice.fallback_from)
        for t, choice in zip(draft, choices, strict=True)
    )
    if matrix is not None:
        tensors = matrix.given_to(tensors)
    _refuse_without_imatrix(tensors, wanted)
    return tensors


def file_order(name: str) -> tuple[int, bytes]:
    """The order in which llama.cpp's quantizer writes tensors: outside the layers, then by layer, then by name."""
    layer = re.match(r"blk\.(\d+)\.", name)
    return (int(layer[1]) if layer else -1, name.encode())


def overrides_of(options: ConvertOptions, wanted: FileType) -> Overrides:
    """What the user decided. Raises UsageError for what has no effect with a file type that isn't quantized."""
    if options.tensor_type and not wanted.default.is_quantized:
        raise UsageError(f"--tensor-type has no effect with -t {wanted.name}", "choose a quantized type")
    if (options.imatrix or options.calibrate) and not wanted.default.is_quantized:
        raise UsageError(f"an importance matrix has no effect with -t {wanted.name}", "choose a quantized type")
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
    except (re.error, OverflowError, RecursionError) as error:
        raise UsageError(f"--tensor-type: {text!r} is not a regular expression ({error})", "see Python's re") from None


def _refuse_idle_patterns(overrides: Overrides, tensors: Iterable[TensorPlan]) -> None:
    names = [t.name for t in tensors]
    for pattern, _ in overrides.by_name:
        if not any(map(pattern.search, names)):
            raise NotFoundError(
                f"--tensor-type: {pattern.pattern!r} fits no tensor", f"names are like {names[-1]}: see --dry-run"
            )


def _facts(architecture: Architecture, hyperparameters: Mapping[str, Any]) -> ModelFacts:
    def of_layer_0(key: str) -> int:
        value = hyperparameters.get(key, 0)
        return int(value if isinstance(value, int) else value[0])

    heads = "attention.head_count"
    return ModelFacts(
        architecture.name,
        n_layers=hyperparameters["block_count"],
        n_heads=of_layer_0(heads),
        n_kv_heads=of_layer_0("attention.head_count_kv" if "attention.head_count_kv" in hyperparameters else heads),
        n_experts=hyperparameters.get("expert_count", 0),
    )


def _float_type(tensor: TensorPlan, wanted: FileType) -> GGMLType:
    """The type of a tensor that isn't quantized: F32 for vectors and norms, else the asked or the checkpoint's own."""
    if len(tensor.shape) < 2 or not (may_quantize(tensor.name, tensor.shape) or may_be_half(tensor.name)):
        return GGMLType.F32
    return tensor.own_type if wanted.default.is_quantized else wanted.default


def _refuse_without_imatrix(tensors: Iterable[TensorPlan], wanted: FileType) -> None:
    needy = [t for t in tensors if t.importance is None and requires_imatrix(t.name, t.type, wanted)]
    if needy:
        raise UsageError(
            f"{wanted.name} needs an importance matrix (for {len(needy)} tensors, the first {needy[0].name} "
            f"as {needy[0].type.name})",
            "give one that has them with --imatrix, or --calibrate, or choose a type that does without, such as IQ3_S",
        )
