"""llama-bench's method, on a backend that objects to every wrong position."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from edgeinfer.bench.measure import Runner, Trial
from edgeinfer.errors import EdgeinferError
from edgeinfer.runtime.fake import FakeBackend
from edgeinfer.types import KVOp, Logits, Refusal, Row


class Recording(FakeBackend):
    """Notes what is asked of it; every pass takes 10 ns a token."""

    def __init__(self, **options: int | bool) -> None:
        super().__init__(**options)  # type: ignore[arg-type]
        self.rows: list[Row] = []
        self.removed: list[int] = []
        self.now_ns = 0

    def forward(self, rows: Sequence[Row]) -> Logits | Refusal:
        self.rows += rows
        self.now_ns += 10 * sum(len(row.tokens) for row in rows)
        return super().forward(rows)

    def apply(self, op: KVOp) -> bool:
        done = super().apply(op)
        if done:
            self.removed.append(op.p0)
        return done

    def shapes(self) -> list[tuple[int, int]]:
        return [(row.pos0, len(row.tokens)) for row in self.rows]


def _runner(backend: Recording, bos: int | None = None) -> Runner:
    return Runner(backend, bos=bos, clock_ns=lambda: backend.now_ns)


def test_a_prompt_is_warmed_up_and_repeated_in_an_empty_cache() -> None:
    backend = Recording(n_ctx=24, max_batch_tokens=64)
    samples = _runner(backend).run(Trial(24, 0, 0), 3)
    assert backend.shapes() == [(0, 24)] * 4
    assert samples.total_ns == samples.prompt_ns == (240, 240, 240)
    assert samples.between_tokens_ns == ()
    assert backend.removed == [0] * 5
    assert all(row.n_logits == 1 for row in backend.rows)


def test_generation_runs_one_token_at_a_time() -> None:
    backend = Recording(n_ctx=4)
    samples = _runner(backend).run(Trial(0, 4, 0), 2)
    assert backend.shapes() == [(0, 1)] + [(0, 1), (1, 1), (2, 1), (3, 1)] * 2
    assert samples.total_ns == (40, 40)
    assert samples.prompt_ns == ()
    assert samples.between_tokens_ns == (10,) * 6


def test_depth_is_filled_once_and_not_timed() -> None:
    backend = Recording(n_ctx=12)
    samples = _runner(backend).run(Trial(0, 2, 10), 3)
    assert backend.shapes() == [(0, 1), (0, 10)] + [(10, 1), (11, 1)] * 3
    assert samples.total_ns == (20, 20, 20)


def test_depth_is_filled_again_where_memory_cannot_be_trimmed() -> None:
    backend = Recording(n_ctx=12, can_trim=False)
    samples = _runner(backend).run(Trial(2, 0, 10), 2)
    assert backend.shapes() == [(0, 2), (0, 10), (10, 2), (0, 10), (10, 2)]
    assert samples.total_ns == (20, 20)


def test_a_long_prompt_goes_in_batches() -> None:
    backend = Recording(n_ctx=100, max_batch_tokens=40)
    _runner(backend).run(Trial(100, 0, 0), 1)
    assert backend.shapes() == [(0, 40), (40, 40), (80, 20)] * 2


def test_the_first_token_is_bos_if_the_model_wants_it() -> None:
    backend = Recording(n_ctx=16)
    _runner(backend, bos=7).run(Trial(8, 0, 8), 1)
    assert [int(row.tokens[0]) == 7 for row in backend.rows] == [True, True, False]


def test_the_same_seed_gives_the_same_tokens() -> None:
    one, two = Recording(n_ctx=8), Recording(n_ctx=8)
    for backend in (one, two):
        _runner(backend).run(Trial(8, 0, 0), 2)
    assert all(np.array_equal(a.tokens, b.tokens) for a, b in zip(one.rows, two.rows, strict=True))


def test_a_context_that_is_too_small_is_an_error() -> None:
    with pytest.raises(EdgeinferError):
        _runner(Recording(n_ctx=4)).run(Trial(8, 0, 0), 1)


@pytest.mark.parametrize(
    ("test", "label"),
    [(Trial(512, 0, 0), "pp512"), (Trial(0, 128, 4096), "tg128 @ d4096"), (Trial(8, 4, 0), "pp8+tg4")],
)
def test_labels_are_llama_benchs(test: Trial, label: str) -> None:
    assert test.label == label
