"""Mamba, Falcon-H1, Granite 4 and RWKV-7: what their configs may leave out or say differently, and what is refused.

That the converted ones are right is the business of tests/conformance.
"""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import change_json
from random_checkpoint import PLAIN, make_checkpoint, read_model
from tiny_models import make_model, plan_of

from edgeinfer.api.convert import convert
from edgeinfer.convert.architectures import lookup
from edgeinfer.convert.architectures.transforms import negative_exponential
from edgeinfer.convert.config import Config
from edgeinfer.errors import UnusableInputError
from edgeinfer.options import ConvertOptions

MODELS = (
    "mamba",
    "falcon-mamba",
    "mamba2",
    "falcon-h1",
    "granitehybrid",
    "granitehybrid-dense",
    "granitemoeshared",
    "rwkv7",
)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("mamba", {"use_bias": True}),
        ("mamba", {"use_conv_bias": False}),
        ("mamba", {"expand": 3}),
        ("mamba", {"intermediate_size": 768}),
        ("mamba", {"hidden_act": "gelu"}),
        ("mamba", {"conv_kernel": 1}),
        ("mamba2", {"time_step_limit": [0.0, 0.1]}),
        ("mamba2", {"n_groups": 3}),
        ("mamba2", {"num_heads": 12}),
        ("mamba2", {"head_dim": 64}),
        ("mamba2", {"expand": 0.5}),
        ("falcon-h1", {"mamba_norm_before_gate": True}),
        ("falcon-h1", {"mamba_conv_bias": False}),
        ("falcon-h1", {"projectors_bias": True}),
        ("falcon-h1", {"ssm_multipliers": [1.0] * 4}),
        ("falcon-h1", {"mlp_multipliers": [1.0, -1.0]}),
        ("falcon-h1", {"rope_scaling": {"type": "linear", "factor": 2.0}}),
        ("granitehybrid", {"layer_types": ["mamba"] * 3}),
        ("granitehybrid", {"layer_types": ["mamba", "conv", "mamba", "mamba"]}),
        ("granitehybrid", {"mamba_expand": 3}),
        ("granitehybrid", {"position_embedding_type": "alibi"}),
        ("rwkv7", {"norm_first": False}),
        ("rwkv7", {"norm_eps": 1e-6}),
        ("rwkv7", {"head_dim": 96}),
        ("rwkv7", {"attn": {"layers": [1]}}),
        ("granitehybrid", {"layer_types": ["attention"] * 4}),  # with experts, and without a rope
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


ODD = (
    0,
    -1,
    1,
    3,
    7.5,
    10**6,
    2**31,
    10**400,
    float("nan"),
    float("inf"),
    "",
    "x",
    True,
    None,
    [],
    [0],
    [[]],
    {},
    "auto",
)


@pytest.mark.parametrize("name", MODELS)
def test_odd_values_are_refused_or_harmless(name: str) -> None:
    config = read_model(name).config
    for key in config:
        for value in ODD:
            changed = Config(Path("config.json"), {**config, key: value})
            try:
                architecture = lookup(changed)
                changed = changed.with_defaults(architecture.defaults)
                architecture.metadata(changed)
                list(islice(architecture.tensors(changed), 2000))
            except UnusableInputError:
                pass


def test_a_time_step_rank_that_is_left_open_is_a_16th_of_the_width(tmp_path: Path) -> None:
    for i, rank in enumerate(("auto", None)):
        plan = plan_of(make_model("mamba", tmp_path / str(i), time_step_rank=rank))
        assert plan.metadata["mamba.ssm.time_step_rank"] == 16


def test_mamba_codestrals_names_are_known(tmp_path: Path) -> None:
    model = replace(read_model("mamba2"), prefixes={"": "model."})
    assert len(plan_of(make_checkpoint(model, PLAIN, tmp_path)).tensors) == 3 + 9 * 3


def test_a_tied_head_of_falcon_h1_is_scaled_by_itself(tmp_path: Path) -> None:
    """Its embedding has another scale, and the two are one table."""
    names = {
        tensor.name: tensor
        for tensor in plan_of(make_model("falcon-h1", tmp_path / "a", tie_word_embeddings=True)).tensors
    }
    assert names["output.weight"].parts[0].spec is names["token_embd.weight"].parts[0].spec
    same = make_model(
        "falcon-h1", tmp_path / "b", tie_word_embeddings=True, lm_head_multiplier=2.0, embedding_multiplier=2.0
    )
    assert "output.weight" not in {tensor.name for tensor in plan_of(same).tensors}


def test_a_rope_in_a_hybrid_is_kept(tmp_path: Path) -> None:
    plan = plan_of(make_model("granitehybrid", tmp_path, position_embedding_type="rope"))
    assert plan.metadata["granitehybrid.rope.scaling.finetuned"] is True
    assert plan.metadata["granitehybrid.context_length"] == 4096


def test_ranks_that_an_rwkv_leaves_open_are_those_of_its_matrices(tmp_path: Path) -> None:
    checkpoint = make_model("rwkv7", tmp_path)
    change_json(checkpoint / "config.json", {"a_low_rank_dim": None, "v_low_rank_dim": None})
    metadata = plan_of(checkpoint).metadata
    assert metadata["rwkv7.attention.iclr_lora_rank"] == 48
    assert metadata["rwkv7.attention.value_residual_mix_lora_rank"] == 16


def test_decays_that_overflow_are_refused_with_the_tensors_name(tmp_path: Path) -> None:
    checkpoint = make_model("mamba2", tmp_path)
    weights = checkpoint / "model.safetensors"
    raw = bytearray(weights.read_bytes())
    length = int.from_bytes(raw[:8], "little")
    offset = _offset(raw[8 : 8 + length], "backbone.layers.1.mixer.A_log")
    raw[8 + length + offset : 8 + length + offset + 2] = b"\xc8\x42"  # 100 in BF16
    weights.write_bytes(raw)
    with pytest.raises(UnusableInputError, match=r"backbone\.layers\.1\.mixer\.A_log .* infinite"):
        convert(checkpoint, tmp_path / "out.gguf", ConvertOptions(type="BF16", verify=False))


def _offset(header: bytes, name: str) -> int:
    return int(json.loads(header)[name]["data_offsets"][0])


def test_decays_are_correctly_rounded() -> None:
    logarithms = np.linspace(-20, 20, 10_001, dtype=np.float32)
    decays = logarithms.copy()
    negative_exponential(decays)
    np.testing.assert_array_equal(decays, -np.exp(logarithms.astype(np.float64)).astype(np.float32))
