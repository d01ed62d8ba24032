"""Texts that the library's tokenizers cannot take as they are: long runs, and thousands of control tokens."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from checkpoints import SPECIAL, byte_level_tokenizer
from hypothesis import given
from hypothesis import strategies as st
from processes import PATIENCE_S, SLOW_PATIENCE_S

from edgeinfer.convert.writer import encode_header
from edgeinfer.errors import UsageError
from edgeinfer.native.model import NativeVocabularyFile
from edgeinfer.native.special import SpecialTokens
from edgeinfer.native.tokenizer import MAX_RUN_CHARS

# One name for each set of rules that goes through std::regex (src/llama-vocab.cpp of the pinned library).
RECURSING = (
    *("default", "jais-2", "deepseek-llm", "deepseek-v3", "spark2_5", "youtu", "deepseek-coder", "falcon", "bloom"),
    *("poro-chat", "gpt3-finnish", "viking", "tekken", "chameleon", "gpt-4o", "llama4", "minimax-m2", "tiny_aya"),
    *("granite-embed-multi-97m", "superbpe", "bailingmoe", "seed-coder", "ufakzeka", "afmoe", "exaone-moe", "minicpm5"),
)
RUNS = ("a", "語", " ", "!")
N_CHARS = 30_000  # a main thread's eight megabytes are gone after 27,000
OVERLAPPING = ("\n", "\n\n", "\n\n\n", "ab", "abc", "bcab", "<a>", "<a><b>", "<b>")

SPLIT_ALL = """
import sys
from pathlib import Path
from edgeinfer.native.model import NativeVocabularyFile
for path in sys.argv[2:]:
    with NativeVocabularyFile(Path(path)) as file:
        for run in sys.argv[1].split("|"):
            text = (run * %d)[:%d]
            assert len(file.vocabulary.tokenize(text, add_special=False, parse_special=False)), path
"""


def write_vocabulary(path: Path, pre: str, user_defined: tuple[str, ...] = ()) -> Path:
    document = json.loads(byte_level_tokenizer())
    vocab = document["model"]["vocab"]
    texts = [*sorted(vocab, key=vocab.__getitem__), *user_defined]
    types = [3 if text in SPECIAL else 4 if text in user_defined else 1 for text in texts]
    metadata = {
        "general.architecture": "llama",
        "llama.block_count": 1,
        "llama.context_length": 512,
        "llama.embedding_length": 64,
        "llama.feed_forward_length": 64,
        "llama.attention.head_count": 2,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": texts,
        "tokenizer.ggml.token_type": np.array(types, np.int32),
        "tokenizer.ggml.merges": [m if isinstance(m, str) else " ".join(m) for m in document["model"]["merges"]],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.ggml.add_eos_token": True,
    }
    path.write_bytes(encode_header(metadata, ()))
    return path


def test_long_runs_do_not_end_the_process(tmp_path: Path) -> None:
    paths = [write_vocabulary(tmp_path / f"{pre}.gguf", pre) for pre in RECURSING]
    script = SPLIT_ALL % (N_CHARS, N_CHARS)
    done = subprocess.run(
        [sys.executable, "-c", script, "|".join(RUNS), *map(str, paths)], check=False, timeout=PATIENCE_S
    )
    assert done.returncode == 0


@pytest.mark.slow
def test_the_longest_runs_do_not_end_the_process(tmp_path: Path) -> None:
    paths = [write_vocabulary(tmp_path / f"{pre}.gguf", pre) for pre in RECURSING]
    script = SPLIT_ALL % (MAX_RUN_CHARS, MAX_RUN_CHARS)
    done = subprocess.run(
        [sys.executable, "-c", script, "a|語|\U0001f680|!|\n/", *map(str, paths)], check=False, timeout=SLOW_PATIENCE_S
    )
    assert done.returncode == 0


@pytest.mark.parametrize(
    ("pre", "text", "limit"),
    [
        ("gpt-4o", "a" * (MAX_RUN_CHARS + 1), MAX_RUN_CHARS),
        ("exaone-moe", "a " * (MAX_RUN_CHARS // 2 + 1), MAX_RUN_CHARS),
        ("superbpe", "1" * 10_000, 8192),
        ("jais-2", " " * 200_000, 131_072),
    ],
)
def test_longer_runs_are_refused(tmp_path: Path, pre: str, text: str, limit: int) -> None:
    with NativeVocabularyFile(write_vocabulary(tmp_path / "m.gguf", pre)) as file:
        with pytest.raises(UsageError, match=f"{len(text)} characters without a break, .* takes {limit}"):
            file.vocabulary.tokenize(text, add_special=False, parse_special=False)
        words = "word " * 200_000 if pre != "exaone-moe" else "word\n" * 200_000
        assert len(file.vocabulary.tokenize(words, add_special=False, parse_special=False)) > 200_000


def test_a_run_of_any_length_goes_through_rules_that_are_loops(tmp_path: Path) -> None:
    with NativeVocabularyFile(write_vocabulary(tmp_path / "m.gguf", "llama-bpe")) as file:
        tokens = file.vocabulary.tokenize("x" * 1_000_000, add_special=False, parse_special=False)
        assert len(tokens) == 1_000_000


def test_many_control_tokens_take_no_longer_each(tmp_path: Path) -> None:
    with NativeVocabularyFile(write_vocabulary(tmp_path / "m.gguf", "llama-bpe")) as file:
        started_s = time.process_time()
        tokens = file.vocabulary.tokenize("<|im_end|>q " * 60_000, add_special=True, parse_special=True).tolist()
        assert time.process_time() - started_s < 10  # 70 s as the library does it, half a second in pieces
        q, space = tokens[2], tokens[3]
        assert tokens == [0, *[2, q, space] * 60_000, 2]


@pytest.fixture(scope="module")
def overlapping(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NativeVocabularyFile]:
    path = write_vocabulary(tmp_path_factory.mktemp("overlapping") / "m.gguf", "llama-bpe", OVERLAPPING)
    with NativeVocabularyFile(path) as file:
        yield file


@given(st.lists(st.sampled_from([*OVERLAPPING, *SPECIAL, "a", "b", "c", "<", ">", " ", "q"]), max_size=30))
def test_pieces_give_the_tokens_of_the_whole(overlapping: NativeVocabularyFile, parts: list[str]) -> None:
    text = "".join(parts)
    for special in (True, False):
        whole = overlapping.vocabulary.tokenize(text, add_special=True, parse_special=special)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(SpecialTokens, "FEW_NBYTES", 0)
            patch.setattr(SpecialTokens, "MOST_IN_A_PIECE", 1)
            cut = overlapping.vocabulary.tokenize(text, add_special=True, parse_special=special)
        assert cut.tolist() == whole.tolist()


def test_a_run_of_tokens_that_overlap_is_cut_too() -> None:
    special = SpecialTokens([b"\n" * n for n in range(1, 32)])
    pieces = list(special.cut(b"\n" * 100_000 + b"x"))
    assert b"".join(pieces) == b"\n" * 100_000 + b"x"


def test_doubt_is_no_place_to_cut() -> None:
    special = SpecialTokens([b"ab", b"bcd"])
    assert [end for end, is_certain in special._found(b"abcd ab") if is_certain] == [7]
    assert [end for end, _ in special._found(b"abcd ab")] == [4, 7]
