"""Qwen's text models of multimodal checkpoints and its hybrids: what their configs may say, and what is refused.

That the converted ones are right is the business of tests/conformance.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from checkpoints import change_json
from random_checkpoint import PLAIN, make_checkpoint, read_model

from edgeinfer.api.convert import plan_conversion
from edgeinfer.convert.plan import ConvertPlan
from edgeinfer.errors import UnusableInputError


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
