"""A size instead of a type: never larger than asked, the same every time, what is planned is written."""

from __future__ import annotations

import json
import math
import re
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from adapter_files import write_adapter
from checkpoints import byte_level_tokenizer, llama_config, random_tensors, write_checkpoint
from processes import PATIENCE_S, started

from edgeinfer.api.convert import convert, plan_conversion
from edgeinfer.api.vocabulary import open_vocabulary
from edgeinfer.convert import measure as measure_module
from edgeinfer.convert.imatrix import save_imatrix
from edgeinfer.convert.kept_errors import KeptErrors
from edgeinfer.convert.measure import measure
from edgeinfer.convert.pipeline import Planned, prepare
from edgeinfer.convert.plan import ConvertPlan
from edgeinfer.convert.sensitivity import sensitivity
from edgeinfer.errors import UnusableInputError, UsageError
from edgeinfer.ggml_types import GGMLType
from edgeinfer.gguf_file.header import read_header
from edgeinfer.native.quantize import GGMLQuantizer
from edgeinfer.options import ConvertOptions
from edgeinfer.types import Importance

# Rows of 96, which only have blocks of 32, and of 256.
CONFIG = llama_config(
    hidden_size=96,
    intermediate_size=256,
    num_hidden_layers=3,
    tie_word_embeddings=False,
    num_attention_heads=3,
    num_key_value_heads=1,
)
T = GGMLType


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("target") / "model", CONFIG, dtype="BF16")


