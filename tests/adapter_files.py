"""Small LoRA adapters for the tests, as PEFT saves them, for the checkpoints of `checkpoints`."""

from __future__ import annotations

import re
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from checkpoints import Tensors, llama_config, random_tensors, write_json, write_safetensors

Q, DOWN = "model.layers.0.self_attn.q_proj", "model.layers.1.mlp.down_proj"
RANK = 4


def adapter_tensors(
    modules: str, config: Mapping[str, Any] | None = None, ranks: Mapping[str, int] | None = None
) -> Tensors:
    """The tensors for the modules whose paths match, of a llama; each has rank RANK unless `ranks` tells another."""
    found: Tensors = {}
    for name, values in random_tensors(llama_config() if config is None else config).items():
        module = name.removesuffix(".weight")
        if values.ndim == 2 and re.fullmatch(modules, module):
            rank = (ranks or {}).get(module, RANK)
            found |= pair(module, rank, *values.shape)
    return found


def pair(module: str, rank: int, outputs: int, inputs: int) -> Tensors:
    """The two tensors of a linear module."""
    rng = np.random.default_rng(zlib.crc32(module.encode()))
    prefix = f"base_model.model.{module}"
    return {
        f"{prefix}.lora_A.weight": rng.standard_normal((rank, inputs), np.float32) * np.float32(0.3),
        f"{prefix}.lora_B.weight": rng.standard_normal((outputs, rank), np.float32) * np.float32(0.3),
    }


def write_adapter(
    folder: Path,
    base: Path,
    tensors: Tensors | None = None,
    dtype: str = "F32",
    **settings: Any,
) -> Path:
    """An adapter directory; by default one query matrix of a llama."""
    folder.mkdir(parents=True, exist_ok=True)
    common = {"peft_type": "LORA", "base_model_name_or_path": str(base), "r": RANK, "lora_alpha": 8, "bias": "none"}
    write_json(folder / "adapter_config.json", common | settings)
    tensors = adapter_tensors(re.escape(Q)) if tensors is None else tensors
    write_safetensors(folder / "adapter_model.safetensors", tensors, dtype)
    return folder
