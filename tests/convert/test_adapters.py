"""PEFT adapters: what becomes of them, and what is refused. Their logits are tested in tests/conformance."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from adapter_files import DOWN, RANK, Q, adapter_tensors, pair, write_adapter
from checkpoints import change_json, llama_config, random_tensors, write_checkpoint, write_safetensors
from encoded_checkpoint import make_encoded
from numpy.typing import NDArray
from tiny_models import make_model

from edgeinfer.api.convert import convert, plan_conversion
from edgeinfer.convert.adapters.module_patterns import ModulePatterns
from edgeinfer.errors import EdgeinferError, NotFoundError, UnusableInputError, UsageError
from edgeinfer.gguf_file.header import read_header
from edgeinfer.options import ConvertOptions
from edgeinfer.registry import hub
from edgeinfer.registry.hub_id import HubId

Matrix = NDArray[np.float32]
ALL = r"model\.layers\.\d+\..*"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("base") / "tiny")


def tensors_of(path: Path) -> dict[str, Matrix]:
    """The F32 tensors of a file, in numpy's order."""
    raw = path.read_bytes()
    return {
        t.name: np.frombuffer(raw, np.float32, t.nbytes // 4, t.offset).reshape(t.shape[::-1])
        for t in read_header(path).tensors
    }


def added(path: Path, name: str) -> Matrix:
    """What the library adds to a tensor (src/llama-adapter.h, get_scale)."""
    tensors = tensors_of(path)
    a, b = tensors[f"{name}.lora_a"], tensors[f"{name}.lora_b"]
    return np.float32(read_header(path).metadata["adapter.lora.alpha"] / b.shape[-1]) * (b @ a)


def product(tensors: dict[str, Any], module: str) -> Matrix:
    """B times A."""
    a, b = (tensors[f"base_model.model.{module}.lora_{side}.weight"] for side in "AB")
    return np.asarray(b @ a)


def interleaved(matrix: Matrix, n_heads: int) -> Matrix:
    """The rows of a query as llama.cpp has them."""
    return matrix.reshape(n_heads, 2, -1, matrix.shape[1]).swapaxes(1, 2).reshape(matrix.shape)


def test_the_rows_of_a_query_are_reordered_like_its_weight(base: Path, tmp_path: Path) -> None:
    tensors = adapter_tensors(ALL)
    adapter = write_adapter(tmp_path / "a", base, tensors)
    converted = convert(adapter, tmp_path / "a.gguf")
    assert (converted.type, converted.architecture, converted.verified) == ("F32", "llama", True)
    assert converted.tensors == len(tensors)
    header = read_header(tmp_path / "a.gguf")
    assert {key: header.metadata[key] for key in header.metadata if not key.startswith("general.q")} == {
        "general.architecture": "llama",
        "general.type": "adapter",
        "adapter.type": "lora",
        "general.name": "A",
        "adapter.lora.alpha": 8.0,
        "general.file_type": 0,
    }
    wanted = 2 * interleaved(product(tensors, Q), 4)
    np.testing.assert_allclose(added(tmp_path / "a.gguf", "blk.0.attn_q.weight"), wanted, rtol=0, atol=1e-6)
    np.testing.assert_allclose(
        added(tmp_path / "a.gguf", "blk.1.ffn_down.weight"), 2 * product(tensors, DOWN), rtol=1e-6
    )


def test_rank_stabilized_adapters_are_divided_by_the_root(base: Path, tmp_path: Path) -> None:
    tensors = adapter_tensors(re.escape(DOWN))
    convert(write_adapter(tmp_path / "a", base, tensors, use_rslora=True), tmp_path / "a.gguf")
    wanted = 8 / math.sqrt(RANK) * product(tensors, DOWN)
    np.testing.assert_allclose(added(tmp_path / "a.gguf", "blk.1.ffn_down.weight"), wanted, rtol=0, atol=1e-6)


def test_ranks_and_alphas_of_single_modules_count(base: Path, tmp_path: Path) -> None:
    up = "model.layers.1.mlp.up_proj"
    tensors = adapter_tensors(f"{re.escape(DOWN)}|{re.escape(up)}|.*o_proj", ranks={DOWN: 6})
    patterns = {"rank_pattern": {"down_proj": 6}, "alpha_pattern": {r"layers\.1\.mlp\..*": 3, "down_proj": 5}}
    convert(write_adapter(tmp_path / "a", base, tensors, **patterns), tmp_path / "a.gguf")
    for name, module, scale in (
        ("blk.1.ffn_down.weight", DOWN, 3 / 6),  # the first pattern that fits counts
        ("blk.1.ffn_up.weight", up, 3 / RANK),
        ("blk.0.attn_output.weight", "model.layers.0.self_attn.o_proj", 8 / RANK),
    ):
        np.testing.assert_allclose(
            added(tmp_path / "a.gguf", name), scale * product(tensors, module), rtol=0, atol=1e-6
        )


@pytest.mark.parametrize(
    ("file_type", "of_a", "of_b"), [("f16", "F16", "F16"), ("BF16", "BF16", "BF16"), ("q8_0", "Q8_0", "F16")]
)
def test_types(base: Path, tmp_path: Path, file_type: str, of_a: str, of_b: str) -> None:
    adapter = write_adapter(tmp_path / "a", base, dtype="BF16")
    converted = convert(adapter, tmp_path / "a.gguf", ConvertOptions(type=file_type))
    assert [t.type.name for t in read_header(tmp_path / "a.gguf").tensors] == [of_a, of_b]
    assert [fallback.tensor for fallback in converted.fallbacks] == ["blk.0.attn_q.weight.lora_b"] * (of_a != of_b)


def test_the_output_is_named_after_the_directory(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert convert(write_adapter(tmp_path / "my adapter", base)).output == "my-adapter-F32.gguf"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"type": "Q4_K_M"}, "an adapter cannot be Q4_K_M"),
        ({"type": "Q8_0", "fallback": False}, "don't divide"),
        ({"pure": True}, "--pure has no effect"),
        ({"target_bpw": 5.0}, "--target-bpw has no effect"),
        ({"tensor_type": (("x", "F16"),)}, "--tensor-type has no effect"),
        ({"split_max_size": 1000}, "--split-max-size has no effect"),
        ({"pre": "llama-bpe"}, "--pre has no effect"),
        ({"lora": (("b", 1.0),)}, "--lora has no effect"),
    ],
)
def test_options_of_models_are_refused(base: Path, tmp_path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        convert(write_adapter(tmp_path / "a", base), tmp_path / "a.gguf", ConvertOptions(**options))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"peft_type": "IA3"}, "peft_type is 'IA3'"),
        ({"peft_type": None}, "peft_type is None"),
        ({"bias": "lora_only"}, "bias is 'lora_only'"),
        ({"modules_to_save": ["lm_head", "embed_tokens"]}, r"modules_to_save is \['lm_head', 'embed_tokens'\]"),
        ({"use_dora": True}, "use_dora is True"),
        ({"lora_bias": True}, "lora_bias"),
        ({"trainable_token_indices": [1]}, "trainable_token_indices"),
        ({"alora_invocation_tokens": [1, 2]}, "alora_invocation_tokens"),
        ({"target_parameters": ["mlp.experts"]}, "target_parameters"),
        ({"layer_replication": [[0, 1]]}, "layer_replication"),
        ({"use_qalora": True}, "use_qalora"),
        ({"kasa_config": {"beta": 1}}, "unknown settings: kasa_config"),
        ({"init_lora_weights": "pissa_niter_16"}, "init_lora_weights is 'pissa_niter_16'"),
        ({"init_lora_weights": "loftq"}, "init_lora_weights"),
        ({"init_lora_weights": {"a": 1}}, "init_lora_weights"),
        ({"r": 8}, "expected rank 8"),
        ({"r": "4"}, "rank '4'"),
        ({"r": 0}, "rank 0"),
        ({"lora_alpha": 0}, "lora_alpha 0"),
        ({"lora_alpha": "8"}, "lora_alpha '8'"),
        ({"lora_alpha": 1e40}, "lora_alpha 1e[+]40"),
        ({"rank_pattern": ["q_proj"]}, "rank_pattern: not an object"),
        ({"rank_pattern": {"(": 4}}, "rank_pattern: '[(]' is no regular expression"),
        ({"alpha_pattern": {"(a+)+b": 4}}, "alpha_pattern: .* too intricate"),
    ],
    ids=str,
)
def test_settings_that_mean_something_else_are_refused_by_name(
    base: Path, tmp_path: Path, settings: dict[str, Any], message: str
) -> None:
    adapter = write_adapter(tmp_path / "a", base, **settings)
    for convert_it in (
        lambda: plan_conversion(adapter, tmp_path / "a.gguf"),
        lambda: plan_conversion(base, tmp_path / "b.gguf", ConvertOptions(lora=((adapter, 1.0),))),
    ):
        with pytest.raises(UnusableInputError, match=message):
            convert_it()


