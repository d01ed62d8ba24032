"""Small checkpoints of every architecture with random weights, made of the architecture's own rules.

`tests/conformance/models/NAME.json` describes a model: its config, variants (changes to the config) and how exactly
the library can compute it. The names and shapes of the weights are those that our rules ask for; transformers and
llama.cpp's script then read the same directory and complain about every tensor that they miss or don't know. The
weights come straight from the generator's bits, so that they are the same with every version of numpy.
"""

from __future__ import annotations

import json
import shutil
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from checkpoint_tokenizer import write_json
from numpy.typing import NDArray
from safetensors_writer import TensorSource, write_weights
from toolbox import REPOSITORY

from edgeinfer.convert.architectures import lookup
from edgeinfer.convert.architectures.base import Part, TensorRule
from edgeinfer.convert.architectures.transforms import plus_one
from edgeinfer.convert.config import Config
from edgeinfer.convert.encodings.mxfp4 import BLOCK_LENGTH, PACKED_NBYTES
from edgeinfer.convert.text_model import text_config

FOLDER = REPOSITORY / "tests" / "conformance"
PLAIN = "plain"
"""The variant whose config is the model's own; logits are compared on it."""
N_PROMPT_TOKENS = 48
"""More than the sliding windows and original context lengths of the models."""


@dataclass(frozen=True, slots=True)
class TinyModel:
    """A model of `tests/conformance/models`."""

    name: str
    config: dict[str, Any]
    variants: dict[str, dict[str, Any]]
    """Changes to the config by variant; PLAIN has none."""
    prefixes: dict[str, str]
    """How names begin in our rules, and in the checkpoint."""
    extra_tensors: dict[str, list[int]]
    """Shapes of tensors that the checkpoint has and our rules leave out, such as an image encoder's."""
    tolerance: float
    """The largest difference allowed between our logits and transformers'."""
    deviations: dict[str, str]
    """Metadata that we write differently, with the reason."""
    beside: dict[str, Any]
    """Further JSON files of the checkpoint, by path."""
    needs_newer_transformers: bool
    """Whether the version that llama.cpp's script goes with does not have its class yet."""
    quiet: tuple[str, ...]
    """What is in the names of weights that are an eighth as large: where training put the scale of attention."""
    outtype: str
    """Of the script's file, which is then quantized: where weights are computed, BF16 would round them in between."""


def read_model(name: str) -> TinyModel:
    """The description in `tests/conformance/models/NAME.json`."""
    known = json.loads((FOLDER / "models" / f"{name}.json").read_text("utf-8"))
    return TinyModel(
        name,
        known["config"],
        {PLAIN: {}, **known["variants"]},
        known.get("prefixes", {}),
        known.get("extra_tensors", {}),
        known.get("tolerance", 1e-3),
        known.get("deviations", {}),
        known.get("beside", {}),
        known.get("transformers") == 5,
        tuple(known.get("quiet", ())),
        known.get("outtype", "bf16"),
    )


def model_names() -> list[str]:
    """Every model that is described."""
    return sorted(path.stem for path in (FOLDER / "models").glob("*.json"))


def prompt(model: TinyModel) -> NDArray[np.int32]:
    """Random tokens, shape `(N_PROMPT_TOKENS,)`."""
    raw = np.random.PCG64(1).random_raw(N_PROMPT_TOKENS)
    return (raw % 300 + 3).astype(np.int32)  # within every vocabulary, past the special tokens


