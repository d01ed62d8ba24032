"""Makes a checkpoint of a given size with random weights and SmolLM2's tokenizer, to measure memory and time.

The weights are finite and of a model's magnitude, but mean nothing. Layers share one pool of random numbers, each
from another offset, so that gigabytes are written at the disk's speed. Prints the directory.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from checkpoint_tokenizer import write_json
from make_checkpoint import cached_checkpoint
from numpy.typing import NDArray
from safetensors_writer import TensorSource, to_bf16, write_weights
from toolbox import parse_nbytes, run

from edgeinfer.cli import console
from edgeinfer.errors import UsageError

HIDDEN = 2048
FFN = 5632
HEADS = 32
KV_HEADS = 8
MAX_SHARD_NBYTES = 2 * 10**9
POOL_ELEMENTS = (1 << 24) + 7919
SLAB_ELEMENTS = 1 << 20
BF16_NBYTES = 2
WEIGHT_SCALE = 0.02
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja")


def make_synthetic(folder: Path, nbytes: int, architecture: str) -> None:
    """Write a checkpoint of at least `nbytes` of weights as `folder`, which appears only when it is complete."""
    source = cached_checkpoint("smollm2")
    config = json.loads((source / "config.json").read_text("utf-8"))
    shapes = _shapes(nbytes, architecture, config["vocab_size"])
    config |= {
        "architectures": ["LlamaForCausalLM" if architecture == "llama" else "Qwen2ForCausalLM"],
        "hidden_size": HIDDEN,
        "intermediate_size": FFN,
        "model_type": architecture,
        "num_attention_heads": HEADS,
        "num_hidden_layers": sum(name.endswith("input_layernorm.weight") for name in shapes),
        "num_key_value_heads": KV_HEADS,
        "head_dim": HIDDEN // HEADS,
    }
    rng = np.random.default_rng(0)
    pool = to_bf16(rng.standard_normal(POOL_ELEMENTS, np.float32) * np.float32(WEIGHT_SCALE))
    tensors = [_tensor(name, shape, pool, i) for i, (name, shape) in enumerate(shapes.items())]
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as scratch:
        partial = Path(scratch) / "checkpoint"
        partial.mkdir()
        write_json(partial / "config.json", config)
        for name in _TOKENIZER_FILES:
            shutil.copyfile(source / name, partial / name)
        write_weights(partial, tensors, MAX_SHARD_NBYTES)
        partial.rename(folder)


def _shapes(nbytes: int, architecture: str, n_vocab: int) -> dict[str, tuple[int, ...]]:
    """As many layers as it takes; the head is tied."""
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (n_vocab, HIDDEN)}
    kv = HIDDEN // HEADS * KV_HEADS
    layer = 0
    while sum(int(np.prod(shape)) for shape in shapes.values()) * BF16_NBYTES < nbytes:
        prefix = f"model.layers.{layer}"
        for x, length in (("q", HIDDEN), ("k", kv), ("v", kv)):
            shapes[f"{prefix}.self_attn.{x}_proj.weight"] = (length, HIDDEN)
            if architecture == "qwen2":
                shapes[f"{prefix}.self_attn.{x}_proj.bias"] = (length,)
        shapes |= {
            f"{prefix}.self_attn.o_proj.weight": (HIDDEN, HIDDEN),
            f"{prefix}.mlp.gate_proj.weight": (FFN, HIDDEN),
            f"{prefix}.mlp.up_proj.weight": (FFN, HIDDEN),
            f"{prefix}.mlp.down_proj.weight": (HIDDEN, FFN),
            f"{prefix}.input_layernorm.weight": (HIDDEN,),
            f"{prefix}.post_attention_layernorm.weight": (HIDDEN,),
        }
        layer += 1
    return shapes | {"model.norm.weight": (HIDDEN,)}


def _tensor(name: str, shape: tuple[int, ...], pool: NDArray[np.uint16], number: int) -> TensorSource:
    n_elements = int(np.prod(shape))

    def slabs() -> Iterator[NDArray[np.uint16]]:
        if "norm" in name:
            yield to_bf16(np.ones(n_elements, np.float32))
            return
        offset = number * 1_000_003 % (POOL_ELEMENTS - SLAB_ELEMENTS)
        for begin in range(0, n_elements, SLAB_ELEMENTS):
            start = (offset + begin) % (POOL_ELEMENTS - SLAB_ELEMENTS)
            yield pool[start : start + min(SLAB_ELEMENTS, n_elements - begin)]

    return TensorSource(name, shape, slabs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", metavar="OUT_DIR", type=Path)
    parser.add_argument("--size", default="4G", help="bytes of weights, like 1200M or 4G (default: %(default)s)")
    parser.add_argument("--architecture", choices=("llama", "qwen2"), default="llama")
    arguments = parser.parse_args()
    if arguments.folder.exists():
        raise UsageError(f"{arguments.folder} exists", "remove it or name another directory")
    make_synthetic(arguments.folder, parse_nbytes(arguments.size), arguments.architecture)
    console.result(str(arguments.folder))


if __name__ == "__main__":
    run(main)
