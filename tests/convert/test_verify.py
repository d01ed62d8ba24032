"""Verification: a sound file passes; any difference from the plan, the weights or the tokenizer is found."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import (
    QWEN2_SPLIT,
    byte_level_tokenizer,
    llama_config,
    qwen2_config,
    random_tensors,
    sentencepiece_tokenizer,
    write_checkpoint,
)

from edgeinfer.api.convert import convert
from edgeinfer.api.load import load
from edgeinfer.api.vocabulary import open_vocabulary
from edgeinfer.convert.pipeline import Planned, prepare
from edgeinfer.convert.stream import write
from edgeinfer.convert.verify import verify
from edgeinfer.errors import CheckFailedError, UnusableInputError
from edgeinfer.gguf_file.header import read_header
from edgeinfer.native.quantize import GGMLQuantizer
from edgeinfer.options import ConvertOptions, RuntimeOptions


@pytest.fixture
def planned(tmp_path: Path) -> Planned:
    return prepare(
        write_checkpoint(tmp_path / "model"), tmp_path / "out.gguf", ConvertOptions(type="Q8_0"), open_vocabulary
    )


@pytest.fixture
def written(planned: Planned) -> Path:
    write(planned.plan, planned.output, GGMLQuantizer(), 2, lambda nbytes: None)
    return planned.output


def _verify(planned: Planned, open_model: Any = None) -> None:
    def load_small(path: Path) -> Any:
        return load(path, RuntimeOptions(ctx_size=64))

    verify(planned.output, planned.plan, planned.tokenizer, open_model or load_small)


@pytest.mark.parametrize(
    ("config", "tokenizer"),
    [
        (llama_config(), byte_level_tokenizer()),
        (llama_config(vocab_size=400), sentencepiece_tokenizer()),
        (llama_config(vocab_size=333, tie_word_embeddings=False, attention_bias=True, head_dim=32), None),
        (qwen2_config(num_hidden_layers=1, num_key_value_heads=4), byte_level_tokenizer(QWEN2_SPLIT)),
        (llama_config(max_position_embeddings=8), None),
    ],
    ids=["llama", "sentencepiece", "untied with biases", "qwen2", "a short context"],
)
def test_sound_conversions_pass(tmp_path: Path, config: dict[str, Any], tokenizer: str | None) -> None:
    folder = write_checkpoint(tmp_path / "m", config, tokenizer=tokenizer)
    for file_type in ("Q8_0", "Q4_K_M"):
        assert convert(folder, tmp_path / f"{file_type}.gguf", ConvertOptions(type=file_type)).verified


def test_another_tensor_table_is_found(planned: Planned, written: Path, tmp_path: Path) -> None:
    other = prepare(planned.source, tmp_path / "other.gguf", ConvertOptions(type="Q4_0"), open_vocabulary)
    write(other.plan, other.output, GGMLQuantizer(), 2, lambda nbytes: None)
    other.output.replace(written)
    with pytest.raises(CheckFailedError, match="tensor table"):
        _verify(planned)


@pytest.mark.parametrize("name", ["blk.1.ffn_down.weight", "output_norm.weight", "token_embd.weight"])
def test_one_value_that_is_not_finite_is_found(planned: Planned, written: Path, name: str) -> None:
    (tensor,) = (t for t in read_header(written).tensors if t.name == name)
    block = tensor.type.block_nbytes
    with open(written, "r+b") as file:
        file.seek(tensor.offset + (tensor.nbytes // block - 1) * block)  # the scale of the last block
        file.write(np.float32(np.nan).tobytes() if block == 4 else np.float16(np.nan).tobytes())
    with pytest.raises(CheckFailedError, match=name):
        _verify(planned)


def test_a_truncated_file_is_found(planned: Planned, written: Path) -> None:
    written.write_bytes(written.read_bytes()[:-100])
    with pytest.raises(CheckFailedError, match="unusable"):
        _verify(planned)


def _without_merges(document: dict[str, Any]) -> None:
    del document["model"]["merges"][20:]


def _with_dropout(document: dict[str, Any]) -> None:
    document["model"]["dropout"] = 0.9


@pytest.mark.parametrize("change", [_without_merges, _with_dropout])
def test_a_tokenizer_that_splits_differently_is_found(
    planned: Planned, written: Path, tmp_path: Path, change: Any
) -> None:
    document = json.loads(byte_level_tokenizer())
    change(document)
    folder = write_checkpoint(tmp_path / "other", tokenizer=json.dumps(document))
    other = prepare(folder, None, ConvertOptions(type="Q8_0"), open_vocabulary).tokenizer
    with pytest.raises(CheckFailedError, match="differently from"):
        verify(written, planned.plan, other, lambda path: load(path, RuntimeOptions(ctx_size=64)))


def test_added_tokens_are_compared_too(planned: Planned, written: Path) -> None:
    planned.tokenizer.original.add_special_tokens(["<|surprise|>"])
    with pytest.raises(CheckFailedError, match="differently from"):
        _verify(planned)


def test_an_end_token_that_does_not_end_a_text_is_found(planned: Planned, written: Path) -> None:
    with pytest.raises(CheckFailedError, match="token 7 does not end"):
        _verify(replace(planned, tokenizer=replace(planned.tokenizer, end_tokens=(7,))))


def test_logits_that_are_not_finite_are_found(tmp_path: Path) -> None:
    """Weights may be finite and the model broken all the same."""
    config = llama_config()
    tensors = random_tensors(config)
    tensors["model.norm.weight"][:] = 3e38
    folder = write_checkpoint(tmp_path / "m", config, tensors)
    with pytest.raises(CheckFailedError, match="not finite"):
        convert(folder, tmp_path / "out.gguf", ConvertOptions(type="F32"))
    assert not (tmp_path / "out.gguf").exists()


def test_a_model_that_does_not_load_is_a_failed_check(planned: Planned, written: Path) -> None:
    @contextmanager
    def refuses(path: Path) -> Iterator[Any]:
        raise UnusableInputError(f"{path}: the model does not load: no reason", "hint")
        yield

    with pytest.raises(CheckFailedError, match="no reason"):
        _verify(planned, refuses)
