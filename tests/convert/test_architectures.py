"""What the architectures refuse rather than convert into another model, and how checkpoints name the same tensors.

That the converted ones are right is the business of tests/conformance.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import change_json, write_json, write_safetensors
from random_checkpoint import PLAIN, make_checkpoint, read_model
from tiny_models import make_model, plan_of

from edgeinfer.convert.checkpoint import read_safetensors_header
from edgeinfer.errors import UnusableInputError

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("smollm3", {"no_rope_layer_interval": 3}),
        ("smollm3", {"no_rope_layers": [1, 0, 1, 0, 1]}),
        ("smollm3", {"use_sliding_window": True}),
        ("qwen2moe", {"norm_topk_prob": True}),
        ("qwen2moe", {"mlp_only_layers": [0]}),
        ("qwen2moe", {"decoder_sparse_step": 2}),
        ("qwen2moe", {"num_experts_per_tok": 7}),
        ("qwen3", {"attention_bias": True}),
        ("qwen3moe", {"norm_topk_prob": None}),
        ("mixtral", {"num_local_experts": 4096}),
        ("gemma2", {"query_pre_attn_scalar": 128}),
        ("gemma2", {"layer_types": ["full_attention"] * 4}),
        ("gemma2", {"hidden_activation": "gelu"}),
        ("gemma3", {"sliding_window_pattern": 2}),
        ("qwen2", {"rope_scaling": LLAMA3_ROPE}),
        ("smollm3", {"rope_scaling": LLAMA3_ROPE}),
        ("gemma3", {"attn_logit_softcapping": 50.0}),
        ("gemma3", {"use_bidirectional_attention": True}),
        ("phi-long", {"partial_rotary_factor": 1.5}),
        ("phi-long", {"rope_scaling": {"type": "linear", "factor": 2.0}}),
        ("phi-long", {"rope_scaling": {"type": "longrope", "long_factor": [1.0], "short_factor": [1.0]}}),
        (
            "phi-long",
            {"rope_scaling": {"type": "longrope", "long_factor": [1.0] * 31 + [0], "short_factor": [1.0] * 32}},
        ),
        ("olmo2", {"attention_bias": True}),
        ("starcoder2", {"use_bias": False}),
        ("starcoder2", {"hidden_act": "relu"}),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}),
        ("gpt2", {"activation_function": "relu"}),
        ("gpt2", {"n_head": 3}),
    ],
    ids=str,
)
def test_what_llama_cpp_would_compute_differently_is_refused(name: str, change: dict[str, Any], tmp_path: Path) -> None:
    checkpoint = make_model(name, tmp_path)
    change_json(checkpoint / "config.json", change)
    if None in change.values():
        checkpoint = make_model(name, tmp_path / "without", **change)
    with pytest.raises(UnusableInputError) as caught:
        plan_of(checkpoint)
    assert "config.json" in caught.value.message
    assert next(iter(change)) in caught.value.message or "rope" in caught.value.message


def test_a_soft_cap_of_null_is_none_and_not_the_default(tmp_path: Path) -> None:
    checkpoint = make_model("gemma2", tmp_path)
    change_json(checkpoint / "config.json", {"final_logit_softcapping": None})
    with pytest.raises(UnusableInputError, match="final_logit_softcapping"):
        plan_of(checkpoint)


def test_the_parts_of_a_multimodal_model_that_see_are_left_out_and_named(tmp_path: Path) -> None:
    plan = plan_of(make_model("gemma3-multimodal", tmp_path))
    assert plan.dropped == (
        "21 tensors of vision_tower (only the text model converts)",
        "2 tensors of multi_modal_projector (only the text model converts)",
    )
    assert plan.metadata["gemma3.attention.head_count"] == 4


def test_a_multimodal_model_is_not_named_after_its_text_model(tmp_path: Path) -> None:
    text = {**read_model("gemma3-multimodal").config["text_config"], "_name_or_path": "google/text-model"}
    plan = plan_of(make_model("gemma3-multimodal", tmp_path, text_config=text))
    assert plan.metadata["general.name"] == "Gemma3 Multimodal Plain"


@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model.", "model."])
def test_the_text_model_is_found_by_whichever_name_it_has(prefix: str, tmp_path: Path) -> None:
    model = replace(read_model("gemma3-multimodal"), prefixes={"model.": prefix})
    assert len(plan_of(make_checkpoint(model, PLAIN, tmp_path)).tensors) == 80


def test_gpt2_with_and_without_a_prefix_and_with_its_old_masks(tmp_path: Path) -> None:
    model = replace(read_model("gpt2"), prefixes={}, extra_tensors={"h.0.attn.bias": [1, 1, 64, 64]})
    plain, prefixed = make_checkpoint(model, PLAIN, tmp_path / "plain"), make_model("gpt2", tmp_path / "prefixed")
    assert [(t.name, t.shape) for t in plan_of(plain).tensors] == [(t.name, t.shape) for t in plan_of(prefixed).tensors]


def test_a_tensor_that_is_there_under_two_names(tmp_path: Path) -> None:
    checkpoint = make_model("gpt2", tmp_path)
    write_safetensors(checkpoint / "model-2.safetensors", {"ln_f.bias": np.zeros(256, np.float32)})
    files = [checkpoint / "model.safetensors", checkpoint / "model-2.safetensors"]
    weight_map = {name: file.name for file in files for name in read_safetensors_header(file)}
    write_json(checkpoint / "model.safetensors.index.json", {"weight_map": weight_map})
    with pytest.raises(UnusableInputError, match=r"transformer\.ln_f\.bias"):
        plan_of(checkpoint)


def test_a_missing_expert_is_named(tmp_path: Path) -> None:
    checkpoint = make_model("mixtral", tmp_path)
    change_json(checkpoint / "config.json", {"num_local_experts": 9})
    with pytest.raises(UnusableInputError, match=r"block_sparse_moe\.experts\.8\.w1\.weight"):
        plan_of(checkpoint)


def test_a_missing_layer_of_a_stack_is_a_wrong_shape(tmp_path: Path) -> None:
    checkpoint = make_model("granitemoe", tmp_path)
    change_json(checkpoint / "config.json", {"num_local_experts": 3})
    with pytest.raises(UnusableInputError, match=r"input_linear\.weight has \[4, 512, 256\], expected \[3, 512, 256\]"):
        plan_of(checkpoint)


def test_the_size_of_a_model_with_experts_is_told_by_the_expert(tmp_path: Path) -> None:
    metadata = plan_of(make_model("mixtral", tmp_path)).metadata
    assert metadata["general.size_label"] == "8x1.7M"


def test_both_ways_to_state_a_rope_for_each_kind_of_layer(tmp_path: Path) -> None:
    scaled = {"rope_type": "linear", "factor": 8.0}
    old = plan_of(make_model("gemma3", tmp_path / "old", rope_theta=5e5, rope_local_base_freq=2e3, rope_scaling=scaled))
    kinds = {"full_attention": {"rope_theta": 5e5, **scaled}, "sliding_attention": {"rope_theta": 2e3}}
    new = plan_of(
        make_model(
            "gemma3",
            tmp_path / "new",
            rope_theta=None,
            rope_local_base_freq=None,
            rope_scaling=None,
            rope_parameters=kinds,
        )
    )
    ropes = [{k: v for k, v in plan.metadata.items() if ".rope." in k} for plan in (old, new)]
    assert ropes[0] == ropes[1]
    assert ropes[0]["gemma3.rope.freq_base_swa"] == 2e3