@pytest.fixture(scope="module")
def matrix(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Some columns of each layer's weights matter much more than others."""
    random = np.random.default_rng(1)
    entries = {
        t.name: Importance(random.lognormal(0, 2, t.shape[0]).astype(np.float32), np.ones(1, np.float32))
        for t in _plan(source, type="Q8_0").tensors
        if t.name.startswith("blk.") and len(t.shape) > 1
    }
    path = tmp_path_factory.mktemp("matrix") / "matrix.gguf"
    save_imatrix(path, entries, ["text"], 1, 512)
    return path


@pytest.fixture(autouse=True)
def _own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EDGEINFER_HOME", str(tmp_path / "home"))


def _plan(source: Path, **options: Any) -> ConvertPlan:
    return plan_conversion(source, None, ConvertOptions(**options)).plan


def _prepared(source: Path, **options: Any) -> Planned:
    """Planned without measuring."""
    return prepare(source, None, ConvertOptions(**options), open_vocabulary)


def _types(plan: ConvertPlan) -> dict[str, GGMLType]:
    return {t.name: t.type for t in plan.tensors}


def _loss(plan: ConvertPlan, errors: dict[str, dict[GGMLType, float]]) -> float:
    return sum(
        sensitivity(t.name, 3, is_tied=False) * errors[t.name].get(t.type, 0.0)
        for t in plan.tensors
        if t.name in errors
    )


@pytest.mark.parametrize("bits", [4.3, 5.0, 5.71, 7.2, 8.4])
def test_bits_per_weight_are_never_more_than_asked_and_nearly_that(source: Path, matrix: Path, bits: float) -> None:
    plan = _plan(source, target_bpw=bits, imatrix=matrix)
    assert bits - 0.15 < plan.bits_per_weight <= bits


@pytest.mark.parametrize("surplus_nbytes", [-50_001, 0, 77_777])
@pytest.mark.parametrize("split", [None, 100_000])
def test_all_files_together_are_never_larger_than_asked(
    source: Path, surplus_nbytes: int, split: int | None, tmp_path: Path
) -> None:
    nbytes = _prepared(source, type="Q5_0").nbytes + surplus_nbytes
    options = ConvertOptions(target_size=nbytes, split_max_size=split, verify=False)
    (tmp_path / "out").mkdir()
    convert(source, tmp_path / "out" / "m.gguf", options)
    written = sum(path.stat().st_size for path in (tmp_path / "out").iterdir())
    assert 0.95 * nbytes < written <= nbytes


def test_what_is_planned_is_written_and_it_is_the_same_every_time(source: Path, matrix: Path, tmp_path: Path) -> None:
    outputs = []
    for name, threads in (("a", 1), ("b", 3)):
        options = ConvertOptions(target_bpw=5.3, imatrix=matrix, threads=threads)
        planned = plan_conversion(source, None, options)
        converted = convert(source, tmp_path / f"{name}.gguf", options)
        header = read_header(tmp_path / f"{name}.gguf")
        assert {t.name: t.type for t in header.tensors} == _types(planned.plan)
        assert planned.output.name == "model-5.30bpw.gguf"
        assert converted.bytes == planned.nbytes
        assert converted.type == planned.plan.file_type.name
        assert header.metadata.get("general.file_type") == planned.plan.file_type.id
        assert sum(converted.tensor_types.values()) == converted.parameters
        outputs.append((tmp_path / f"{name}.gguf").read_bytes())
    assert outputs[0] == outputs[1]


def test_more_bits_lose_less_and_mixtures_of_that_size_lose_more(source: Path, matrix: Path, tmp_path: Path) -> None:
    plans = [_plan(source, target_bpw=bits, imatrix=matrix) for bits in (4.5, 5.0, 6.0, 8.0)]
    mixture = _plan(source, type="Q4_K_M", imatrix=matrix)
    ours = _plan(source, target_bpw=mixture.bits_per_weight, imatrix=matrix)
    types = {t for plan in (*plans, ours, mixture) for t in _types(plan).values() if t.is_quantized}
    tensors = [(t, [x for x in types if t.shape[0] % x.block_length == 0]) for t in ours.tensors if len(t.shape) > 1]
    found = measure(tensors, GGMLQuantizer(), 1, KeptErrors(tmp_path, ours.tensors), lambda done, total: None)
    errors = {t.name: error for (t, _), error in zip(tensors, found, strict=True)}
    losses = [_loss(plan, errors) for plan in plans]
    assert losses == sorted(losses, reverse=True)
    assert _loss(ours, errors) < 0.9 * _loss(mixture, errors)


def test_out_of_reach_says_the_range_whose_ends_can_be_had(source: Path, matrix: Path) -> None:
    for options, pattern in (({"target_bpw": 0.5}, "target_bpw"), ({"target_size": 10**9}, "target_size")):
        with pytest.raises(UsageError, match="is out of reach") as caught:
            _prepared(source, imatrix=matrix, **options)
        low, high = (float(w.strip("M")) for w in caught.value.hint.split() if w[0].isdigit())
        scale = 10**6 if pattern == "target_size" else 1
        for end in (low, high):
            value = round(end * scale) if scale > 1 else end
            _prepared(source, imatrix=matrix, **{pattern: value})
        for beyond in (low - 0.02, high + 0.02):
            with pytest.raises(UsageError, match="is out of reach"):
                _prepared(source, imatrix=matrix, **{pattern: math.floor(beyond * scale) if scale > 1 else beyond})


def test_what_the_user_decides_stays(source: Path, matrix: Path) -> None:
    plan = _prepared(
        source,
        target_bpw=7.5,
        imatrix=matrix,
        tensor_type=(("ffn_down", "q6_k"), (r"blk\.2\.attn_q", "f16")),
        token_embedding_type="Q5_1",
        output_tensor_type="F16",
    ).plan
    types = _types(plan)
    assert {types[f"blk.{i}.ffn_down.weight"] for i in range(3)} == {T.Q6_K}
    assert types["blk.2.attn_q.weight"] is T.F16
    assert (types["token_embd.weight"], types["output.weight"]) == (T.Q5_1, T.F16)
    assert plan.bits_per_weight <= 7.5
    everything = (("weight", "q5_0"),)
    with pytest.raises(UsageError, match=r"out of reach: the types that are given leave 5\.\d+ bits per weight"):
        _prepared(source, target_bpw=6.5, tensor_type=everything)
    one_is_left = ((r"blk\.[12]|token|output|ffn|attn_[qvo]", "q5_0"),)
    low, high = re.findall(r"[\d.]+", _refused(source, target_size=1, tensor_type=one_is_left).hint)[:2]
    assert low < high, "of a small range there are more decimals"


def _refused(source: Path, **options: Any) -> UsageError:
    with pytest.raises(UsageError) as caught:
        _prepared(source, **options)
    return caught.value


def test_types_whose_factors_the_values_make_infinite_are_not_chosen(tmp_path: Path) -> None:
    tensors = random_tensors(CONFIG)
    for name in tensors:
        if "up_proj" in name:
            tensors[name] = np.copysign(np.float32(1e9), tensors[name])
    large = write_checkpoint(tmp_path / "large", CONFIG, tensors, dtype="F32")
    types = _types(_plan(large, target_bpw=12.0))
    assert {types[f"blk.{i}.ffn_up.weight"] for i in range(3)} == {T.F32}
    assert T.F32 not in {t for name, t in types.items() if "attn_q" in name}


@pytest.mark.parametrize("spoilt", [b"[" * 100_000, b"NaN", b"-1", b"Infinity", b"\xff\x00", b'"x"', b"null"], ids=str)
def test_kept_errors_that_are_spoilt_are_measured_again(source: Path, tmp_path: Path, spoilt: bytes) -> None:
    expected = _types(_plan(source, target_bpw=6.0))
    (kept,) = (tmp_path / "home" / "quantization-errors").iterdir()
    kept.write_bytes(re.sub(rb"(?<=: )[\d.e-]+(?=[,}])", lambda _: spoilt, kept.read_bytes()))
    assert _types(_plan(source, target_bpw=6.0)) == expected


@pytest.mark.parametrize(
    "options",
    [
        {"type": "Q4_K_M", "target_bpw": 4.5},
        {"target_size": 10**6, "target_bpw": 4.5},
        {"pure": True, "target_size": 10**6},
        {"target_bpw": math.nan},
        {"target_bpw": 0.0},
        {"target_bpw": -1.0},
        {"target_size": 0},
    ],
)
def test_contradictions_and_sizes_that_cannot_be_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        ConvertOptions(**options)


def test_a_quantized_source_is_quantized_again_only_where_that_is_allowed(source: Path, tmp_path: Path) -> None:
    q8 = tmp_path / "model-Q8_0.gguf"
    convert(source, q8, ConvertOptions(type="Q8_0", verify=False))
    with pytest.raises(UsageError, match="is quantized already"):
        _plan(q8, target_bpw=5.0)
    planned = plan_conversion(q8, None, ConvertOptions(target_bpw=5.0, allow_requantize=True))
    assert planned.output.name == "model-5.00bpw.gguf"
    assert 4.85 < planned.plan.bits_per_weight <= 5.0
    assert {T.BF16, T.F16} & set(_types(planned.plan).values()) == set(), "nothing grows beyond its source"


def test_with_calibrate_the_types_follow_from_what_was_computed(source: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("The quick brown fox jumps over the lazy dog. " * 400, "utf-8")
    converted = convert(source, tmp_path / "m.gguf", ConvertOptions(target_bpw=5.0, calibrate=text))
    assert converted.verified
    assert 4.85 < converted.bits_per_weight <= 5.0
    assert read_header(tmp_path / "m.gguf").metadata.get("quantize.imatrix.file") == "text.imatrix.gguf"


def test_calibrating_reads_the_source_as_the_conversion_does(tmp_path: Path) -> None:
    """A tokenizer that only --pre names, and an adapter."""
    source = write_checkpoint(tmp_path / "m", tokenizer=byte_level_tokenizer(r"\p{N}{1,7}|[^\p{N}]+"))
    adapter = write_adapter(tmp_path / "a", source)
    text = tmp_path / "text.txt"
    text.write_text("The quick brown fox jumps over the lazy dog. " * 200, "utf-8")
    lora = ((adapter, 1.0),)
    options = ConvertOptions(type="Q4_0", pre="gpt-2", calibrate=text, lora=lora, tensor_type=(("attn_v", "F16"),))
    assert convert(source, tmp_path / "m.gguf", options).verified


def test_a_weight_that_is_not_a_number_is_named(tmp_path: Path) -> None:
    tensors = random_tensors(CONFIG)
    tensors["model.layers.2.mlp.up_proj.weight"][:] = np.nan
    broken = write_checkpoint(tmp_path / "broken", CONFIG, tensors, dtype="F32")
    with pytest.raises(UnusableInputError, match=r"model\.layers\.2\.mlp\.up_proj\.weight has NaN in row \d+"):
        _plan(broken, target_bpw=6.0)


class _Counting(GGMLQuantizer):
    """Counts what is quantized."""

    def __init__(self) -> None:
        self.calls = 0

    def quantize(self, *arguments: Any) -> None:  # type: ignore[override]
        self.calls += 1
        super().quantize(*arguments)


def test_what_was_measured_is_kept_for_the_same_values_only(source: Path, matrix: Path, tmp_path: Path) -> None:
    def calls(plan: ConvertPlan, types: list[GGMLType]) -> int:
        tensors = [t for t in plan.tensors if t.name.startswith("blk.") and len(t.shape) > 1]
        quantizer, kept = _Counting(), KeptErrors(tmp_path / "kept", tensors)
        measure([(t, types) for t in tensors], quantizer, 2, kept, lambda done, total: None)
        return quantizer.calls

    plain, weighted = _plan(source, type="Q8_0"), _plan(source, type="Q8_0", imatrix=matrix)
    assert calls(plain, [T.Q4_0, T.Q5_0]) == 2 * 21
    assert calls(plain, [T.Q4_0, T.Q5_0]) == 0
    assert calls(plain, [T.Q4_0, T.Q5_1]) == 21, "another type is measured anew"
    assert calls(weighted, [T.Q4_0]) == 21, "another matrix is another error"
    (file,) = (tmp_path / "kept").iterdir()
    data = file.read_bytes()
    file.write_bytes(
        data[:-30] + b"\xff\x00{]\n" + b'{"key": 5, "errors": []}\n{"key": "x", "errors": {"Q9": 1}}\nnull\n'
    )
    assert calls(weighted, [T.Q4_0]) == 1, "the line that was cut off"
    file.unlink()
    file.mkdir()
    assert calls(plain, [T.Q4_0]) == 21, "what cannot be kept is measured all the same"


def test_a_search_that_was_killed_goes_on_from_there(source: Path, matrix: Path, tmp_path: Path) -> None:
    command = ("convert", source, "--imatrix", matrix, "--target-bpw", 5.0, "--dry-run", "--json", "--threads", 1)
    folder = tmp_path / "home" / "quantization-errors"

    def lines() -> list[bytes]:
        return [line for path in folder.glob("*") for line in path.read_bytes().split(b"\n") if line]

    with started(*command) as process:
        deadline_s = time.monotonic() + PATIENCE_S
        while len(lines()) < 3 and process.poll() is None:
            assert time.monotonic() < deadline_s
            time.sleep(0.001)
        process.kill()
    before = [json.loads(line)["key"] for line in lines() if line.endswith(b"}")]
    with started(*command) as process:
        out, _ = process.communicate(timeout=PATIENCE_S)
    after = [json.loads(line)["key"] for line in lines() if line.endswith(b"}")]
    assert len(before) >= 3
    assert after[: len(before)] == before
    assert len(after) == len(set(after)), "nothing was measured twice"
    assert {t["name"]: t["type"] for t in json.loads(out)["tensors"]} == {
        name: kind.name for name, kind in _types(_plan(source, target_bpw=5.0, imatrix=matrix)).items()
    }


def test_of_an_endless_row_only_the_beginning_is_measured(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measure_module, "MAX_COLUMNS", 64)
    seen: set[tuple[int, int]] = set()

    class Quantizer(GGMLQuantizer):
        def quantize(self, ggml_type: int, rows: Any, out: Any, weights: Any = None) -> None:
            seen.add((rows.shape[1], weights.size))
            super().quantize(ggml_type, rows, out, weights)

    importance = Importance(np.ones(256, np.float32), np.ones(1, np.float32))
    tensors = [replace(t, importance=importance) for t in _plan(source, type="Q8_0").tensors if "ffn_down" in t.name]
    kept = KeptErrors(tmp_path, tensors)
    errors = measure([(t, [T.Q8_0, T.Q4_0]) for t in tensors], Quantizer(), 1, kept, lambda done, total: None)
    assert seen == {(64, 64)}
    assert all(error[T.Q8_0] < error[T.Q4_0] for error in errors)
