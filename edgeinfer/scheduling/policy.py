"""The scheduler's rules as small functions: who is more urgent, how much prompt a step takes, swap or recompute."""

from __future__ import annotations

import math
import statistics
from collections import deque
from dataclasses import dataclass

from edgeinfer.scheduling.job import Job
from edgeinfer.scheduling.operations import PIECE_STEP, Work

AGEING_S = 10.0
"""Waiting this long counts as much as one level of priority, so that everybody's turn comes."""
HEADROOM_TOKENS = 32
"""Room that every running request keeps for its answer when another one is let in."""
MIN_SHARED_TOKENS = 16
"""It is worth waiting for this much that another request is just computing."""
DEFAULT_STEPS = 2.25
"""The default latency target, in decode steps: what a step with a piece of a prompt in it may take."""
MIN_PIECE = 4
"""Prompt tokens that every step may take, whatever the target. Kernels work on rows in fours."""
_WEIGHT = 0.3  # of the newest measurement
_STEPS_SEEN, _PIECES_SEEN = 9, 5  # few enough to follow what changes, enough that one or two delayed steps are outvoted
_ATTENTION_DEPTH = 512
"""A token at this depth costs at most twice what one at the beginning does. The attention's share is the model's: this
is on the safe side (SmolLM2-135M: 1,300), and only says how much dearer the next piece can be than the last ones."""
_LEAST_S = 1e-6  # clocks that stand still


@dataclass(frozen=True, slots=True)
class Limits:
    """What a scheduler may do. `max_waiting` beyond `max_running` requests are refused."""

    max_running: int
    max_waiting: int = 4096
    max_request_tokens: int | None = None
    """How many tokens, prompt and answer, one request may have of the context that all share; None for all."""
    max_step_tokens: int = 512
    """Of one forward pass: llama.cpp's micro-batch, and what an abort can lose."""
    work: Work | None = None
    """What a pass does where its operations can take so long that an interrupt would wait for one: pieces of prompts
    are smaller then."""
    latency_target_ms: float | None = None
    """How long a step may take while answers are being written; None means `DEFAULT_STEPS` decode steps."""


def level(job: Job, now_s: float) -> int:
    """The priority, raised by the time since the request arrived."""
    return job.priority + int((now_s - job.arrived_s) / AGEING_S)


def urgency(job: Job, now_s: float) -> tuple[int, float]:
    """Sorts by priority with ageing, then by the earliest deadline."""
    return -level(job, now_s), math.inf if job.deadline_s is None else job.deadline_s


def expected_tokens(job: Job, typical: float) -> float:
    """How many tokens the answer still has, if it is like the others."""
    return max(1.0, min(job.max_tokens, max(typical, job.n_answered)) - job.n_answered)


@dataclass(frozen=True, slots=True)
class _Piece:
    """A piece of a prompt that ran beside answers: where it began, and what a token of it took."""

    depth: int
    token_s: float


class Pace:
    """What the machine was measured to do. Knows no clock: it is told how long things took.

    Steps that something else on the machine delayed must not count: what steps take is the median of the last ones.
    """

    def __init__(self, work: Work | None = None) -> None:
        self.decode_s: float | None = None
        """A step that only writes answers."""
        self.prefill_rate: float | None = None
        """Prompt tokens per second in steps without answers."""
        self._work = work
        self._work_speed: float | None = None
        self.swap_s: float | None = None
        """Seconds to save and restore one token of KV cache."""
        self.answer_tokens = 128.0
        """The usual length of an answer."""
        self._decodes: deque[float] = deque(maxlen=_STEPS_SEEN)
        self._pieces: deque[_Piece] = deque(maxlen=_PIECES_SEEN)

    def observe_step(self, n_decoding: int, n_prompt: int, seconds: float, depth: int = 0) -> None:
        """A step has run `n_decoding` rows of answers and `n_prompt` tokens of prompts, the first at `depth`."""
        seconds = max(seconds, _LEAST_S)
        if n_prompt == 0:
            self._decodes.append(seconds)
            self.decode_s = statistics.median(self._decodes)
        elif n_decoding == 0:
            if n_prompt >= MIN_PIECE:
                self.prefill_rate = _mean(self.prefill_rate, n_prompt / seconds)
            if self._work is not None and n_prompt >= PIECE_STEP:  # a small piece computes slower
                done = n_prompt * self._work.of_token(depth + n_prompt / 2)
                self._work_speed = _mean(self._work_speed, done / seconds)
        elif self.decode_s is not None:
            # A quick step must not look as if prompts cost nothing: the next would take one whole, for seconds.
            least_s = n_prompt / self.prefill_rate if self.prefill_rate else self.decode_s / 2
            self._pieces.append(_Piece(depth, max(seconds - self.decode_s, least_s) / n_prompt))

    def prompt_token_s(self, depth: int) -> float | None:
        """What a step takes longer for each token of a piece that begins at `depth`; None before anything is known."""
        if not self._pieces:
            # What a step with both costs is known only after the first; a small piece computes slower than a long one.
            return 2 / self.prefill_rate if self.prefill_rate else None
        typical = sorted(self._pieces, key=lambda piece: piece.token_s)[len(self._pieces) // 2]
        return typical.token_s * max(1.0, (depth + _ATTENTION_DEPTH) / (typical.depth + _ATTENTION_DEPTH))

    def piece_tokens(self, depth: int) -> float:
        """The most tokens of a prompt from `depth` on in a step that an interrupt is to end in time."""
        return math.inf if self._work is None else self._work.piece_tokens(depth, self._work_speed)

    def observe_swap(self, n_tokens: int, seconds: float) -> None:
        """So long it took to save, or to restore, that many tokens."""
        self.swap_s = _mean(self.swap_s, 2 * seconds / n_tokens)

    def observe_answer(self, n_tokens: int) -> None:
        """An answer has ended."""
        self.answer_tokens = _mean(self.answer_tokens, n_tokens)

    def swaps(self) -> bool:
        """Whether saving and restoring is cheaper than computing again; so it is tried until both are known."""
        return self.swap_s is None or self.prefill_rate is None or self.swap_s * self.prefill_rate < 1


def prefill_budget(limits: Limits, pace: Pace, n_decoding: int, n_drafted: int = 0, depth: int = 0) -> int:
    """Prompt tokens that a step may take beside `n_decoding` rows of answers and `n_drafted` of their drafts.

    Derived from the latency target and what a token at `depth`, where the next piece begins, is expected to cost; the
    rows of the step come out as a multiple of four. Never more than can be interrupted in time. Nothing before a step
    without a prompt was measured, where the target is counted in those.
    """
    most = int(min(limits.max_step_tokens - n_decoding - n_drafted, pace.piece_tokens(depth)))
    target_ms = limits.latency_target_ms
    if n_decoding == 0 or target_ms == math.inf:
        return most
    if target_ms is None and pace.decode_s is None:
        return 0
    decode_s = pace.decode_s or 0.0
    target_s = DEFAULT_STEPS * decode_s if target_ms is None else target_ms / 1e3
    token_s = pace.prompt_token_s(depth)
    piece = (int(max(0.0, target_s - decode_s) / token_s) if token_s else 0) - n_drafted
    piece -= (piece + n_decoding + n_drafted) % MIN_PIECE
    return min(max(piece, MIN_PIECE), most)


def _mean(mean: float | None, value: float) -> float:
    return value if mean is None else mean + _WEIGHT * (value - mean)
