"""`evaluate` and the command: the figures add up, differences are seen, limits have their exit code."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import LLAMA3_SPLIT, TEXT, byte_level_tokenizer, llama_config, random_tensors, write_checkpoint
from processes import PATIENCE_S

from edgeinfer.api.convert import convert
from edgeinfer.api.load import load
from edgeinfer.errors import CheckFailedError, NotFoundError, UnusableInputError
from edgeinfer.options import ConvertOptions, RuntimeOptions
from edgeinfer.quality.evaluate import evaluate
from edgeinfer.types import Row

CTX_SIZE = 33


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("evaluate")
    tensors = {name: 4 * values for name, values in random_tensors(llama_config()).items()}
    write_checkpoint(path / "model", tensors=tensors)
    for name in ("BF16", "Q4_0"):
        convert(path / "model", path / f"{name}.gguf", ConvertOptions(type=name, verify=False))
    (path / "text.txt").write_text("\n".join(TEXT) * 3, "utf-8")
    return path


def _evaluate(folder: Path, model: str, **options: Any) -> Any:
    return evaluate(folder / model, folder / "text.txt", ctx_size=CTX_SIZE, **options)


def test_perplexity_is_that_of_the_second_halves(folder: Path) -> None:
    """Every chunk on its own, row by row, from the model's plain interface."""
    losses = []
    with load(folder / "BF16.gguf", RuntimeOptions(ctx_size=CTX_SIZE)) as model:
        text = (folder / "text.txt").read_text("utf-8")
        tokens = model.vocabulary.tokenize(text, add_special=True, parse_special=False)
    for start in range(0, len(tokens) - CTX_SIZE + 1, CTX_SIZE):
        chunk = tokens[start : start + CTX_SIZE]
        with load(folder / "BF16.gguf", RuntimeOptions(ctx_size=CTX_SIZE)) as model:
            logits = model.backend.forward([Row(0, chunk, 0, 0)])
            assert isinstance(logits, np.ndarray)
            rows = logits.astype(np.float64)
        for position in range(CTX_SIZE // 2, CTX_SIZE - 1):
            losses.append(np.log(np.exp(rows[position]).sum()) - rows[position, chunk[position + 1]])
    found = _evaluate(folder, "BF16.gguf")
    assert found.chunks == len(tokens) // CTX_SIZE
    assert found.tokens == len(losses)
    assert found.perplexity == pytest.approx(math.exp(np.mean(losses)), rel=1e-5)
    assert found.divergence is None


def test_a_model_does_not_diverge_from_itself(folder: Path) -> None:
    found = _evaluate(folder, "BF16.gguf", reference=folder / "BF16.gguf")
    divergence = found.divergence
    assert divergence.reference_perplexity == found.perplexity
    assert divergence.kld_max == pytest.approx(0, abs=1e-9)
    assert divergence.same_top == 1
    assert divergence.delta_p_rms == 0


def test_quantizing_is_seen_from_both_sides(folder: Path) -> None:
    plain = _evaluate(folder, "BF16.gguf")
    found = _evaluate(folder, "Q4_0.gguf", reference=folder / "BF16.gguf")
    divergence = found.divergence
    assert divergence.reference_perplexity == pytest.approx(plain.perplexity, rel=1e-6)
    assert divergence.log_perplexity_ratio == pytest.approx(math.log(found.perplexity / plain.perplexity))
    assert 0 < divergence.kld_median < divergence.kld_p90 < divergence.kld_p99 < divergence.kld_max
    assert 1e-3 < divergence.kld_mean < 1
    assert 0 < divergence.same_top < 1
    assert divergence.delta_p_rms > abs(divergence.delta_p_mean)


def test_fewer_chunks_and_their_progress(folder: Path) -> None:
    steps: list[tuple[int, int]] = []
    found = _evaluate(folder, "Q4_0.gguf", chunks=2, progress=lambda done, total: steps.append((done, total)))
    assert (found.chunks, found.tokens) == (2, 2 * (CTX_SIZE - CTX_SIZE // 2 - 1))
    assert steps == [(1, 2), (2, 2)]


def test_different_vocabularies_are_refused(folder: Path) -> None:
    if not (folder / "other.gguf").exists():
        write_checkpoint(folder / "other", tokenizer=byte_level_tokenizer(LLAMA3_SPLIT))
        convert(folder / "other", folder / "other.gguf", ConvertOptions(type="BF16", verify=False))
    with pytest.raises(UnusableInputError, match="different vocabularies"):
        _evaluate(folder, "Q4_0.gguf", reference=folder / "other.gguf")


def test_texts_that_cannot_be(folder: Path, tmp_path: Path) -> None:
    model = folder / "Q4_0.gguf"
    with pytest.raises(NotFoundError):
        evaluate(model, tmp_path / "none.txt")
    (tmp_path / "bytes").write_bytes(b"\xff\xfe" * 2000)
    with pytest.raises(UnusableInputError, match="UTF-8"):
        evaluate(model, tmp_path / "bytes")
    (tmp_path / "short").write_text("short", "utf-8")
    with pytest.raises(UnusableInputError, match="1024 are needed"):
        evaluate(model, tmp_path / "short")


def test_logits_that_are_not_finite_are_an_error(folder: Path, tmp_path: Path) -> None:
    tensors = random_tensors(llama_config())
    tensors["model.norm.weight"] = np.full(64, 3e38, np.float32)
    write_checkpoint(tmp_path / "model", tensors=tensors)
    convert(tmp_path / "model", tmp_path / "broken.gguf", ConvertOptions(type="BF16", verify=False))
    with pytest.raises(UnusableInputError, match="not finite"):
        evaluate(tmp_path / "broken.gguf", folder / "text.txt", ctx_size=CTX_SIZE)


def _command(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "edgeinfer", *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, timeout=PATIENCE_S)


def test_the_command_prints_and_fails_by_the_contract(folder: Path) -> None:
    arguments = ["eval", "Q4_0.gguf", "-f", "text.txt", "--reference", "BF16.gguf", "--ctx", str(CTX_SIZE)]
    good = _command(folder, *arguments, "--max-kld", "9", "--json")
    assert good.returncode == 0
    document = json.loads(good.stdout)
    assert document["divergence"]["kld_mean"] > 0
    bad = _command(folder, *arguments, "--max-kld", "0", "--json")
    assert bad.returncode == CheckFailedError.exit_code
    failed = json.loads(bad.stdout)
    assert failed["error"]["code"] == "check_failed"
    assert failed["divergence"] == document["divergence"]
    assert document["kernels"] in ("llama.cpp", "ik")
    text = _command(folder, *arguments, "--max-kld", "0")
    assert text.returncode == CheckFailedError.exit_code
    assert "KL divergence" in text.stdout
    assert "more than --max-kld 0" in text.stderr
    assert _command(folder, "eval", "Q4_0.gguf", "-f", "text.txt", "--max-kld", "1").returncode == 2


def test_the_command_imatrix(folder: Path) -> None:
    arguments = ["imatrix", "BF16.gguf", "-f", "text.txt", "-o", "m.gguf", "-c", str(CTX_SIZE), "--chunks", "2"]
    done = _command(folder, *arguments, "--json")
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert (document["output"], document["entries"], document["chunks"]) == ("m.gguf", 14, 2)
    assert _command(folder, *arguments).returncode == 2  # exists already
    assert _command(folder, *arguments, "--overwrite").stdout == "m.gguf\n"