def test_how_an_adapter_was_trained_does_not_matter(base: Path, tmp_path: Path) -> None:
    settings = {
        "init_lora_weights": "gaussian", "lora_dropout": 0.1, "target_modules": ["q_proj"], "layers_to_transform": [0],
        "task_type": "CAUSAL_LM", "fan_in_fan_out": False, "runtime_config": {"ephemeral_gpu_offload": False},
        "loftq_config": {"a": 1}, "inference_mode": True, "megatron_core": "megatron.core", "modules_to_save": None,
    }  # fmt: skip
    convert(write_adapter(tmp_path / "a", base), tmp_path / "a.gguf")
    convert(write_adapter(tmp_path / "a", base, **settings), tmp_path / "b.gguf")
    assert (tmp_path / "a.gguf").read_bytes() == (tmp_path / "b.gguf").read_bytes()


A, B = f"base_model.model.{Q}.lora_A.weight", f"base_model.model.{Q}.lora_B.weight"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({A: None}, "lora_A or lora_B is missing for model.layers.0.self_attn.q_proj"),
        ({A: None, B: None}, "has no LoRA tensors"),
        ({"base_model.model.lm_head.weight": np.zeros((320, 64), np.float32)}, "1 tensors are no part of a LoRA"),
        ({f"base_model.model.{Q}.lora_magnitude_vector": np.zeros(4, np.float32)}, "no part of a LoRA adapter"),
        ({A: np.zeros((RANK, 60), np.float32)}, r"adds \[64, 60\] to a weight of \[64, 64\]"),
        ({A: np.zeros((RANK, 64, 1), np.float32)}, "lora_A .4, 64, 1."),
        ({A: np.zeros((RANK, 64), np.int32)}, "is I32"),
        ({A: np.zeros((0, 64), np.float32), B: np.zeros((64, 0), np.float32)}, "expected rank 4"),
        (pair("model.layers.7.self_attn.q_proj", RANK, 64, 64), "1 adapted weights are not in the base model"),
        (pair("model.layers.0.input_layernorm", RANK, 64, 64), r"adds \[64, 64\] to a weight of \[64\]"),
        (pair("lm_head", RANK, 320, 64), ""),
        ({"base_model.model.model.embed_tokens.base_layer.weight": np.zeros((322, 64), np.float32)}, "was changed"),
        ({A: np.full((RANK, 64), np.nan, np.float32)}, "NaN in row 0"),
    ],
    ids=lambda value: value[:30] if isinstance(value, str) else "",
)  # fmt: skip
def test_tensors_that_do_not_fit_are_named(base: Path, tmp_path: Path, changes: Any, message: str) -> None:
    tensors = {name: t for name, t in (adapter_tensors(re.escape(Q)) | changes).items() if t is not None}
    adapter = write_adapter(tmp_path / "a", base, tensors)
    if message:  # an adapter of the tied head has a place in the file of a model that has a head of its own
        with pytest.raises(UnusableInputError, match=message):
            convert(adapter, tmp_path / "a.gguf")
    message = message or "are not in the base model: lm_head.weight"
    with pytest.raises(UnusableInputError, match=message):
        convert(base, tmp_path / "b.gguf", ConvertOptions(type="F32", lora=((adapter, 1.0),)))
    assert not (tmp_path / "a.gguf").exists()
    assert not (tmp_path / "b.gguf").exists()


