"""Small checkpoints with random weights and SmolLM2's tokenizer, whose shapes let every rule of the mixtures apply.

SmolLM2's own rows of 576 do not divide into blocks of 256; these of 256 do. The weights come straight from the
generator's bits, so that they are the same with every version of numpy.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
from checkpoint_tokenizer import write_json
from make_checkpoint import cached_checkpoint
from numpy.typing import NDArray
from safetensors_writer import TensorSource, write_weights

HIDDEN, FFN, LAYERS, HEADS, HEAD_DIM = 256, 512, 26, 4, 64
_CONFIGS: dict[str, dict[str, Any]] = {
    # Grouped 4 to 1, an untied head, Llama 3.1's rope.
    "tiny-llama": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_key_value_heads": 1,
        "tie_word_embeddings": False,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 32.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    },
    # Not grouped, a tied head, yarn.
    "tiny-qwen2": {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "num_key_value_heads": 4,
        "tie_word_embeddings": True,
        "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048},
    },
}
NAMES = tuple(_CONFIGS)


def make_tiny(name: str, folder: Path) -> Path:
    """Write the checkpoint `name` (one of NAMES) as `folder/name` and return that path."""
    source = cached_checkpoint("smollm2")
    target = folder / name
    target.mkdir(parents=True)
    smollm2 = json.loads((source / "config.json").read_text("utf-8"))
    config = smollm2 | _CONFIGS[name]
    config |= {
        "hidden_size": HIDDEN,
        "intermediate_size": FFN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "head_dim": HEAD_DIM,
    }
    write_json(target / "config.json", config)
    for file in ("tokenizer.json", "generation_config.json", "chat_template.jinja"):
        shutil.copyfile(source / file, target / file)
    settings = json.loads((source / "tokenizer_config.json").read_text("utf-8"))
    # Otherwise transformers, and with it llama.cpp's script, puts the model class's own rules over tokenizer.json's.
    write_json(target / "tokenizer_config.json", settings | {"tokenizer_class": "PreTrainedTokenizerFast"})
    tensors = [
        TensorSource(tensor, shape, lambda shape=shape, seed=seed: [_random_bf16(shape, seed)])
        for seed, (tensor, shape) in enumerate(_shapes(config).items())
    ]
    write_weights(target, tensors, 16_000_000)
    return target


def _shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    vocab, kv = config["vocab_size"], config["num_key_value_heads"] * HEAD_DIM
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab, HIDDEN), "model.norm.weight": (HIDDEN,)}
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (vocab, HIDDEN)
    for i in range(LAYERS):
        layer = f"model.layers.{i}"
        for x, rows in (("q", HEADS * HEAD_DIM), ("k", kv), ("v", kv)):
            shapes[f"{layer}.self_attn.{x}_proj.weight"] = (rows, HIDDEN)
            if config["model_type"] == "qwen2":
                shapes[f"{layer}.self_attn.{x}_proj.bias"] = (rows,)
        shapes |= {
            f"{layer}.self_attn.o_proj.weight": (HIDDEN, HEADS * HEAD_DIM),
            f"{layer}.mlp.gate_proj.weight": (FFN, HIDDEN),
            f"{layer}.mlp.up_proj.weight": (FFN, HIDDEN),
            f"{layer}.mlp.down_proj.weight": (HIDDEN, FFN),
            f"{layer}.input_layernorm.weight": (HIDDEN,),
            f"{layer}.post_attention_layernorm.weight": (HIDDEN,),
        }
    return shapes


def _random_bf16(shape: tuple[int, ...], seed: int) -> NDArray[np.uint16]:
    """Bits of BF16 numbers of either sign between 2^-9 and 2^-5."""
    count = int(np.prod(shape))
    raw = np.random.PCG64(seed).random_raw(-(-count // 4)).view(np.uint16)[:count]
    exponent = (127 - 9 + (raw >> 7 & 3)) << 7
    return (raw & 0x807F | exponent).astype(np.uint16).reshape(shape)
