"""The plan: everything that doesn't fit is named at once, before a weight is read, and quickly."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import (
    LLAMA3_SPLIT,
    byte_level_tokenizer,
    change_json,
    llama_config,
    qwen2_config,
    random_tensors,
    write_checkpoint,
    write_safetensors,
)

from edgeinfer.api.vocabulary import open_vocabulary
from edgeinfer.convert import resolve as resolve_module
from edgeinfer.convert.pipeline import Planned, prepare
from edgeinfer.convert.plan import file_order
from edgeinfer.errors import EdgeinferError, NotFoundError, UnusableInputError, UsageError
from edgeinfer.options import ConvertOptions

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def _plan(checkpoint: Path, **options: Any) -> Planned:
    return prepare(checkpoint, None, ConvertOptions(**{"type": "Q8_0", **options}), open_vocabulary)


def _refused(checkpoint: Path, kind: type[EdgeinferError] = UnusableInputError, **options: Any) -> str:
    with pytest.raises(kind) as caught:
        _plan(checkpoint, **options)
    return caught.value.message


def _types(planned: Planned) -> dict[str, str]:
    return {t.name: t.type.name for t in planned.plan.tensors}


def test_every_missing_surplus_and_wrong_tensor_is_named(checkpoint: Path) -> None:
    tensors = random_tensors(llama_config())
    del tensors["model.norm.weight"], tensors["model.layers.1.mlp.up_proj.weight"]
    tensors["model.layers.2.mlp.up_proj.weight"] = tensors["extra.bias"] = np.zeros(3, np.float32)
    tensors["model.layers.0.self_attn.k_proj.weight"] = np.zeros((64, 32), np.float32)
    tensors["model.layers.0.self_attn.v_proj.weight"] = np.zeros((32, 64), np.int32)
    tensors["model.layers.0.input_layernorm.weight"] = np.zeros((), np.float32)
    write_safetensors(checkpoint / "model.safetensors", tensors)
    message = _refused(checkpoint)
    for part in (
        "2 tensors are missing: model.norm.weight, model.layers.1.mlp.up_proj.weight",
        "2 tensors are surplus: model.layers.2.mlp.up_proj.weight, extra.bias",
        "k_proj.weight has [64, 32], expected [32, 64]",
        "input_layernorm.weight has [], expected [64]",
        "1 tensors are not floating-point: model.layers.0.self_attn.v_proj.weight is I32",
    ):
        assert part in message


def test_a_config_that_claims_a_million_tensors_is_refused_at_once(tmp_path: Path) -> None:
    claims = {"num_hidden_layers": 512, "num_local_experts": 1024, "num_experts_per_tok": 2}
    config = llama_config(architectures=["MixtralForCausalLM"], **claims)
    checkpoint = write_checkpoint(tmp_path / "model", config, random_tensors(llama_config()))
    started_s = time.process_time()
    message = _refused(checkpoint)
    assert time.process_time() - started_s < 5  # some forty seconds, and a message of 90 MB, when all are counted
    assert "or more tensors are missing" in message
    assert len(message) < 10_000


def test_rows_that_no_model_has_are_refused(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file of holes can hold them; one would be in memory as a whole."""
    monkeypatch.setattr(resolve_module, "MAX_ROW_ELEMENTS", 64)
    with pytest.raises(UnusableInputError, match=r"rows of more than 64 elements: model\.layers\.\d\.mlp\.down_proj"):
        prepare(checkpoint, None, ConvertOptions(), open_vocabulary)


def test_buffers_of_old_checkpoints_are_no_surplus(checkpoint: Path) -> None:
    tensors = random_tensors(llama_config())
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.zeros(8, np.float32)
    write_safetensors(checkpoint / "model.safetensors", tensors)
    assert not any("rotary" in name for name in _types(_plan(checkpoint)))


def test_an_unknown_architecture_is_named_with_the_known_ones(checkpoint: Path) -> None:
    change_json(checkpoint / "config.json", {"architectures": ["FooForCausalLM"]})
    with pytest.raises(UnusableInputError) as caught:
        _plan(checkpoint)
    assert "FooForCausalLM" in caught.value.message
    assert "Qwen2ForCausalLM" in caught.value.hint


