"""What a long prompt costs those who are being answered, on a machine whose passes cost what a real one's did."""

import math

import numpy as np
import pytest

from edgeinfer.options import SamplingParams
from edgeinfer.runtime.engine import Engine
from edgeinfer.runtime.fake import FakeBackend, make_fake_sampler
from edgeinfer.scheduling.policy import Limits
from edgeinfer.types import Request

# Milliseconds of a pass by its tokens: Qwen2.5-0.5B Q4_K_M on two cores.
COST_MS = {1: 34, 2: 44, 4: 54, 8: 85, 16: 140, 64: 356, 512: 2800}
PARAMS = SamplingParams(temperature=0.7, seed=7, ignore_eos=True)


class Machine(FakeBackend):
    """Time passes by the table; attention adds as much again at `twice_at` tokens. Every `delayed`th step is late."""

    now_s = 0.0
    twice_at = 4000
    delayed = 0

    def forward(self, rows):
        n_tokens = sum(len(row.tokens) for row in rows)
        cost_ms = float(np.interp(n_tokens, list(COST_MS), list(COST_MS.values())))
        attended = sum(len(row.tokens) * (row.pos0 + len(row.tokens) / 2) for row in rows) / n_tokens
        self.took_s = cost_ms / 1e3 * (1 + attended / self.twice_at)
        is_late = self.delayed and self.forwards % self.delayed == 0
        self.now_s += self.took_s * (3 if is_late else 1)
        return super().forward(rows)


def gaps(target_ms=None, twice_at=4000, delayed=0):
    """Of four answers while a long prompt is computed, in ms: a step without the prompt, and every step with it.

    Without the delays: those are nobody's fault here.
    """
    machine = Machine(n_ctx=8000, max_sequences=8, max_batch_tokens=512)
    machine.twice_at, machine.delayed = twice_at, delayed
    limits = Limits(8, latency_target_ms=target_ms)
    engine = Engine(machine, make_fake_sampler, clock=lambda: machine.now_s, limits=limits)
    rng = np.random.default_rng(0)
    answering = [engine.submit(Request(i, rng.integers(0, 255, 60).astype(np.int32), PARAMS, 1500)) for i in range(4)]
    while any(g.n_answered < 10 for g in answering):
        engine.step()
    decode_ms = machine.took_s * 1e3
    long = engine.submit(Request(9, rng.integers(0, 255, 2000).astype(np.int32), PARAMS, 2))
    found = []
    while long.first_token_s is None:
        events = engine.step()
        assert {e.request_id for e in events} >= {0, 1, 2, 3}  # every step brings each of them a token
        found.append(machine.took_s * 1e3)
    return decode_ms, found


@pytest.mark.parametrize("delayed", [0, 4])
@pytest.mark.parametrize("twice_at", [4000, 1300])
def test_at_the_default_target_no_gap_is_longer_than_three_decode_steps(twice_at, delayed):
    decode_ms, found = gaps(twice_at=twice_at, delayed=delayed)
    assert max(found) <= (2.4 if twice_at == 4000 else 3) * decode_ms  # a piece has four tokens at least, deep down too
    assert np.median(found) > 1.7 * decode_ms  # and the prompt gets what there is


@pytest.mark.parametrize("target_ms", [150, 500])
@pytest.mark.parametrize("twice_at", [4000, 1300])
def test_a_target_in_milliseconds_is_kept_and_used(target_ms, twice_at):
    _, found = gaps(target_ms, twice_at)
    assert max(found) <= 1.15 * target_ms
    assert np.median(found) > 0.7 * target_ms


def test_without_a_target_a_prompt_takes_all_that_a_step_can():
    _, found = gaps(math.inf)
    assert len(found) == math.ceil(2000 / 508)
