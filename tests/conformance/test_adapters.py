"""Adapters against PEFT: the logits of base and adapter, beside each other and merged, with every module's variant.

`golden_adapters/` holds what PEFT said (`scripts/golden_adapters.py`).
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from golden_adapters import GOLDEN
from numpy.typing import NDArray
from random_adapter import TinyAdapter, adapter_names, make_adapter, read_adapter_description
from random_checkpoint import PLAIN, make_checkpoint, model_names, prompt, read_model
from shared_work import shared_by_conversions

from edgeinfer.api.convert import convert
from edgeinfer.api.load import load
from edgeinfer.errors import UnusableInputError
from edgeinfer.options import Adapters, ConvertOptions, RuntimeOptions
from edgeinfer.types import Refusal, Row

UNVERIFIED = ConvertOptions(type="F32", verify=False)


@dataclass(frozen=True, slots=True)
class Case:
    """An adapter, its model, and what PEFT makes of both."""

    adapter: TinyAdapter
    checkpoint: Path
    folder: Path
    expected: dict[str, list[float]]

    def check(self, model: Path, lora: Adapters = ()) -> None:
        """Whether a model gives PEFT's logits."""
        logits = _logits(model, prompt(self.adapter.model), lora)
        for position, row in self.expected.items():
            np.testing.assert_allclose(logits[int(position)], row, rtol=0, atol=self.adapter.tolerance)


@pytest.fixture(scope="module", params=adapter_names())
def case(request: pytest.FixtureRequest) -> Iterator[Case]:
    adapter = read_adapter_description(request.param)
    with tempfile.TemporaryDirectory() as scratch:
        checkpoint = make_checkpoint(adapter.model, PLAIN, Path(scratch))
        folder = make_adapter(adapter, checkpoint, Path(scratch))
        expected = json.loads((GOLDEN / f"{adapter.name}.json").read_text("utf-8"))
        with shared_by_conversions():
            yield Case(adapter, checkpoint, folder, expected)


def test_merged_logits_are_those_of_peft(case: Case, tmp_path: Path) -> None:
    options = ConvertOptions(type="F32", verify=False, lora=((case.folder, 1.0),))
    case.check(Path(convert(case.checkpoint, tmp_path / "merged.gguf", options).output))


def test_logits_beside_the_base_are_those_of_peft(case: Case, tmp_path: Path) -> None:
    base = Path(convert(case.checkpoint, tmp_path / "base.gguf", UNVERIFIED).output)
    if case.adapter.merged_only:
        with pytest.raises(UnusableInputError, match="which no adapter fits"):
            convert(case.folder, tmp_path / "adapter.gguf")
        return
    adapter = convert(case.folder, tmp_path / "adapter.gguf").output
    case.check(base, ((adapter, 1.0),))
    # Half of it twice is the same.
    case.check(base, ((adapter, 0.5), (adapter, 0.5)))


def _logits(path: Path, tokens: NDArray[np.int32], lora: Adapters) -> NDArray[Any]:
    exact = RuntimeOptions(
        ctx_size=64, flash_attn="off", cache_type_k="f32", cache_type_v="f32", prefix_cache=False, lora=lora
    )
    with load(path, exact) as loaded:
        logits = loaded.backend.forward([Row(0, tokens, 0, 0)])
        assert not isinstance(logits, Refusal)
        return logits.copy()


# No linear modules: embeddings, norms and vectors; what a text model does without.
LINEAR = r"(?!.*(embed|wte|wpe|position|token_type|norm|A_log|Dense|conv|_bias|mtp)).*"
MERGED_ONLY = ("deepseek-v2", "deepseek-v3", "gemma3n", "glm4-moe-lite")
"""Latent attention, and the many small matrices of Gemma 3n."""
ENCODERS = ("bert", "gemma-embedding", "modern-bert", "nomic-bert", "qwen3-embedding", "qwen3-reranker", "xlm-roberta")


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in model_names() if name not in ENCODERS])
def test_beside_is_merged_in_every_architecture(name: str, tmp_path: Path) -> None:
    model = read_model(name)
    settings = {"r": 4, "lora_alpha": 4, "target_modules": LINEAR}
    checkpoint = make_checkpoint(model, PLAIN, tmp_path)
    folder = make_adapter(TinyAdapter("adapter", model, settings, 0, merged_only=False), checkpoint, tmp_path)
    options = ConvertOptions(type="F32", verify=False, lora=((folder, 1.0),))
    merged = _logits(Path(convert(checkpoint, tmp_path / "merged.gguf", options).output), prompt(model), ())
    base = Path(convert(checkpoint, tmp_path / "base.gguf", UNVERIFIED).output)
    alone = _logits(base, prompt(model), ())
    assert np.abs(merged - alone).max() > 0.1
    if name in MERGED_ONLY:
        with pytest.raises(UnusableInputError) as refused:
            _logits(base, prompt(model), ((convert(folder, tmp_path / "adapter.gguf").output, 1.0),))
        assert "merge it" in refused.value.hint
        return
    beside = _logits(base, prompt(model), ((convert(folder, tmp_path / "adapter.gguf").output, 1.0),))
    np.testing.assert_allclose(beside, merged, rtol=0, atol=model.tolerance)