def test_the_base_is_what_the_adapter_states_unless_told(base: Path, tmp_path: Path) -> None:
    adapter = write_adapter(tmp_path / "a", tmp_path / "gone")
    with pytest.raises(NotFoundError, match="the base model of the adapter is not here"):
        plan_conversion(adapter)
    config_only = tmp_path / "config-only"
    config_only.mkdir()
    (config_only / "config.json").write_bytes((base / "config.json").read_bytes())
    assert plan_conversion(adapter, options=ConvertOptions(base=config_only)).plan.architecture == "llama"
    change_json(adapter / "adapter_config.json", {"base_model_name_or_path": None})
    with pytest.raises(UnusableInputError, match="does not say what it was trained on"):
        plan_conversion(adapter)
    with pytest.raises(NotFoundError):
        plan_conversion(adapter, options=ConvertOptions(base=tmp_path))
    with pytest.raises(UsageError, match="--base has no effect"):
        plan_conversion(base, options=ConvertOptions(base=base))


@pytest.mark.parametrize(
    ("name", "claims"),
    [
        ("granitemoe", {"num_local_experts": 10**9}),
        ("mixtral", {"num_local_experts": 1024, "num_hidden_layers": 512}),
        ("llama", {"num_hidden_layers": 10**9}),
    ],
)
def test_a_base_beyond_any_that_could_be_is_refused_at_once(name: str, claims: dict[str, int], tmp_path: Path) -> None:
    base = make_model(name, tmp_path)
    adapter = write_adapter(tmp_path / "a", base)
    change_json(base / "config.json", claims)
    for source, lora in ((adapter, ()), (base, ((adapter, 1.0),))):
        with pytest.raises(UnusableInputError, match=r"config\.json"):
            plan_conversion(source, options=ConvertOptions(lora=lora))


