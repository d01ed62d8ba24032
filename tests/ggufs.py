"""Small GGUF files for the tests, written by gguf-py: an independent writer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np


def write_gguf(path: Path, *, arch: str = "llama", extra: dict[str, Any] | None = None) -> Path:
    """A complete little file: every kind of metadata, tensors of three types, 2 layers with a KV cache."""
    writer = gguf.GGUFWriter(path, arch)
    writer.add_name("tiny")
    writer.add_block_count(2)
    writer.add_context_length(4096)
    writer.add_embedding_length(64)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_bool("test.flag", True)
    writer.add_int64("test.signed", -5)
    writer.add_float64("test.double", 0.25)
    writer.add_array("test.numbers", [1, 2, 3])
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([f"token{i}" for i in range(40)])
    writer.add_token_types([1] * 40)
    writer.add_chat_template("{% for m in messages %}{{ m.content }}\n{% endfor %}")
    for key, value in (extra or {}).items():
        if isinstance(value, list):
            writer.add_array(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_uint32(key, value)
    rng = np.random.default_rng(0)
    writer.add_tensor("token_embd.weight", rng.standard_normal((40, 64), np.float32))
    quantized = gguf.quants.quantize(rng.standard_normal((64, 64), np.float32), gguf.GGMLQuantizationType.Q8_0)
    writer.add_tensor("blk.0.attn_q.weight", quantized, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.add_tensor("blk.1.ffn_up.weight", rng.standard_normal((8, 64)).astype(np.float16))
    writer.add_tensor("output_norm.weight", np.ones(64, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
