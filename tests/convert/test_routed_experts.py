"""DeepSeek, GLM, gpt-oss and LFM2: what their configs may leave out or say differently, and what is refused.

That the converted ones are right is the business of tests/conformance.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from checkpoints import change_json
from random_checkpoint import PLAIN, make_checkpoint, read_model
from tiny_models import make_model, plan_of

from edgeinfer.errors import UnusableInputError

YARN = {"type": "yarn", "factor": 4.0, "mscale": 1.0, "mscale_all_dim": 0.7, "original_max_position_embeddings": 32}


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("deepseek-v2", {"rope_interleave": False}),
        ("deepseek-v2", {"moe_layer_freq": 2}),
        ("deepseek-v2", {"scoring_func": "tanh"}),
        ("deepseek-v2", {"scoring_func": ["softmax"]}),
        ("deepseek-v2", {"num_experts_per_tok": 5}),
        ("deepseek-v2", {"n_routed_experts": 10**6}),
        ("deepseek-v2", {"first_k_dense_replace": -1}),
        ("deepseek-v2", {"n_group": 3, "topk_group": 2}),
        ("deepseek-v2", {"n_group": 4, "topk_group": 2}),
        ("deepseek-v2", {"n_group": 2, "topk_group": 3}),
        ("deepseek-v2", {"num_hidden_layers": 28}),
        ("deepseek-v2", {"q_lora_rank": 96}),
        ("deepseek-v3", {"num_hidden_layers": 27}),
        ("deepseek-v3", {"rope_scaling": YARN}),
        ("deepseek-v3", {"num_nextn_predict_layers": 10**9}),
        ("glm4", {"partial_rotary_factor": 1.5}),
        ("glm4", {"partial_rotary_factor": 0.01}),
        ("glm4", {"hidden_act": "gelu"}),
        ("glm4-moe", {"num_nextn_predict_layers": -1}),
        ("glm4-moe-lite", {"mlp_layer_types": ["sparse"] * 3}),
        ("glm4-moe-lite", {"first_k_dense_replace": 2**31 - 1, "mlp_layer_types": ["sparse"] * 3}),
        ("glm4-moe-lite", {"rope_interleave": False}),
        ("gpt-oss", {"layer_types": ["full_attention"] * 4}),
        ("gpt-oss", {"swiglu_limit": 5.0}),
        ("gpt-oss", {"num_local_experts": 4096}),
        ("lfm2", {"layer_types": ["conv"]}),
        ("lfm2", {"layer_types": ["conv", "full_attention", "conv", "mamba"]}),
        ("lfm2", {"layer_types": [{}, [], "conv", "conv"]}),
        ("lfm2", {"layer_types": None, "full_attn_idxs": 7}),
        ("lfm2", {"block_ffn_dim_multiplier": -1}),
    ],
    ids=str,
)
def test_what_cannot_be_or_would_be_computed_differently_is_refused(
    name: str, change: dict[str, Any], tmp_path: Path
) -> None:
    checkpoint = make_model(name, tmp_path)
    change_json(checkpoint / "config.json", change)
    with pytest.raises(UnusableInputError) as caught:
        plan_of(checkpoint)
    assert "config.json" in caught.value.message


def test_glm_layers_for_further_tokens_are_counted_by_what_is_there(tmp_path: Path) -> None:
    with_one = plan_of(make_model("glm4-moe", tmp_path / "with", num_nextn_predict_layers=1))
    assert with_one.metadata["glm4moe.block_count"] == 5
    assert with_one.metadata["glm4moe.nextn_predict_layers"] == 1
    assert "blk.4.nextn.eh_proj.weight" in {t.name for t in with_one.tensors}
    lost = make_model("glm4-moe", tmp_path / "lost")
    change_json(lost / "config.json", {"num_nextn_predict_layers": 1})
    plan = plan_of(lost)
    assert plan.metadata["glm4moe.block_count"] == 4
    assert plan.metadata["glm4moe.nextn_predict_layers"] == 0


@pytest.mark.parametrize("stated", [0, 1])
def test_deepseek_layers_for_further_tokens_are_kept(stated: int, tmp_path: Path) -> None:
    checkpoint = make_model("deepseek-v3", tmp_path, num_nextn_predict_layers=1)
    change_json(checkpoint / "config.json", {"num_nextn_predict_layers": stated})
    plan = plan_of(checkpoint)
    assert plan.metadata["deepseek2.block_count"] == 5
    assert plan.metadata["deepseek2.nextn_predict_layers"] == 1
    assert {"blk.4.nextn.eh_proj.weight", "blk.4.attn_k_b.weight"} < {t.name for t in plan.tensors}


def test_parts_of_a_layer_for_further_tokens_are_left_out_and_told(tmp_path: Path) -> None:
    model = read_model("deepseek-v3")
    extra = {f"model.layers.4.{name}.weight": [256] for name in ("enorm", "hnorm", "shared_head.norm")}
    checkpoint = make_checkpoint(replace(model, extra_tensors=extra), PLAIN, tmp_path)
    change_json(checkpoint / "config.json", {"num_nextn_predict_layers": 1})
    plan = plan_of(checkpoint)
    assert plan.metadata["deepseek2.block_count"] == 4
    assert not any(t.name.startswith("blk.4") for t in plan.tensors)
    assert plan.dropped == (
        "3 tensors like model.layers.4.enorm.weight (parts of a layer for the prediction of further tokens)",
    )


def test_using_all_groups_of_experts_is_using_none(tmp_path: Path) -> None:
    """The library ends the process over a file that says so."""
    plan = plan_of(make_model("deepseek-v3", tmp_path, n_group=4, topk_group=4))
    assert not any("group" in key for key in plan.metadata)


def test_deepseek_v3_routes_by_sigmoid_when_its_config_is_silent(tmp_path: Path) -> None:
    plan = plan_of(make_model("deepseek-v3", tmp_path, scoring_func=None, topk_method=None))
    assert plan.metadata["deepseek2.expert_gating_func"] == 2
    assert "blk.3.exp_probs_b.bias" in {t.name for t in plan.tensors}


def test_lfm2_configs_of_old_and_new_form_agree(tmp_path: Path) -> None:
    new = plan_of(make_model("lfm2", tmp_path / "new"))
    checkpoint = make_model("lfm2", tmp_path / "old")
    old = {"layer_types": None, "full_attn_idxs": [1, 3], "block_ff_dim": 768, "intermediate_size": 1, "theta": 1e6}
    change_json(checkpoint / "config.json", {**old, "tie_embedding": True, "rope_theta": 5.0})
    found = plan_of(checkpoint)
    assert found.metadata["lfm2.attention.head_count_kv"].tolist() == [0, 2, 0, 2]
    assert {k: str(v) for k, v in found.metadata.items()} == {k: str(v) for k, v in new.metadata.items()}


@pytest.mark.parametrize(
    ("change", "width"),
    [
        ({}, 512),
        ({"block_ffn_dim_multiplier": 1.3}, 768),
        ({"block_multiple_of": 100}, 600),
        ({"block_auto_adjust_ff_dim": False}, 768),
    ],
    ids=str,
)
def test_lfm2s_feed_forward_is_as_wide_as_transformers_makes_it(
    change: dict[str, Any], width: int, tmp_path: Path
) -> None:
    plan = plan_of(make_model("lfm2", tmp_path, **change))
    assert plan.metadata["lfm2.feed_forward_length"] == width