def test_what_is_no_directory_of_an_adapter_or_a_base_is_said_to_be_none(base: Path, tmp_path: Path) -> None:
    adapter = write_adapter(tmp_path / "a", base)
    file = tmp_path / "a.gguf"
    file.write_bytes(b"GGUF")
    for lora, kind, what in (
        (file, UnusableInputError, "not a directory"),
        (tmp_path / "gone", NotFoundError, "no such directory"),
        (base, NotFoundError, "not a PEFT adapter"),
    ):
        with pytest.raises(kind, match=what) as caught:
            plan_conversion(base, options=ConvertOptions(lora=((lora, 1.0),)))
        assert "directory of an adapter" in caught.value.hint
    with pytest.raises(UnusableInputError, match=r"a\.gguf: not a directory") as caught:
        plan_conversion(adapter, options=ConvertOptions(base=file))
    assert "--base" in caught.value.hint


def test_a_base_that_the_hub_does_not_give_can_be_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(hub_id: HubId) -> Path:
        raise NotFoundError(f"{hub_id}: cannot be reached", "check the network")

    monkeypatch.setattr(hub, "cached", lambda hub_id: None)
    monkeypatch.setattr(hub, "fetch_config", unreachable)
    adapter = write_adapter(tmp_path / "a", Path("ORG/BASE"))
    with pytest.raises(NotFoundError, match="the adapter's base model: ORG/BASE: cannot be reached") as caught:
        plan_conversion(adapter)
    assert caught.value.hint == "check the network, or give the base model's directory with --base"


