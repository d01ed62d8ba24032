"""Gemma 3n: what of its config llama.cpp computes in one way only, and the parts that only its checkpoints have."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import change_json
from gguf_parts import T, array, take_apart
from random_checkpoint import PLAIN, make_checkpoint, read_model

from edgeinfer.api.convert import convert, plan_conversion
from edgeinfer.api.load import load
from edgeinfer.convert.plan import ConvertPlan
from edgeinfer.errors import UnusableInputError
from edgeinfer.options import ConvertOptions

_LAYERS = 25


def _make(folder: Path, **changes: Any) -> Path:
    model = read_model("gemma3n")
    return make_checkpoint(replace(model, config=model.config | {"intermediate_size": 64} | changes), PLAIN, folder)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _make(tmp_path_factory.mktemp("gemma3n"))


def _plan(checkpoint: Path, **options: Any) -> ConvertPlan:
    return plan_conversion(checkpoint, options=ConvertOptions(**options)).plan


def _with(checkpoint: Path, folder: Path, **changes: Any) -> Path:
    """The same weights with another config."""
    for file in checkpoint.iterdir():
        (folder / file.name).symlink_to(file)
    (folder / "config.json").unlink()
    (folder / "config.json").write_bytes((checkpoint / "config.json").read_bytes())
    change_json(folder / "config.json", changes)
    return folder


@pytest.mark.parametrize(
    "changes",
    [
        {"altup_num_inputs": 3},
        {"altup_active_idx": 1},
        {"altup_correct_scale": False},
        {"laurel_rank": 32},
        {"hidden_size_per_layer_input": 128},
        {"final_logit_softcapping": 20.0},
        {"attention_bias": True},
        {"hidden_activation": "silu"},
        {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
        {"num_kv_shared_layers": 4},
        {"num_kv_shared_layers": -1},
        {"num_kv_shared_layers": "x"},
        {"layer_types": ["sliding_attention"] * _LAYERS},
        {"layer_types": ["full_attention"] * _LAYERS},
        {"layer_types": ["full_attention"] * (_LAYERS - 1)},
        {"layer_types": "x"},
        {"intermediate_size": []},
        {"intermediate_size": [64] * 24 + [128]},
        {"intermediate_size": {}},
        {"intermediate_size": [[64]] * _LAYERS},
        {"activation_sparsity_pattern": [0.95] * _LAYERS},
        {"activation_sparsity_pattern": [0.9] * 10 + [0.0] * 15},
        {"activation_sparsity_pattern": [0.95] * 10},
        {"activation_sparsity_pattern": 0.95},
        {"vocab_size_per_layer_input": 321},
        {"vocab_size_per_layer_input": 0},
        {"vocab_size": 320 + 4097},
    ],
    ids=str,
)
def test_what_llama_cpp_would_compute_differently_is_refused(
    changes: dict[str, Any], checkpoint: Path, tmp_path: Path
) -> None:
    with pytest.raises(UnusableInputError, match=r"config\.json"):
        _plan(_with(checkpoint, tmp_path, **changes))


def test_what_the_config_may_leave_out_or_list(checkpoint: Path, tmp_path: Path) -> None:
    stated = {
        "intermediate_size": [64] * _LAYERS,
        "activation_sparsity_pattern": [0.95] * 10 + [0.0] * 15,
        "layer_types": [("sliding" if (i + 1) % 5 else "full") + "_attention" for i in range(_LAYERS)],
        "hidden_activation": None,
        "final_logit_softcapping": None,
    }
    plan, expected = _plan(_with(checkpoint, tmp_path, **stated)), _plan(checkpoint)
    for key, value in ((key, value) for key, value in expected.metadata.items() if key.startswith("gemma3n.")):
        np.testing.assert_equal(plan.metadata[key], value, err_msg=key)


def test_tokens_without_an_embedding_per_layer_have_the_first_ones(tmp_path: Path) -> None:
    plan = _plan(_make(tmp_path, vocab_size_per_layer_input=300))
    (embedding,) = (t for t in plan.tensors if t.name == "per_layer_token_embd.weight")
    assert embedding.shape == (256 * _LAYERS, 320)
    assert [(part.first_row, part.n_rows) for part in embedding.parts] == [(0, 300), *[(0, 1)] * 20]


def test_the_text_model_of_a_multimodal_one(checkpoint: Path, tmp_path: Path) -> None:
    model = read_model("gemma3n")
    wrapped = {
        "architectures": ["Gemma3nForConditionalGeneration"],
        "model_type": "gemma3n",
        "text_config": model.config | {"intermediate_size": 64},
        "vision_config": {"hidden_size": 32, "model_type": "gemma3n_vision"},
    }
    extra = {"model.vision_tower.a": [2, 2], "model.audio_tower.b": [2], "model.embed_vision.c": [2, 2]}
    prefixes = {"model.": "model.language_model."}
    whole = replace(model, config=wrapped, prefixes=prefixes, extra_tensors=extra)
    plan, expected = _plan(make_checkpoint(whole, PLAIN, tmp_path)), _plan(checkpoint)
    assert [(t.name, t.shape, t.type) for t in plan.tensors] == [(t.name, t.shape, t.type) for t in expected.tensors]
    assert len(plan.dropped) == 3


def test_a_file_with_a_shared_cache_that_does_not_fit_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    output = tmp_path / "model.gguf"
    convert(checkpoint, output, ConvertOptions(type="Q8_0", verify=False))
    for kinds in ([1] * 20 + [0] * 5, [0] * 20 + [1] * 5, [1] * 19):
        broken = take_apart(output).changed({"gemma3n.attention.sliding_window_pattern": array(T.BOOL, kinds)})
        output.write_bytes(broken.encoded())
        with pytest.raises(UnusableInputError, match="share the cache"):
            load(output)
