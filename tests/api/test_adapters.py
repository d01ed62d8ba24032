"""Models with adapters: what they change, what they must not share with the model alone, and what is refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from adapter_files import adapter_tensors, write_adapter
from checkpoints import llama_config, write_checkpoint
from random_adapter import TinyAdapter, make_adapter
from random_checkpoint import PLAIN, make_checkpoint, read_model

from edgeinfer.api.adapters import open_adapters
from edgeinfer.api.convert import convert
from edgeinfer.api.embed import load_encoder
from edgeinfer.api.load import load
from edgeinfer.api.memory import plan_run
from edgeinfer.errors import UnusableInputError, UsageError
from edgeinfer.gguf_file.header import read_header
from edgeinfer.options import Adapters, ConvertOptions, RuntimeOptions, SamplingParams, parse_adapter
from edgeinfer.quality.evaluate import evaluate

GREEDY = SamplingParams(temperature=0, ignore_eos=True)
TEXT = "The quick brown fox jumps over the lazy dog. " * 30
"""Some blocks of the prefix cache."""


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A llama of four layers, and an adapter of all its matrices."""
    folder = tmp_path_factory.mktemp("adapters")
    config = llama_config(num_hidden_layers=4, max_position_embeddings=2048)
    base = write_checkpoint(folder / "base", config)
    adapter = write_adapter(folder / "adapter", base, adapter_tensors(r"model\.layers\..*", config))
    convert(base, folder / "model.gguf", ConvertOptions(type="F16", verify=False))
    convert(adapter, folder / "adapter.gguf")
    return folder / "model.gguf", folder / "adapter.gguf"


def answer(model: Path, lora: Adapters = (), *, draft: str = "off", cache: bool = False) -> tuple[str, int]:
    """The text of an answer, and how many tokens of its prompt came from the prefix cache."""
    options = RuntimeOptions(lora=lora, draft=draft, prefix_cache=cache, threads=1)
    with load(model, options) as loaded:
        found = loaded.generate(TEXT, raw=True, params=GREEDY, max_tokens=24)
    return found.text, found.usage.cached_tokens


def test_scale_0_is_the_model_alone_and_any_other_is_not(files: tuple[Path, Path]) -> None:
    model, adapter = files
    alone = answer(model)[0]
    for nothing in (0.0, -0.0, 1e-320, -1e-46):  # the last two are 0 in F32, which is what the library takes
        assert answer(model, ((adapter, nothing),))[0] == alone
    texts = {answer(model, ((adapter, scale),))[0] for scale in (1.0, -1.0)}
    assert len(texts | {alone}) == 3


def test_an_adapter_given_twice_counts_twice(files: tuple[Path, Path]) -> None:
    model, adapter = files
    assert answer(model, ((adapter, 0.5), (adapter, 0.5)))[0] == answer(model, ((adapter, 1.0),))[0]


def test_what_is_cached_is_cached_for_this_adapter_and_this_scale(files: tuple[Path, Path]) -> None:
    model, adapter = files
    fresh = {scale: answer(model, ((adapter, scale),))[0] for scale in (0.0, 1.0, 0.25)}
    for scale, text in fresh.items():
        assert answer(model, ((adapter, scale),), cache=True) == (text, 0)
        again, n_cached = answer(model, ((adapter, scale),), cache=True)
        assert again == text
        assert n_cached > 0
    assert answer(model, cache=True)[1] > 0  # with scale 0 it is the model's own cache


def test_drafts_do_not_change_the_text(files: tuple[Path, Path]) -> None:
    model, adapter = files
    plain = answer(model, ((adapter, 1.0),))[0]
    for draft in ("auto", "layers"):
        assert answer(model, ((adapter, 1.0),), draft=draft)[0] == plain


def test_what_passes_cost_is_learned_with_the_adapter(files: tuple[Path, Path]) -> None:
    model, adapter = files
    paths = set()
    for lora in ((), ((adapter, 1.0),)):
        with load(model, RuntimeOptions(lora=lora, prefix_cache=False)) as loaded:
            paths.add(loaded._costs.path)
    assert len(paths) == 2