def test_pickled_weights_are_never_opened(base: Path, tmp_path: Path) -> None:
    adapter = write_adapter(tmp_path / "a", base)
    (adapter / "adapter_model.safetensors").rename(adapter / "adapter_model.bin")
    with pytest.raises(UnusableInputError, match="pickled"):
        plan_conversion(adapter)


def merged(base: Path, target: Path, *lora: tuple[Path, float]) -> dict[str, Matrix]:
    convert(base, target, ConvertOptions(type="F32", verify=False, lora=lora))
    return tensors_of(target)


def test_merging_adds_to_the_weights_before_anything_else(base: Path, tmp_path: Path) -> None:
    tensors = adapter_tensors(ALL)
    adapter = write_adapter(tmp_path / "a", base, tensors)
    plain, half = merged(base, tmp_path / "p.gguf"), merged(base, tmp_path / "h.gguf", (adapter, 0.5))
    wanted = plain["blk.0.attn_q.weight"] + interleaved(product(tensors, Q), 4)
    np.testing.assert_allclose(half["blk.0.attn_q.weight"], wanted, rtol=0, atol=1e-6)
    np.testing.assert_array_equal(half["token_embd.weight"], plain["token_embd.weight"])
    twice = merged(base, tmp_path / "t.gguf", (adapter, 0.75), (adapter, -0.25))
    np.testing.assert_allclose(twice["blk.0.attn_q.weight"], wanted, rtol=0, atol=1e-6)


@pytest.mark.parametrize("encoding", ["fp8-block", "gptq4-order"])
def test_a_quantized_source_is_merged_into_as_well(encoding: str, tmp_path: Path) -> None:
    quantized = make_encoded(encoding, tmp_path)
    plain = merged(quantized, tmp_path / "p.gguf")
    rows, columns = plain["blk.0.ffn_up.weight"].shape
    tensors = pair(up := "model.layers.0.mlp.up_proj", RANK, rows, columns)
    adapter = write_adapter(tmp_path / "a", quantized, tensors)
    found = merged(quantized, tmp_path / "m.gguf", (adapter, 1.0))
    wanted = plain["blk.0.ffn_up.weight"] + 2 * product(tensors, up)
    np.testing.assert_allclose(found["blk.0.ffn_up.weight"], wanted, rtol=0, atol=1e-5)


def test_a_scale_of_0_is_no_adapter(base: Path, tmp_path: Path) -> None:
    adapter = write_adapter(tmp_path / "a", base)
    for name, lora in (("p", ()), ("0", ((adapter, 0.0),))):
        convert(base, tmp_path / f"{name}.gguf", ConvertOptions(type="Q8_0", verify=False, lora=lora))
    assert (tmp_path / "p.gguf").read_bytes() == (tmp_path / "0.gguf").read_bytes()


def test_an_adapter_of_a_tied_embedding_is_not_merged(base: Path, tmp_path: Path) -> None:
    prefix = "base_model.model.model.embed_tokens.lora_embedding_"
    tensors = {f"{prefix}A": np.ones((RANK, 320), np.float32), f"{prefix}B": np.ones((64, RANK), np.float32)}
    adapter = write_adapter(tmp_path / "a", base, tensors)
    with pytest.raises(UnusableInputError, match="which is the output matrix of the model, too"):
        merged(base, tmp_path / "m.gguf", (adapter, 1.0))


def test_the_factors_of_an_embedding_lie_the_other_way_round(base: Path, tmp_path: Path) -> None:
    prefix, rng = "base_model.model.model.embed_tokens.lora_embedding_", np.random.default_rng(0)
    a, b = rng.standard_normal((RANK, 320), np.float32), rng.standard_normal((64, RANK), np.float32)
    convert(write_adapter(tmp_path / "a", base, {f"{prefix}A": a, f"{prefix}B": b}), tmp_path / "a.gguf")
    tensors = tensors_of(tmp_path / "a.gguf")
    np.testing.assert_array_equal(tensors["token_embd.weight.lora_a"], a.T)
    np.testing.assert_array_equal(tensors["token_embd.weight.lora_b"], b)