def make_checkpoint(model: TinyModel, variant: str, folder: Path) -> Path:
    """Write the checkpoint as `folder/NAME-VARIANT` and return that path."""
    target = folder / f"{model.name}-{variant}"
    target.mkdir(parents=True)
    write_json(target / "config.json", model.config | model.variants[variant])
    for name, content in model.beside.items():
        (target / name).parent.mkdir(exist_ok=True)
        write_json(target / name, content)
    shutil.copyfile(FOLDER / "tokenizer.json", target / "tokenizer.json")
    write_json(
        target / "tokenizer_config.json",
        {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<|endoftext|>", "eos_token": "<|im_end|>"},
    )
    tensors = {checkpoint_name(model, name): _random(name, shape, weight) for name, shape, weight in _shapes(target)}
    for name in (name for name in tensors if any(part in name for part in model.quiet)):
        tensors[name] = (tensors[name] - _EIGHTH).astype(np.uint16)
    tensors |= {name: _random(name, shape, "") for name, shape in model.extra_tensors.items()}
    folders: dict[str, list[TensorSource]] = {}
    for name, bits in tensors.items():  # what follows the model lies in directories of its own
        folder, _, own_name = name.rpartition("/")
        folders.setdefault(folder, []).append(_source(own_name, bits))
    for folder, sources in folders.items():
        write_weights(target / folder, sources, 1 << 30)
    return target


def _source(name: str, bits: NDArray[np.uint16] | NDArray[np.uint8]) -> TensorSource:
    return TensorSource(name, bits.shape, lambda: [bits], {2: "BF16", 1: "U8"}[bits.itemsize])


def checkpoint_name(model: TinyModel, name: str) -> str:
    """What the checkpoint calls a tensor of our rules."""
    ours, theirs = next((p for p in model.prefixes.items() if name.startswith(p[0])), ("", ""))
    return theirs + name.removeprefix(ours)


def _shapes(target: Path) -> list[tuple[str, tuple[int, ...], str]]:
    """Name, shape and kind of weight of every tensor that our rules cannot do without."""
    config = Config(target / "config.json", json.loads((target / "config.json").read_text("utf-8")))
    architecture = lookup(config)
    rules = architecture.tensors(text_config(config, architecture))
    is_packed = config.quantization_method == "mxfp4"
    found = {
        name: (name, shape, kind)
        for rule in rules
        if isinstance(rule, TensorRule) and not rule.optional
        for part in rule.parts
        for name, shape, kind in _stored(rule, part, is_packed and rule.name.endswith("_exps.weight"))
    }
    return list(found.values())


def _stored(rule: TensorRule, part: Part, is_packed: bool) -> list[tuple[str, tuple[int, ...], str]]:
    if not is_packed:
        return [(part.source, part.shape, _kind(rule))]
    blocks = (*part.shape[:-1], part.shape[-1] // BLOCK_LENGTH)
    packed = (f"{part.source}_blocks", (*blocks, PACKED_NBYTES), "packed")
    return [packed, (f"{part.source}_scales", blocks, "scales")]


def _kind(rule: TensorRule) -> str:
    if not rule.name.removesuffix(".weight").endswith("norm"):
        return ""
    return "norm around 0" if rule.parts[0].change is plus_one else "norm around 1"


# The magnitudes: 2^LEAST to 2^(LEAST + 4). Matrices then neither swell nor shrink what passes through them.
_LEAST_EXPONENT = -7
_EIGHTH = np.uint16(3 << 7)
"""Taken from the bits of a BF16 number: three from its exponent."""


def _random(name: str, shape: Any, kind: str) -> NDArray[np.uint16] | NDArray[np.uint8]:
    """Bits of BF16 numbers: norms around 1 (or 0, where the model adds 1), everything else of either sign and small.

    Or of MXFP4's two halves.
    """
    count = int(np.prod(shape))
    raw = np.random.PCG64(zlib.crc32(name.encode())).random_raw(-(-count // 4)).view(np.uint16)[:count]
    if kind == "packed":
        return raw.astype(np.uint8).reshape(shape)
    if kind == "scales":
        return (raw % 4 + (127 + _LEAST_EXPONENT)).astype(np.uint8).reshape(shape)
    if kind == "norm around 1":
        bits = raw & 0x00FF | 0x3F00  # 0.5 to 2
    else:
        least = -4 if kind else _LEAST_EXPONENT
        bits = raw & 0x807F | (127 + least + (raw >> 7 & 3)) << 7
    return bits.astype(np.uint16).reshape(shape)
