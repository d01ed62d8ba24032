"""How soon a pass can be interrupted: pieces of prompts on machines and models of all speeds, on a made-up clock."""

import math

import numpy as np
import pytest

from edgeinfer.options import SamplingParams
from edgeinfer.runtime.engine import Engine
from edgeinfer.runtime.fake import FakeBackend, make_fake_sampler
from edgeinfer.scheduling.operations import LONGEST_S, PIECE_STEP, Work
from edgeinfer.scheduling.policy import Limits, Pace, prefill_budget
from edgeinfer.types import Request

SMALL = Work(357_826_560, 896 * 4864, attended=2 * 896, n_layers=24)  # Qwen2.5-0.5B
LARGE = Work(6_525_288_448, 3584 * 18944, attended=2 * 3584, n_layers=28)  # Qwen2.5-7B
TWO_CORES = 5e10
"""Multiply-adds a second."""


def budget(work, depth=0, speed=TWO_CORES, n_decoding=0, target_ms=math.inf):
    """After pieces at that speed."""
    pace = Pace(work)
    for at in range(0, depth, 512):
        pace.observe_step(0, 512, 512 * work.of_token(at + 256) / speed, at)
    if not depth and speed:
        pace.observe_step(0, 64, 64 * work.of_token(32) / speed, 0)
    return prefill_budget(Limits(8, work=work, latency_target_ms=target_ms), pace, n_decoding, depth=depth)


def test_a_small_model_keeps_its_pieces_but_for_a_long_text():
    assert budget(SMALL) == budget(SMALL, depth=4096) == budget(SMALL, speed=None) == 512
    assert 256 <= budget(SMALL, depth=8192) < 512


def test_a_large_model_has_smaller_ones():
    assert budget(LARGE) == 128
    assert budget(LARGE, depth=8192) == 64
    assert budget(LARGE, speed=20 * TWO_CORES) == 512


def test_the_first_piece_is_one_for_a_slow_machine():
    assert budget(LARGE, speed=None) == 64


@pytest.mark.parametrize("speed", [1e9, 2e10, 7e10, 1e12])
@pytest.mark.parametrize("work", [SMALL, LARGE], ids=["small", "large"])
@pytest.mark.parametrize("depth", [0, 512, 2048, 32768])
def test_no_operation_takes_longer_than_it_may_and_pieces_are_whole_tiles(work, speed, depth):
    piece = budget(work, depth, speed)
    longest_s = piece * max(work.largest, (work.of_token(depth) - work.weights) / work.n_layers) / speed
    assert longest_s <= LONGEST_S or piece == PIECE_STEP
    assert piece % PIECE_STEP == 0
    assert PIECE_STEP <= piece <= 512


def test_beside_answers_it_is_the_smaller_of_what_both_rules_allow():
    assert budget(LARGE, n_decoding=4) == 128
    assert budget(SMALL, n_decoding=4) == 508
    assert budget(LARGE, n_decoding=100) == 128, "rows of answers leave room for a piece"


class Machine(FakeBackend):
    """Takes for a pass what its work takes, and notes the longest operation."""

    def __init__(self, work, speed):
        super().__init__(n_ctx=7000, max_sequences=1, max_batch_tokens=512)
        self.work, self.speed, self.now_s, self.longest_s, self.pieces = work, speed, 0.0, 0.0, []

    def forward(self, rows):
        (row,) = rows
        n, depth = len(row.tokens), row.pos0
        attention = (self.work.of_token(depth + n / 2) - self.work.weights) / self.work.n_layers
        self.longest_s = max(self.longest_s, n * max(self.work.largest, attention) / self.speed)
        self.now_s += n * self.work.of_token(depth + n / 2) / self.speed
        self.pieces.append(n)
        return super().forward(rows)


@pytest.mark.parametrize(("work", "most_pieces"), [(SMALL, 4), (LARGE, 20)], ids=["small", "large"])
def test_an_interrupt_never_waits_long_in_a_prompt(work, most_pieces):
    machine = Machine(work, TWO_CORES)
    engine = Engine(machine, make_fake_sampler, clock=lambda: machine.now_s, limits=Limits(1, work=work))
    prompt = np.arange(2000, dtype=np.int32) % 250
    engine.submit(Request(0, prompt, SamplingParams(temperature=0, seed=0), 1))
    while engine.has_work:
        engine.step()
    assert sum(machine.pieces) == 2000
    assert len(machine.pieces) <= most_pieces
    assert machine.longest_s < 0.23


def test_without_the_rule_it_would():
    machine = Machine(LARGE, TWO_CORES)
    engine = Engine(machine, make_fake_sampler, clock=lambda: machine.now_s, limits=Limits(1))
    engine.submit(Request(0, np.arange(1000, dtype=np.int32) % 250, SamplingParams(temperature=0, seed=0), 1))
    while engine.has_work:
        engine.step()
    assert machine.longest_s > 0.5