def test_a_merged_file_is_named_after_both(base: Path, tmp_path: Path) -> None:
    options = ConvertOptions(type="q8_0", lora=((write_adapter(tmp_path / "polite", base), 1.0),))
    assert plan_conversion(base, options=options).output == Path("tiny-polite-Q8_0.gguf")


def test_an_adapter_is_not_overwritten_by_what_is_made_of_it(base: Path, tmp_path: Path) -> None:
    adapter = write_adapter(tmp_path / "a", base)
    options = ConvertOptions(type="F32", overwrite=True, lora=((adapter, 1.0),))
    for source in (adapter, base):
        with pytest.raises(UsageError, match="is an input"):
            convert(
                source,
                adapter / "adapter_model.safetensors",
                options if source == base else ConvertOptions(overwrite=True),
            )


def test_what_cannot_be_merged_into(base: Path, tmp_path: Path) -> None:
    adapter = write_adapter(tmp_path / "a", base)
    convert(base, tmp_path / "m.gguf", ConvertOptions(type="F16", verify=False))
    with pytest.raises(UsageError, match="--lora cannot merge into"):
        plan_conversion(tmp_path / "m.gguf", options=ConvertOptions(lora=((adapter, 1.0),)))
    with pytest.raises(NotFoundError):
        plan_conversion(base, options=ConvertOptions(lora=((tmp_path / "gone", 1.0),)))
    other = write_checkpoint(tmp_path / "other", llama_config(hidden_size=128))
    with pytest.raises(UnusableInputError, match=r"to a weight of \[128, 128\]"):
        plan_conversion(other, options=ConvertOptions(lora=((adapter, 1.0),)))


def test_a_head_that_is_stored_although_it_is_tied_can_be_adapted(tmp_path: Path) -> None:
    tensors = random_tensors(llama_config())
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()
    base = write_checkpoint(tmp_path / "base", tensors=tensors, dtype="F32")
    adapter = write_adapter(tmp_path / "a", base, head := pair("lm_head", RANK, 320, 64))
    found = merged(base, tmp_path / "m.gguf", (adapter, 1.0))
    wanted = found["token_embd.weight"] + 2 * product(head, "lm_head")
    np.testing.assert_allclose(found["output.weight"], wanted, rtol=0, atol=1e-6)


def test_patterns_of_modules() -> None:
    patterns = ModulePatterns({"layers.1.q": 1, r"^layers\.\d\.k$": 2, "q": 3, ".*v": 4})
    paths = ("layers.1.q", "x.layers.1.q", "layers.2.q", "xq", "layers.3.k", "x.layers.3.k", "a.bv", "q.x")
    assert [patterns.get(path, 0) for path in paths] == [1, 1, 3, 0, 2, 0, 4, 0]
    for odd in ("(a*)*", "a*b*c*", r"(a)\1", "(?=a)", "x?" * 100, "["):
        with pytest.raises(ValueError, match=r"regular|intricate"):
            ModulePatterns({odd: 1})


def test_damaged_files(base: Path, tmp_path: Path) -> None:
    adapter = write_adapter(tmp_path / "a", base)
    weights, settings = adapter / "adapter_model.safetensors", adapter / "adapter_config.json"
    for path, data in ((weights, weights.read_bytes()[:-1]), (settings, b"[]"), (settings, b"{")):
        sound = path.read_bytes()
        path.write_bytes(data)
        with pytest.raises(EdgeinferError):
            convert(adapter, tmp_path / "a.gguf")
        path.write_bytes(sound)
    write_safetensors(weights, {})
    with pytest.raises(UnusableInputError, match="no LoRA tensors"):
        convert(adapter, tmp_path / "a.gguf")
