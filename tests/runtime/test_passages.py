"""A text in passages: cut as llama.cpp's tools cut it, and every position's logits given once."""

from __future__ import annotations

import numpy as np
import pytest

from edgeinfer.errors import UnusableInputError, UsageError
from edgeinfer.runtime import passages
from edgeinfer.runtime.fake import BOS, FakeBackend, FakeVocabulary
from edgeinfer.types import Row

TEXT = "".join(chr(ord("a") + i % 26) for i in range(99))


class NoBos(FakeVocabulary):
    adds_bos = False


def test_passages_follow_each_other_and_an_incomplete_one_is_left_out() -> None:
    tokens = [BOS, *TEXT.encode()]
    found = passages.cut(NoBos(), TEXT, 16)
    assert [p.tolist() for p in found] == [tokens[i : i + 16] for i in range(0, 96, 16)]


def test_a_full_last_passage_is_kept() -> None:
    assert len(passages.cut(FakeVocabulary(), TEXT, 50)) == 2
    assert len(passages.cut(FakeVocabulary(), TEXT, 20)) == 5


def test_the_first_token_of_each_gives_way_to_the_begin_of_sequence() -> None:
    plain, with_bos = passages.cut(NoBos(), TEXT, 16), passages.cut(FakeVocabulary(), TEXT, 16)
    for a, b in zip(plain, with_bos, strict=True):
        assert b[0] == BOS
        assert a[1:].tolist() == b[1:].tolist()


def test_one_line_end_at_the_end_does_not_count() -> None:
    found = [passages.cut(FakeVocabulary(), text, 50)[-1].tolist() for text in (TEXT, TEXT + "\n", TEXT + "\n\n")]
    assert found[0] == found[1] == found[2]
    with pytest.raises(UnusableInputError, match="99 tokens, 100 are needed"):
        passages.cut(FakeVocabulary(), TEXT[:-1] + "\n", 50)


def test_special_tokens_spelled_in_the_text_are_text() -> None:
    assert passages.cut(FakeVocabulary(), "<eos>" * 20, 16)[0].tolist()[1:6] == list(b"<eos>")


def test_a_limit_takes_the_first_ones() -> None:
    assert len(passages.cut(FakeVocabulary(), TEXT, 16, 2)) == 2
    with pytest.raises(UsageError):
        passages.cut(FakeVocabulary(), TEXT, 16, 0)
    with pytest.raises(UsageError):
        passages.cut(FakeVocabulary(), TEXT, 7)


@pytest.mark.parametrize("max_batch_tokens", [7, 16, 50, 64])
@pytest.mark.parametrize("first", [0, 25, 49])
def test_every_position_from_the_first_has_its_logits_once(max_batch_tokens: int, first: int) -> None:
    backend = FakeBackend(max_batch_tokens=max_batch_tokens)
    for passage in passages.cut(FakeVocabulary(), TEXT, 50):  # the second one, too, from an empty cache
        rows = {}
        for position, logits in passages.run(backend, passage, first):
            rows |= {position + i: row.copy() for i, row in enumerate(logits)}
        assert list(rows) == list(range(first, 50))
        expected = FakeBackend(max_batch_tokens=64).forward([Row(0, passage, 0, first)])
        assert isinstance(expected, np.ndarray)
        assert np.array_equal(np.stack(list(rows.values())), expected)
