"""From a PEFT adapter directory to a GGUF adapter, planned like a model from headers alone.

The layout is that of llama.cpp's convert_lora_to_gguf.py: for each tensor X of the model `X.lora_a` and `X.lora_b`, and
one `adapter.lora.alpha`, which the library divides by each pair's rank.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from edgeinfer.convert.adapters.base_model import BaseModel, check_saved_bases
from edgeinfer.convert.adapters.factors import Factors, factors
from edgeinfer.convert.adapters.peft import PeftAdapter
from edgeinfer.convert.checkpoint import Reader, TensorSpec, encoded
from edgeinfer.convert.encodings.base import Floats, OnlyFloats
from edgeinfer.convert.file_types import FileType, file_type
from edgeinfer.convert.metadata import title
from edgeinfer.convert.pipeline import Planned
from edgeinfer.convert.plan import QUANTIZATION_VERSION, ConvertPlan, file_order
from edgeinfer.convert.resolve import PartPlan, TensorPlan
from edgeinfer.convert.verify import check_tensors
from edgeinfer.errors import CheckFailedError, UnusableInputError, UsageError
from edgeinfer.ggml_types import GGMLType
from edgeinfer.gguf_file.adapter import read_adapter
from edgeinfer.options import ConvertOptions

TYPES = ("F32", "F16", "BF16", "Q8_0")
DEFAULT_TYPE = "F32"
_OF_MODELS = (
    "target_size",
    "target_bpw",
    "tensor_type",
    "output_tensor_type",
    "token_embedding_type",
    "pure",
    "pre",
    "allow_requantize",
    "split_max_size",
    "imatrix",
    "calibrate",
    "lora",
)


@dataclass(frozen=True, slots=True)
class FactorRows(OnlyFloats):
    """Makes the rows of one of a pair's tensors: `checkpoint.Encoding`."""

    factors: Factors
    side: str
    stored: tuple[TensorSpec, ...]

    def dequantize(self, reader: Reader, row0: int, out: Floats) -> None:
        """See checkpoint.Encoding."""
        height, done = self.factors.shapes[self.side][-2], 0
        while done < len(out):
            matrix, row = divmod(row0 + done, height)
            rows = self.factors.matrix(reader, self.side, matrix)[row : row + len(out) - done]
            out[done : done + len(rows)] = rows
            done += len(rows)


def plan_adapter(
    adapter: PeftAdapter, base: Path, output: Path | None, options: ConvertOptions, *, repository: str | None = None
) -> Planned:
    """Plan the file; `base` is the directory with the base model's config, `repository` where the adapter is from.

    Raises UsageError for options that an adapter has no use for, UnusableInputError for one that does not fit the
    base, or that no file can hold.
    """
    wanted = _wanted(options)
    model = BaseModel.of(base)
    rules, where = model.rules(), str(adapter.path)
    check_saved_bases(model.saved_bases(adapter), rules, where)
    pairs = factors(rules, model.named(adapter, rules), where)
    tensors = tuple(
        sorted((t for pair in pairs for t in _tensors(pair, wanted, options)), key=lambda t: file_order(t.name))
    )
    name = (repository or os.path.abspath(adapter.path)).rpartition("/")[2] or "adapter"
    metadata = {
        "general.architecture": model.architecture.name,
        "general.type": "adapter",
        "adapter.type": "lora",
        "general.name": title(os.fsencode(name).decode("utf-8", "replace")),
        "adapter.lora.alpha": pairs[0].alpha,
        "general.quantization_version": QUANTIZATION_VERSION,
        "general.file_type": wanted.id,
    }
    plan = ConvertPlan(model.architecture.name, wanted, metadata, tensors)
    inputs = adapter.files | {model.config.path}
    plain = re.sub(r"[^\w.-]", "-", name)
    output = output or Path(f"{plain}-{wanted.name}.gguf")
    return Planned(adapter.path, repository, inputs, None, plan, output)


def _wanted(options: ConvertOptions) -> FileType:
    for name in _OF_MODELS:
        if getattr(options, name):
            raise UsageError(f"--{name.replace('_', '-')} has no effect on an adapter", "drop it")
    wanted = file_type(DEFAULT_TYPE if options.type is None else options.type)
    if wanted.name not in TYPES:
        raise UsageError(f"an adapter cannot be {wanted.name}", f"choose one of {', '.join(TYPES)}")
    return wanted


def _tensors(pair: Factors, wanted: FileType, options: ConvertOptions) -> Iterator[TensorPlan]:
    stored = pair.stored
    for side, shape in pair.shapes.items():
        name = f"{pair.name}.lora_{side}"
        spec = encoded(name, shape, FactorRows(pair, side, stored))
        part = PartPlan(spec, 0, spec.n_elements // shape[-1], shape[-1], None)
        fits = shape[-1] % wanted.default.block_length == 0
        if not fits and not options.fallback:
            raise UsageError(
                f"rows of {shape[-1]} elements of {name} don't divide into {wanted.name} blocks", "choose F16"
            )
        kind = wanted.default if fits else GGMLType.F16
        yield TensorPlan(name, shape[::-1], kind, (part,), fallback_from=None if fits else wanted.default)


def verify_adapter(path: Path, plan: ConvertPlan) -> None:
    """Check a written file: its tensor table, every tensor finite, what the runtime asks of an adapter.

    Raises CheckFailedError with the first difference.
    """
    check_tensors(path, plan)
    try:
        read_adapter(path)
    except UnusableInputError as error:
        raise CheckFailedError(
            f"the written file is unusable: {error.message}", "this is a bug in edgeinfer"
        ) from error
