"""The synthetic checkpoint: of the size asked for, finite, complete."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from make_synthetic_checkpoint import make_synthetic
from safetensors import safe_open


@pytest.mark.model
@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
def test_it_has_the_size_and_every_tensor_is_finite(tmp_path: Path, architecture: str) -> None:
    make_synthetic(tmp_path / "out", 300_000_000, architecture)
    config = json.loads((tmp_path / "out/config.json").read_text())
    (path,) = (tmp_path / "out").glob("*.safetensors")
    assert 300_000_000 <= path.stat().st_size < 450_000_000
    with safe_open(path, "np") as file:
        names = set(file.keys())
    assert f"model.layers.{config['num_hidden_layers'] - 1}.mlp.up_proj.weight" in names
    assert ("model.layers.0.self_attn.q_proj.bias" in names) == (architecture == "qwen2")
    with open(path, "rb") as raw:
        data_offset = 8 + int.from_bytes(raw.read(8), "little")
    bits = np.memmap(path, "<u2", "r", data_offset)
    assert all(((part & 0x7F80) != 0x7F80).all() for part in np.array_split(bits, 64))