@pytest.mark.parametrize("value", [None, [], {}, "LlamaForCausalLM", [None], [["x"]]])
def test_architectures_of_the_wrong_form(checkpoint: Path, value: Any) -> None:
    change_json(checkpoint / "config.json", {"architectures": value})
    assert "architectures" in _refused(checkpoint)


HUGE = 10**400
SIZES = (
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
    "vocab_size", "max_position_embeddings",
)  # fmt: skip


@pytest.mark.parametrize("key", SIZES)
@pytest.mark.parametrize(
    "value", [0, -1, 10**9, HUGE, 1.5, math.nan, math.inf, True, "4", [4], {}], ids=lambda v: str(v)[:9]
)
def test_absurd_sizes_are_refused_at_once(checkpoint: Path, key: str, value: Any) -> None:
    """A loop over 10^9 layers or a table of 10^9 tokens would take forever."""
    change_json(checkpoint / "config.json", {key: value})
    if (key, value) == ("max_position_embeddings", 10**9):
        assert _plan(checkpoint).plan.metadata["llama.context_length"] == 10**9
        return
    assert len(_refused(checkpoint)) < 5000


@pytest.mark.parametrize("key", ["rms_norm_eps", "rope_theta"])
@pytest.mark.parametrize(
    "value", [0, -1e-5, HUGE, 1e300, math.nan, math.inf, True, "1e-5", []], ids=lambda v: str(v)[:9]
)
def test_absurd_numbers_are_refused(checkpoint: Path, key: str, value: Any) -> None:
    change_json(checkpoint / "config.json", {key: value})
    assert key in _refused(checkpoint)


