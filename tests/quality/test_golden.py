"""The real model's matrix, perplexity and divergence against llama-imatrix's and llama-perplexity's.

golden.json is made by `scripts/quality_peers.py --golden`. Kernels differ between CPUs, so a little is allowed; on one
and the same machine the differences are those of docs/eval.md.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from quality_peers import GOLDEN, GOLDEN_CHUNKS, GOLDEN_CTX_SIZE, golden_text, ours_by_name, requantize, sample

from edgeinfer.api.imatrix import imatrix
from edgeinfer.convert.imatrix import load_imatrix
from edgeinfer.quality.evaluate import evaluate

pytestmark = pytest.mark.model
golden = json.loads(GOLDEN.read_text("utf-8"))


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(golden_text(), "utf-8")
    return path


def test_the_matrix_is_llama_imatrixs(smollm2_gguf: Path, text: Path, tmp_path: Path) -> None:
    output = tmp_path / "m.gguf"
    computed = imatrix(smollm2_gguf, text, output, ctx_size=GOLDEN_CTX_SIZE, chunks=GOLDEN_CHUNKS)
    assert (computed.entries, computed.chunks, computed.partial) == (210, GOLDEN_CHUNKS, [])
    entries = load_imatrix(output).entries
    assert entries.keys() == golden["imatrix"].keys()
    for name, expected in golden["imatrix"].items():
        found = sample(entries[name])
        assert found["counts"] == expected["counts"], name
        np.testing.assert_allclose(found["total"], expected["total"], rtol=1e-3, err_msg=name)
        np.testing.assert_allclose(found["columns"], expected["columns"], rtol=2e-2, err_msg=name)


def test_perplexity_and_divergence_are_llama_perplexitys(smollm2_gguf: Path, text: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.gguf"
    requantize(smollm2_gguf, other)
    size = {"ctx_size": GOLDEN_CTX_SIZE, "chunks": GOLDEN_CHUNKS}
    plain = evaluate(smollm2_gguf, text, **size)
    assert (plain.perplexity, plain.perplexity_error) == pytest.approx(golden["perplexity"], rel=2e-3)
    result = evaluate(other, text, reference=smollm2_gguf, **size)
    found = ours_by_name(result)
    assert found["perplexity"] == pytest.approx(golden["divergence"]["perplexity"], rel=2e-3)
    # llama-perplexity stores the reference's logits as 16-bit numbers: its divergences have an error of about 1e-4.
    for name, expected in golden["divergence"].items():
        assert found[name] == pytest.approx(expected, rel=0.03, abs=2e-3), name
