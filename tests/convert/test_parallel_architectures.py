"""What GPT-NeoX, StableLM, Falcon and Cohere's models refuse, and how their checkpoints differ among themselves."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import change_json, write_json, write_safetensors
from random_checkpoint import PLAIN, make_checkpoint, read_model

from edgeinfer.api.convert import plan_conversion
from edgeinfer.convert.checkpoint import read_safetensors_header
from edgeinfer.convert.plan import ConvertPlan
from edgeinfer.errors import UnusableInputError


def _make(name: str, folder: Path, **changes: Any) -> Path:
    model = read_model(name)
    return make_checkpoint(replace(model, config=model.config | changes), PLAIN, folder)


def _plan(checkpoint: Path) -> ConvertPlan:
    return plan_conversion(checkpoint).plan


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("olmo3", {"layer_types": ["full_attention"]}),
        ("olmo3", {"layer_types": ["chunked_attention"] * 4}),
        ("olmo3", {"sliding_window": 0}),
        ("gptneox", {"attention_bias": False}),
        ("gptneox", {"hidden_act": "relu"}),
        ("gptneox", {"tie_word_embeddings": True}),
        ("gptneox", {"partial_rotary_factor": 2.0, "rotary_pct": None}),
        ("stablelm", {"hidden_act": "gelu"}),
        ("stablelm", {"partial_rotary_factor": 0.01}),
        ("falcon", {"alibi": True}),
        ("falcon", {"bias": True}),
        ("falcon", {"parallel_attn": False}),
        ("falcon-groups", {"num_kv_heads": 3}),
        ("falcon-groups", {"num_ln_in_parallel_attn": 3}),
        ("command-r", {"use_qk_norm": True}),
        ("command-r-plus", {"use_qk_norm": False}),
        ("command-r", {"attention_bias": True}),
        ("command-r", {"head_dim": 32}),
        ("command-r", {"tie_word_embeddings": False}),
        ("command-r", {"rope_scaling": {"type": "linear", "factor": 2.0}}),
        ("cohere2", {"sliding_window_pattern": 2}),
        ("cohere2", {"layer_types": ["full_attention"] * 5}),
        ("cohere2", {"rotary_pct": 0.5}),
    ],
    ids=str,
)
def test_what_llama_cpp_would_compute_differently_is_refused(name: str, change: dict[str, Any], tmp_path: Path) -> None:
    checkpoint = _make(name, tmp_path)
    change_json(checkpoint / "config.json", change)
    with pytest.raises(UnusableInputError) as caught:
        _plan(checkpoint)
    assert "config.json" in caught.value.message
    assert next(iter(change)) in caught.value.message or "rope" in caught.value.message


def test_a_falcon_of_the_first_kind_has_one_key_value_head_whatever_else_it_says(tmp_path: Path) -> None:
    metadata = _plan(_make("falcon", tmp_path, num_kv_heads=4)).metadata
    assert metadata["falcon.attention.head_count_kv"] == 1


def test_falcon_2_keeps_its_own_rope_and_context(tmp_path: Path) -> None:
    metadata = _plan(_make("falcon", tmp_path, rope_theta=500042.0, max_position_embeddings=8192)).metadata
    assert metadata["falcon.rope.freq_base"] == 500042.0
    assert metadata["falcon.context_length"] == 8192


def test_cohere_biases_are_left_out_only_when_they_are_zero(tmp_path: Path) -> None:
    checkpoint = _make("cohere2", tmp_path)
    name = "model.layers.1.self_attn.q_proj.bias"
    for value in (0, 1):
        write_safetensors(checkpoint / "model-2.safetensors", {name: np.full(256, value, np.float32)})
        files = [checkpoint / "model.safetensors", checkpoint / "model-2.safetensors"]
        weight_map = {name: file.name for file in files for name in read_safetensors_header(file)}
        write_json(checkpoint / "model.safetensors.index.json", {"weight_map": weight_map})
        if value == 0:
            assert "1 biases that are all zero" in _plan(checkpoint).dropped
    with pytest.raises(UnusableInputError, match=r"surplus: model\.layers\.1\.self_attn\.q_proj\.bias"):
        _plan(checkpoint)
