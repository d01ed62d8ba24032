"""Small LoRA adapters as PEFT saves them, with random weights, for the small checkpoints of the conformance tests.

`tests/conformance/adapters/NAME.json` describes one: the model, PEFT's settings (`target_modules` is a regular
expression for the paths of the modules) and how exactly the library can compute it. The names and shapes are those of
the model's own rules; PEFT then reads the same directory and complains about every tensor that it misses or does not
know.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from checkpoint_tokenizer import write_json
from numpy.typing import NDArray
from random_checkpoint import FOLDER, TinyModel, checkpoint_name, read_model
from safetensors_writer import TensorSource, write_weights

from edgeinfer.convert.adapters.module_patterns import ModulePatterns
from edgeinfer.convert.adapters.row_order import is_transposed
from edgeinfer.convert.architectures import lookup
from edgeinfer.convert.architectures.base import TensorRule
from edgeinfer.convert.config import Config
from edgeinfer.convert.text_model import text_config

_LEAST_EXPONENT = -6  # the weights are from 2^-6 to 2^-2, so that what is added weighs as much as the model's own


@dataclass(frozen=True, slots=True)
class TinyAdapter:
    """An adapter of `tests/conformance/adapters`."""

    name: str
    model: TinyModel
    settings: dict[str, Any]
    tolerance: float
    """The largest difference allowed between our logits and PEFT's."""
    merged_only: bool
    """Whether llama.cpp computes some of these weights without adapters."""


def read_adapter_description(name: str) -> TinyAdapter:
    """The description in `tests/conformance/adapters/NAME.json`."""
    known = json.loads((FOLDER / "adapters" / f"{name}.json").read_text("utf-8"))
    model = read_model(known["model"])
    tolerance = known.get("tolerance", model.tolerance)
    return TinyAdapter(name, model, known["settings"], tolerance, known.get("merged_only", False))


def adapter_names() -> list[str]:
    """Every adapter that is described."""
    return sorted(path.stem for path in (FOLDER / "adapters").glob("*.json"))


def make_adapter(adapter: TinyAdapter, checkpoint: Path, folder: Path) -> Path:
    """Write the adapter as `folder/NAME`, for the model in `checkpoint`, and return that path."""
    target = folder / adapter.name
    target.mkdir(parents=True)
    settings = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": str(checkpoint)}
    write_json(target / "adapter_config.json", settings | adapter.settings)
    sources = [
        TensorSource(f"base_model.model.{name}", bits.shape, lambda bits=bits: [bits], "BF16")
        for name, bits in _tensors(adapter, checkpoint)
    ]
    write_weights(target, sources, 1 << 30)
    (target / "model.safetensors").rename(target / "adapter_model.safetensors")
    return target


def _tensors(adapter: TinyAdapter, checkpoint: Path) -> Iterator[tuple[str, NDArray[np.uint16]]]:
    settings = adapter.settings
    ranks = ModulePatterns(settings.get("rank_pattern", {}))
    for module, (outputs, inputs), is_embedding in _modules(adapter.model, checkpoint):
        if not re.fullmatch(settings["target_modules"], module):
            continue
        rank = ranks.get(module, settings["r"])
        kind, suffix = ("lora_embedding_", "") if is_embedding else ("lora_", ".weight")
        for side, shape in (("A", (rank, inputs)), ("B", (outputs, rank))):
            name = f"{module}.{kind}{side}{suffix}"
            yield name, _random(name, shape)
        if is_embedding or module == "lm_head":  # PEFT saves both along where one is adapted
            yield f"{module}.base_layer.weight", _stored(checkpoint, module)


def _modules(model: TinyModel, checkpoint: Path) -> Iterator[tuple[str, tuple[int, int], bool]]:
    """Path, shape as (outputs, inputs), and whether it is an embedding, of every module with a matrix."""
    config = Config(checkpoint / "config.json", json.loads((checkpoint / "config.json").read_text("utf-8")))
    architecture = lookup(config)
    seen = set()
    for rule in architecture.tensors(text_config(config, architecture)):
        for part in rule.parts if isinstance(rule, TensorRule) and not rule.optional else ():
            if len(part.shape) != 2 or part.source in seen:
                continue
            seen.add(part.source)
            is_embedding = rule.name == "token_embd.weight"
            outputs, inputs = part.shape[::-1] if is_embedding or is_transposed(part) else part.shape
            yield checkpoint_name(model, part.source).removesuffix(".weight"), (outputs, inputs), is_embedding


def _stored(checkpoint: Path, module: str) -> NDArray[np.uint16]:
    from edgeinfer.convert.checkpoint import read_safetensors_header

    spec = read_safetensors_header(checkpoint / "model.safetensors")[f"{module}.weight"]
    raw = np.fromfile(spec.path, np.uint16, spec.nbytes // 2, offset=spec.offset)
    return raw.reshape(spec.shape)


def _random(name: str, shape: tuple[int, int]) -> NDArray[np.uint16]:
    """Bits of BF16 numbers of either sign."""
    count = int(np.prod(shape))
    raw = np.random.PCG64(zlib.crc32(name.encode())).random_raw(-(-count // 4)).view(np.uint16)[:count]
    bits = raw & 0x807F | (127 + _LEAST_EXPONENT + (raw >> 7 & 3)) << 7
    return bits.astype(np.uint16).reshape(shape)