def test_the_memory_plan_counts_adapters(files: tuple[Path, Path]) -> None:
    model, adapter = files
    header, options = read_header(model), RuntimeOptions(lora=((adapter, 1.0),))
    with_it = plan_run(header, options, adapters=open_adapters(header, options.lora))
    more = with_it.needs.total - plan_run(header, options).needs.total
    assert more == pytest.approx(read_header(adapter).tensor_nbytes, abs=64 << 10)  # and its header


def divergence(model: Path, reference: Path, lora: Adapters = ()) -> float:
    """The mean divergence of a model with an adapter from another one."""
    text = reference.with_name("text.txt")
    text.write_text(TEXT, "utf-8")
    options = RuntimeOptions(lora=lora)
    found = evaluate(model, text, reference=reference, ctx_size=64, chunks=2, options=options)
    assert found.divergence
    return found.divergence.kld_mean


def test_a_reference_has_no_adapter(files: tuple[Path, Path]) -> None:
    model, adapter = files
    assert divergence(model, model) < 1e-6 < 1e-4 < divergence(model, model, ((adapter, 1.0),))


def test_merged_in_q8_0_is_close_to_beside(files: tuple[Path, Path], tmp_path: Path) -> None:
    folder, adapter = files[1].parent, files[1]
    convert(folder / "base", tmp_path / "plain.gguf", ConvertOptions(type="Q8_0", verify=False))
    options = ConvertOptions(type="Q8_0", lora=((folder / "adapter", 1.0),))
    convert(folder / "base", tmp_path / "merged.gguf", options)
    beside = divergence(tmp_path / "plain.gguf", tmp_path / "merged.gguf", ((adapter, 1.0),))
    assert beside < divergence(tmp_path / "plain.gguf", tmp_path / "merged.gguf") / 20


def test_what_llama_cpp_leaves_out_is_refused_by_name(tmp_path: Path) -> None:
    model = read_model("deepseek-v2")
    checkpoint = make_checkpoint(model, PLAIN, tmp_path)
    settings = {"r": 4, "lora_alpha": 4, "target_modules": r"model\.layers\.0\.(self_attn\.(q|o)_proj|mlp\.up_proj)"}
    adapter = make_adapter(TinyAdapter("a", model, settings, 1e-3, merged_only=False), checkpoint, tmp_path)
    convert(checkpoint, tmp_path / "model.gguf", ConvertOptions(type="F16", verify=False))
    convert(adapter, tmp_path / "adapter.gguf")
    with pytest.raises(UnusableInputError, match=r"computes 1 of its tensors without adapters .*: blk.0.attn_q.weight"):
        load(tmp_path / "model.gguf", RuntimeOptions(lora=((tmp_path / "adapter.gguf", 1.0),)))


def test_what_is_no_adapter_is_refused(files: tuple[Path, Path]) -> None:
    model, adapter = files
    with pytest.raises(UnusableInputError, match="not an adapter"):
        load(model, RuntimeOptions(lora=((model, 1.0),)))
    with pytest.raises(UnusableInputError, match="an adapter, not a model"):
        load(adapter)
    with pytest.raises(UnusableInputError, match="a directory"):
        load(model, RuntimeOptions(lora=((adapter.parent / "adapter", 1.0),)))
    with pytest.raises(UsageError, match="lora"):
        load_encoder(model, RuntimeOptions(lora=((adapter, 1.0),)))


def test_scales() -> None:
    assert [parse_adapter(text) for text in ("a.gguf", "a.gguf=-0.5", "a=b.gguf", "a=b=2", "=2", "a=1e3")] == [
        ("a.gguf", 1.0), ("a.gguf", -0.5), ("a=b.gguf", 1.0), ("a=b", 2.0), ("=2", 1.0), ("a", 1000.0),
    ]  # fmt: skip
    for scale in (np.nan, np.inf, 1e9):
        with pytest.raises(UsageError, match="lora has the scale"):
            RuntimeOptions(lora=(("a.gguf", float(scale)),))
        with pytest.raises(UsageError, match="lora has the scale"):
            ConvertOptions(lora=(("a", float(scale)),))
    with pytest.raises(UsageError, match="without a name"):
        RuntimeOptions(lora=(("", 1.0),))