@pytest.mark.parametrize(
    "change",
    [
        {"num_key_value_heads": 3},
        {"num_key_value_heads": 8},
        {"num_attention_heads": 6, "num_key_value_heads": 6},
        {"head_dim": 17},
        {"head_dim": 2**20},
        {"hidden_act": "gelu"},
        {"hidden_act": ["silu"]},
        {"tie_word_embeddings": "yes"},
        {"attention_bias": 1},
        {"partial_rotary_factor": 0.5},
        {"rope_scaling": []},
        {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
        {"rope_scaling": {"rope_type": ["llama3"]}},
        {"rope_scaling": {"rope_type": "linear"}},
        {"rope_scaling": {"rope_type": "yarn", "factor": -1}},
        {"rope_scaling": {"rope_type": "yarn", "factor": 4, "attention_factor": 1.0}},
        {"rope_scaling": {"rope_type": "yarn", "factor": 4, "beta_fast": 0}},
        {"rope_scaling": {"rope_type": "llama3"}},
        {"rope_scaling": {**LLAMA3_ROPE, "factor": 0}},
        {"rope_scaling": {**LLAMA3_ROPE, "low_freq_factor": 4.5}},
        {"rope_scaling": {**LLAMA3_ROPE, "factor": 1e-50}},
        {"rope_parameters": {"rope_theta": 0}},
    ],
    ids=str,
)
def test_what_would_end_the_process_or_change_the_model_silently_is_refused(
    checkpoint: Path, change: dict[str, Any]
) -> None:
    change_json(checkpoint / "config.json", change)
    assert "config.json" in _refused(checkpoint)


def test_more_layers_than_llama_cpp_holds(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path / "model", llama_config(num_hidden_layers=513), {})
    assert "from 1 to 512" in _refused(checkpoint)


def test_what_a_config_leaves_out_has_transformers_default(tmp_path: Path) -> None:
    config = llama_config(
        rms_norm_eps=None, rope_theta=None, max_position_embeddings=None, num_key_value_heads=None,
        tie_word_embeddings=None, hidden_act=None,
    )  # fmt: skip
    metadata = _plan(write_checkpoint(tmp_path / "model", config)).plan.metadata
    assert metadata["llama.attention.layer_norm_rms_epsilon"] == 1e-6
    assert metadata["llama.rope.freq_base"] == 10000.0
    assert metadata["llama.context_length"] == 2048
    assert metadata["llama.attention.head_count_kv"] == 4
    assert "output.weight" in _types(_plan(tmp_path / "model"))


def test_llama_permutes_query_and_key_and_qwen2_does_not(tmp_path: Path) -> None:
    llama = _plan(write_checkpoint(tmp_path / "llama", llama_config(attention_bias=True)))
    qwen2 = _plan(write_checkpoint(tmp_path / "qwen2", qwen2_config()))
    reordered = {t.name for t in llama.plan.tensors if t.parts[0].transform}
    assert reordered == {f"blk.{i}.attn_{x}.{part}" for i in (0, 1) for x in "qk" for part in ("weight", "bias")}
    assert not any(t.parts[0].transform for t in qwen2.plan.tensors)
    assert {"blk.0.attn_output.bias"} == {n for n in _types(llama) if n.startswith("blk.0")} - {
        n for n in _types(qwen2) if n.startswith("blk.0")
    }


def test_a_stated_head_dim_is_used_and_written(tmp_path: Path) -> None:
    planned = _plan(write_checkpoint(tmp_path / "model", llama_config(head_dim=32)))
    shapes = {t.name: t.shape for t in planned.plan.tensors}
    assert shapes["blk.0.attn_q.weight"] == (64, 128)
    assert shapes["blk.0.attn_output.weight"] == (128, 64)
    assert planned.plan.metadata["llama.attention.key_length"] == 32
    assert planned.plan.metadata["llama.rope.dimension_count"] == 32


def test_old_and_new_ways_to_state_a_rope_scaling_agree(checkpoint: Path) -> None:
    found = []
    for change in (
        {"rope_theta": 5e5, "rope_scaling": {"type": "yarn", "factor": 4, "attn_factor": 1.13863}},
        {"rope_parameters": {"rope_type": "YaRN", "rope_theta": 5e5, "factor": 4.0, "attention_factor": 1.13863}},
    ):  # fmt: skip
        write_checkpoint(checkpoint)
        change_json(checkpoint / "config.json", {**change, "original_max_position_embeddings": 128})
        metadata = _plan(checkpoint).plan.metadata
        found.append({key: value for key, value in metadata.items() if ".rope." in key})
    assert found[0] == found[1] == {
        "llama.rope.scaling.type": "yarn",
        "llama.rope.scaling.factor": 4.0,
        "llama.rope.scaling.original_context_length": 128,
        "llama.rope.scaling.yarn_attn_factor": 1.13863,
        "llama.rope.freq_base": 5e5,
        "llama.rope.dimension_count": 16,
    }  # fmt: skip


@pytest.mark.parametrize("kind", ["llama3", "LLAMA3"])
def test_llama3_scaling_becomes_a_tensor_of_divisors(tmp_path: Path, kind: str) -> None:
    config = llama_config(hidden_size=512, rope_theta=500000.0, rope_scaling={**LLAMA3_ROPE, "rope_type": kind})
    tensors = {k: np.zeros(v.shape, np.float32) for k, v in random_tensors(config).items()}
    checkpoint = write_checkpoint(tmp_path / "model", config, tensors, tokenizer=byte_level_tokenizer(LLAMA3_SPLIT))
    (factors,) = (t for t in _plan(checkpoint).plan.tensors if t.name == "rope_freqs.weight")
    values = np.frombuffer(factors.constant, "<f4")
    assert factors.shape == (64,)
    assert set(values[:29]) == {1.0}  # 29 of Llama 3.1's 64 frequencies are kept, 29 slowed down, 6 blended
    assert set(values[35:]) == {8.0}
    assert (np.diff(values[28:36]) > 0).all()


def test_a_tied_head_that_is_stored_all_the_same(tmp_path: Path) -> None:
    config = llama_config()
    tensors = random_tensors(config)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()
    planned = _plan(write_checkpoint(tmp_path / "same", config, tensors))
    assert "output.weight" not in _types(planned)
    assert "lm_head.weight" in planned.plan.dropped[0]
    tensors["lm_head.weight"][-1, -1] += 1
    planned = _plan(write_checkpoint(tmp_path / "other", config, tensors))
    assert "output.weight" in _types(planned)
    assert planned.plan.dropped == ()


def test_the_file_order_is_by_number_not_by_text() -> None:
    names = ["blk.10.a", "blk.2.b", "output.weight", "blk.2.a", "a"]
    assert sorted(names, key=file_order) == ["a", "output.weight", "blk.2.a", "blk.2.b", "blk.10.a"]


def test_overrides_decide_by_the_first_pattern_that_fits(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path / "model", llama_config(tie_word_embeddings=False))
    types = _types(
        _plan(
            checkpoint,
            type="Q4_0",
            tensor_type=((r"BLK\.0\.ffn_\S+", "q5_0"), ("ffn", "q8_0")),
            output_tensor_type="f16",
            token_embedding_type="bf16",
        )
    )
    assert types["blk.0.ffn_down.weight"] == "Q5_0"
    assert types["blk.1.ffn_down.weight"] == "Q8_0"
    assert types["blk.0.ffn_norm.weight"] == "F32"
    assert types["output.weight"] == "F16"
    assert types["token_embd.weight"] == "BF16"
    assert types["blk.0.attn_q.weight"] == "Q4_0"


@pytest.mark.parametrize(
    ("options", "kind", "subject"),
    [
        ({"type": "Q9_9"}, UsageError, "Q9_9"),
        ({"type": ""}, UsageError, "''"),
        ({"tensor_type": (("ffn", "q9"),)}, UsageError, "q9"),
        ({"tensor_type": (("((", "q8_0"),)}, UsageError, "(("),
        ({"tensor_type": (("a{99999999999999999999}", "q8_0"),)}, UsageError, "a{9"),
        ({"tensor_type": (("(" * 3000 + ")" * 3000, "q8_0"),)}, UsageError, "((("),
        ({"tensor_type": (("ffn_typo", "q8_0"),)}, NotFoundError, "ffn_typo"),
        ({"type": "F16", "tensor_type": (("ffn", "q8_0"),)}, UsageError, "F16"),
        ({"output_tensor_type": "nope"}, UsageError, "nope"),
        ({"token_embedding_type": "q4_k"}, UsageError, "token_embd.weight"),
        ({"type": "Q4_K_M", "fallback": False}, UnusableInputError, "blocks of 256"),
    ],
    ids=str,
)
def test_options_that_cannot_be(
    checkpoint: Path, options: dict[str, Any], kind: type[EdgeinferError], subject: str
) -> None:
    assert subject in _refused(checkpoint, kind, **options)


@pytest.mark.parametrize("threads", [0, -1, 10**6])
def test_impossible_thread_counts(threads: int) -> None:
    with pytest.raises(UsageError):
        ConvertOptions(threads=threads)


def test_types_that_need_an_importance_matrix(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path / "m", llama_config(hidden_size=256))
    assert "importance matrix" in _refused(checkpoint, UsageError, type="IQ2_XS")
    assert "importance matrix" in _refused(checkpoint, UsageError, type="Q4_0", tensor_type=(("ffn_up", "iq3_xxs"),))


@pytest.mark.parametrize("which", ["token_embedding_type", "output_tensor_type"])
@pytest.mark.parametrize("wanted", ["IQ1_S", "IQ2_XXS", "IQ2_XS"])
def test_types_that_the_library_cannot_make_without_an_importance_matrix(
    tmp_path: Path, which: str, wanted: str
) -> None:
    """llama.cpp's own rule lets these through for the two; its quantizer then ends the process."""
    config = llama_config(hidden_size=256, tie_word_embeddings=False)
    assert "importance matrix" in _refused(write_checkpoint(tmp_path / "m", config), UsageError, **{which: wanted})


def test_the_size_is_known_beforehand(checkpoint: Path) -> None:
    planned = _plan(checkpoint, type="F32")
    assert planned.plan.n_parameters == sum(v.size for v in random_tensors(llama_config()).values())
    assert planned.plan.bits_per_weight == 32
