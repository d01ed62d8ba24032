"""What a header says about size and memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import pytest
from ggufs import write_gguf

from edgeinfer.gguf_file.describe import describe, kv_nbytes_per_token, recurrent_state_nbytes
from edgeinfer.gguf_file.header import read_header


def _kv(tmp_path: Path, extra: dict[str, Any], arch: str = "llama") -> int | None:
    return kv_nbytes_per_token(read_header(write_gguf(tmp_path / "a.gguf", arch=arch, extra=extra)))


def test_the_sums_are_those_of_the_tensors(tmp_path: Path) -> None:
    found = describe(read_header(write_gguf(tmp_path / "a.gguf")))
    assert {t.type: (t.tensors, t.parameters, t.nbytes) for t in found.types} == {
        "F32": (2, 40 * 64 + 64, 4 * (40 * 64 + 64)),
        "Q8_0": (1, 64 * 64, 64 * 2 * 34),
        "F16": (1, 8 * 64, 2 * 8 * 64),
    }
    assert found.parameters == 41 * 64 + 64 * 64 + 8 * 64
    assert found.bits_per_weight == pytest.approx(8 * found.tensor_nbytes / found.parameters, abs=1e-4)


def test_memory_is_weights_and_a_cache_for_each_context_up_to_the_training_context(tmp_path: Path) -> None:
    found = describe(read_header(write_gguf(tmp_path / "a.gguf")))
    per_token = 2 * 2 * (16 + 16) * 2  # layers, KV heads, key and value lengths, bytes of F16
    assert [(m.ctx_size, m.kv_nbytes) for m in found.memory] == [(2048, 2048 * per_token), (4096, 4096 * per_token)]
    assert all(m.total_nbytes == found.tensor_nbytes + m.kv_nbytes for m in found.memory)


@pytest.mark.parametrize(
    ("extra", "expected"),
    [
        ({}, 2 * 2 * 32 * 2),
        ({"llama.attention.key_length": 24, "llama.attention.value_length": 8}, 2 * 2 * 32 * 2),
        ({"llama.attention.key_length": 64}, 2 * 2 * (64 + 16) * 2),
        ({"llama.attention.shared_kv_layers": 1}, 2 * 32 * 2),
        (
            {"llama.attention.sliding_window_pattern": [1, 0], "llama.attention.key_length_swa": 4},
            (2 * (4 + 16) + 2 * (16 + 16)) * 2,
        ),
    ],
)
def test_the_cache_follows_the_header(tmp_path: Path, extra: dict[str, Any], expected: int) -> None:
    assert _kv(tmp_path, extra) == expected


def test_layers_without_kv_heads_take_nothing(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "a.gguf", "hybrid")
    writer.add_block_count(4)
    writer.add_embedding_length(64)
    writer.add_head_count(4)
    writer.add_array("hybrid.attention.head_count_kv", [0, 0, 2, 0])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    assert kv_nbytes_per_token(read_header(tmp_path / "a.gguf")) == 2 * 32 * 2


MIXER = {"ssm.conv_kernel": 4, "ssm.inner_size": 128, "ssm.state_size": 16, "ssm.group_count": 2}
MIXER_ELEMENTS = 3 * (128 + 2 * 2 * 16) + 16 * 128


@pytest.mark.parametrize(
    ("arch", "keys", "state_elements", "attentions"),
    [
        ("llama", {}, 0, 4),
        ("llama", MIXER, 0, 4),  # a Granite 4 without mixers has their sizes too
        ("mamba", {"ssm.conv_kernel": 4, "ssm.inner_size": 128, "ssm.state_size": 16}, 4 * (3 * 128 + 16 * 128), 0),
        ("mamba2", MIXER, 4 * MIXER_ELEMENTS, 0),
        ("falcon-h1", MIXER, 4 * MIXER_ELEMENTS, 4),
        ("granitehybrid", {**MIXER, "attention.head_count_kv": [0, 2, 0, 0]}, 3 * MIXER_ELEMENTS, 1),
        (
            "nemotron_h",
            {**MIXER, "attention.head_count_kv": [0, 2, 0, 0], "feed_forward_length": [0, 0, 64, 0]},
            2 * MIXER_ELEMENTS,
            1,
        ),
        ("lfm2", {"shortconv.l_cache": 3, "attention.head_count_kv": [0, 2, 0, 2]}, 2 * 2 * 64, 2),
        ("qwen3next", MIXER, 3 * MIXER_ELEMENTS, 1),
        ("qwen3next", {**MIXER, "full_attention_interval": 2}, 2 * MIXER_ELEMENTS, 2),
        ("qwen35", {**MIXER, "full_attention_interval": 2, "nextn_predict_layers": 1}, 2 * MIXER_ELEMENTS, 1),
        ("rwkv7", {"wkv.head_size": 32}, 4 * (2 * 64 + 32 * 64), 0),
    ],
)
def test_recurrent_layers_have_a_state_and_no_cache(
    tmp_path: Path, arch: str, keys: dict[str, Any], state_elements: int, attentions: int
) -> None:
    sizes = {"block_count": 4, "embedding_length": 64, "attention.head_count": 4, "attention.head_count_kv": 2}
    extra = {f"{arch}.{key}": value for key, value in {**sizes, **keys}.items()}
    header = read_header(write_gguf(tmp_path / "a.gguf", arch=arch, extra=extra))
    assert recurrent_state_nbytes(header) == 4 * state_elements
    assert kv_nbytes_per_token(header) == attentions * 2 * 2 * (16 + 16)  # F16, KV heads, key and value


def test_a_long_array_is_abbreviated_and_a_number_is_short(tmp_path: Path) -> None:
    metadata = describe(read_header(write_gguf(tmp_path / "a.gguf"))).metadata
    assert metadata["tokenizer.ggml.tokens"] == {
        "type": "STRING",
        "count": 40,
        "first": [f"token{i}" for i in range(8)],
    }
    assert metadata["test.numbers"] == [1, 2, 3]


def test_a_shard_says_so(tmp_path: Path) -> None:
    found = describe(read_header(write_gguf(tmp_path / "a.gguf", extra={"split.no": 1, "split.count": 3})))
    assert (found.shard, found.shards) == (2, 3)


@pytest.mark.model
def test_the_real_model(smollm2_gguf: Path) -> None:
    found = describe(read_header(smollm2_gguf))
    assert found.has_chat_template
    assert found.metadata["llama.attention.layer_norm_rms_epsilon"] == 1e-05
    assert [(m.ctx_size, m.kv_nbytes) for m in found.memory] == [
        (size, size * 30 * 3 * (64 + 64) * 2) for size in (2048, 4096, 8192)
    ]
