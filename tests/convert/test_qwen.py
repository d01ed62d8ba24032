"""Qwen's text models of multimodal checkpoints and its hybrids: what their configs may say, and what is refused.

That the converted ones are right is the business of tests/conformance.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import change_json
from random_checkpoint import PLAIN, make_checkpoint, read_model
from safetensors_writer import TensorSource, write_weights

from edgeinfer.api.convert import plan_conversion, run_conversion
from edgeinfer.convert.checkpoint import read_safetensors_header
from edgeinfer.convert.plan import ConvertPlan
from edgeinfer.errors import UnusableInputError
from edgeinfer.options import ConvertOptions


def _plan(name: str, folder: Path, **changes: Any) -> ConvertPlan:
    """Of the plain variant with a changed config, as the weights stay."""
    checkpoint = make_checkpoint(read_model(name), PLAIN, folder)
    change_json(checkpoint / "config.json", changes)
    return plan_conversion(checkpoint).plan


def _text_config(name: str, **changes: Any) -> dict[str, Any]:
    config = read_model(name).config
    return {"text_config": {**config["text_config"], **changes}}


def _sections(name: str, sections: Any) -> dict[str, Any]:
    rope = {"rope_scaling": {"type": "mrope", "mrope_section": sections}}
    return rope if name == "qwen2vl" else _text_config(name, **rope)


@pytest.mark.parametrize("name", ["qwen2vl", "qwen3vl", "qwen3vlmoe"])
@pytest.mark.parametrize(
    "sections", [[8, 12], [8, 12, 13], [0, 16, 16], [16, 12, 4, 0], "x", [8.0, 12, 12], [True] * 3]
)
def test_sections_that_do_not_share_out_a_head_are_refused(name: str, sections: Any, tmp_path: Path) -> None:
    with pytest.raises(UnusableInputError, match="mrope_section"):
        _plan(name, tmp_path, **_sections(name, sections))


def test_sections_that_stand_in_blocks_may_differ_more_than_those_in_turn(tmp_path: Path) -> None:
    _plan("qwen2vl", tmp_path / "blocks", **_sections("qwen2vl", [20, 6, 6]))
    with pytest.raises(UnusableInputError, match="would not turn all pairs"):
        _plan("qwen3vl", tmp_path / "turns", **_sections("qwen3vl", [20, 6, 6]))


def test_a_config_without_sections(tmp_path: Path) -> None:
    with pytest.raises(UnusableInputError, match="mrope_section"):
        _plan("qwen2vl", tmp_path, rope_scaling=None)
    sections = {"rope_scaling": None, "head_dim": 128, "num_attention_heads": 2, "num_key_value_heads": 1}
    model = read_model("qwen3vl")
    model = replace(model, config=model.config | _text_config("qwen3vl", **sections))
    plan = plan_conversion(make_checkpoint(model, PLAIN, tmp_path / "default")).plan
    assert list(plan.metadata["qwen3vl.rope.dimension_sections"]) == [24, 20, 20, 0]


@pytest.mark.parametrize("taps", ["x", [0] * 5, 3])
def test_more_layers_that_listen_to_images_than_layers(taps: Any, tmp_path: Path) -> None:
    with pytest.raises(UnusableInputError, match="deepstack_visual_indexes"):
        _plan("qwen3vl", tmp_path, vision_config={"deepstack_visual_indexes": taps})


def test_the_image_encoder_is_left_out_where_the_text_model_has_no_section_of_its_own(tmp_path: Path) -> None:
    assert _plan("qwen2vl", tmp_path).dropped == ("18 tensors of visual (only the text model converts)",)


def test_experts_of_an_odd_length_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UnusableInputError, match="odd number"):
        _plan("qwen3vlmoe", tmp_path, **_text_config("qwen3vlmoe", hidden_size=255))


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("qwen3next", {"linear_value_head_dim": 32}),
        ("qwen3next", {"linear_num_value_heads": 5}),
        ("qwen3next", {"linear_num_value_heads": 2**31 - 2}),
        ("qwen3next", {"linear_num_key_heads": 0}),
        ("qwen3next", {"linear_conv_kernel_dim": 1}),
        ("qwen3next", {"full_attention_interval": 0}),
        ("qwen3next", {"layer_types": ["linear_attention"] * 4}),
        ("qwen3next", {"layer_types": ["full_attention"] * 4}),
        ("qwen3next", {"layer_types": ["linear_attention", "full_attention"]}),
        ("qwen3next", {"layer_types": [[], {}, "linear_attention", "full_attention"]}),
        ("qwen3next", {"layer_types": "full"}),
        ("qwen3next", {"norm_topk_prob": False}),
        ("qwen3next", {"mlp_only_layers": [1]}),
        ("qwen3next", {"attention_bias": True}),
        ("qwen3next", {"num_experts": 10**6}),
        ("qwen3next", {"partial_rotary_factor": 1.5}),
        ("qwen35moe", {"num_experts_per_tok": 9}),
        ("qwen35moe", {"rope_parameters": {"rope_theta": 1e7, "mrope_section": [3, 3, 3]}}),
    ],
    ids=str,
)
def test_hybrids_that_llama_cpp_would_compute_differently_are_refused(
    name: str, change: dict[str, Any], tmp_path: Path
) -> None:
    with pytest.raises(UnusableInputError) as caught:
        _plan(name, tmp_path, **change)
    key = next(iter(change))
    assert key in caught.value.message or "mrope_section" in caught.value.message


@pytest.mark.parametrize("name", ["qwen3next", "qwen35moe"])
@pytest.mark.parametrize("lost", ["mtp.", "mtp.layers.", "mtp.fc."])
def test_a_finetune_that_lost_its_layer_for_one_more_token(name: str, lost: str, tmp_path: Path) -> None:
    checkpoint = make_checkpoint(read_model(name), PLAIN, tmp_path)
    _rewrite(checkpoint, lambda tensor: None if tensor.startswith(lost) else tensor)
    plan = plan_conversion(checkpoint).plan
    assert plan.metadata[f"{name}.block_count"] == 4
    assert f"{name}.nextn_predict_layers" not in plan.metadata
    assert list(plan.metadata[f"{name}.attention.recurrent_layers"]) == [True, True, True, False]
    assert not any(tensor.name.startswith("blk.4.") for tensor in plan.tensors)
    assert bool(plan.dropped) == (lost != "mtp.")


def test_a_second_layer_for_further_tokens_is_left_out_and_said(tmp_path: Path) -> None:
    model = replace(read_model("qwen3next"), extra_tensors={"mtp.layers.1.input_layernorm.weight": [256]})
    plan = plan_conversion(make_checkpoint(model, PLAIN, tmp_path)).plan
    assert plan.metadata["qwen3next.nextn_predict_layers"] == 1
    assert plan.dropped == (
        "mtp.layers.1.input_layernorm.weight (for the prediction of several tokens at a time)",
    )  # fmt: skip


def test_the_layer_for_one_more_token_may_stand_within_the_model(tmp_path: Path) -> None:
    checkpoint = make_checkpoint(read_model("qwen3next"), PLAIN, tmp_path)
    _rewrite(checkpoint, lambda tensor: f"model.{tensor}" if tensor.startswith("mtp.") else tensor)
    assert plan_conversion(checkpoint).plan.metadata["qwen3next.nextn_predict_layers"] == 1


def test_a_logarithm_too_large_to_be_one_is_refused(tmp_path: Path) -> None:
    checkpoint = make_checkpoint(read_model("qwen35"), PLAIN, tmp_path)
    header = read_safetensors_header(checkpoint / "model.safetensors")
    spec = next(spec for name, spec in header.items() if name.endswith("layers.1.linear_attn.A_log"))
    with open(spec.path, "r+b") as file:
        file.seek(spec.offset)
        file.write(b"\x80\x43")  # 256 in BF16
    planned = plan_conversion(checkpoint, tmp_path / "out.gguf")
    with pytest.raises(UnusableInputError, match=r"layers\.1\.linear_attn\.A_log has values near row 0"):
        run_conversion(planned, ConvertOptions(verify=False))


def _rewrite(checkpoint: Path, renamed: Callable[[str], str | None]) -> None:
    """The weights with other names in the header, and without those that are renamed to None."""
    path = checkpoint / "model.safetensors"
    raw = path.read_bytes()
    tensors = {}
    for name, spec in read_safetensors_header(path).items():
        if (new := renamed(name)) is not None:
            tensors[new] = (spec, raw[spec.offset : spec.offset + spec.nbytes])
    sources = [
        TensorSource(name, spec.shape, lambda data=data: [np.frombuffer(data, np.uint16)], spec.dtype)
        for name, (spec, data) in tensors.items()
    ]
    path.unlink()
    write_weights(checkpoint, sources, 1 << 30)
