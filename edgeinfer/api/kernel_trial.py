"""The program that `api.trials` runs a model with, on both libraries in turn: `python -m edgeinfer.api.kernel_trial`.

It writes one JSON document: how far the answers are from each other, and how fast they came. It ends when its standard
input does: a trial that nobody waits for would take the processor from the next one.
"""

from __future__ import annotations

import math
import os
import sys
import threading
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from edgeinfer.api.files import checked_header
from edgeinfer.api.fork_limits import n_vocab
from edgeinfer.api.trials import MAX_DIVERGENCE, SAYS_NOTHING, Trial, as_json
from edgeinfer.errors import EdgeinferError, ResourceError, UnusableInputError
from edgeinfer.native.context import NativeBackend
from edgeinfer.native.ik import IkModel, kernels
from edgeinfer.native.model import NativeModel
from edgeinfer.options import RuntimeOptions
from edgeinfer.runtime import scores
from edgeinfer.types import KVOp, Placement, Refusal, Row, Tokens, Vocabulary

_BEFORE_TOKENS, _PROMPT_TOKENS, _ANSWER_TOKENS = 40, 64, 8
_COMPARED_TOKENS = 32
"""Of the prompt's end; rows of logits are long."""
_ENOUGH_S, _MAX_REPETITIONS = 1.5, 3
_SMALL_UBATCH = 24
"""Below the 32 rows from which on the fork chooses other kernels, in eights."""
_TEXT = """The harbour was quiet when the last ferry came in. Two women and a boy walked down the ramp; nobody waited.
"Is it far?" asked the boy. "Twenty minutes, if the rain holds off." They passed the fish market (closed since 1998),
the chapel, and a row of seven painted boats. In 2021 the town had 4,312 inhabitants, 38 % of them older than 65.

def longest_run(values: list[int]) -> int:
    best = current = 0
    for i, value in enumerate(values):
        current = current + 1 if i and value == values[i - 1] else 1
        best = max(best, current)
    return best

| name | price | in stock |
| lamp | 24.50 | yes |
Les enfants jouent dans le jardin, et le chat dort sur le mur. Das Wetter bleibt morgen trocken; abends wird es kühl.
"""


def main(path: Path) -> Trial | None:
    """Run the model at `path` on both; None where llama.cpp cannot. Raises what loading it with the fork raises."""
    try:
        header = checked_header(path)
        with NativeModel(path, placement=Placement()) as model, _context(model) as backend:
            tokens = _tokens(model.vocabulary, n_vocab(header))
            expected, reference_s = _logits(backend, tokens), _times(backend, tokens)
    except (EdgeinferError, MemoryError):
        return None
    with IkModel(path, header.architecture, n_vocab(header)) as model:
        for ubatch_size in (None, _SMALL_UBATCH):
            # Several sequences are computed in another way (see `native.ik`).
            with _context(model, ubatch_size, max_sequences=2) as backend:
                _forward(backend, Row(1, tokens[:_BEFORE_TOKENS], 0, _BEFORE_TOKENS))
                shared = _divergence(expected, _logits(backend, tokens))
            with _context(model, ubatch_size) as backend:
                divergence = max(shared, _divergence(expected, _logits(backend, tokens)))
                if divergence <= MAX_DIVERGENCE:
                    decode, prefill = (r / f for r, f in zip(reference_s, _times(backend, tokens), strict=True))
                    return Trial(divergence, decode, prefill, ubatch_size)
    return Trial(divergence)


def _tokens(vocabulary: Vocabulary, n_tokens: int) -> Tokens:
    """The text; tokens at random where the vocabulary cannot spell it."""
    try:
        tokens = vocabulary.tokenize(_TEXT, add_special=True, parse_special=False)
    except UnusableInputError:
        tokens = np.random.default_rng(1).integers(0, n_tokens, _PROMPT_TOKENS, np.int32)
    return np.resize(tokens, _PROMPT_TOKENS + _ANSWER_TOKENS)


def _context(model: NativeModel, ubatch_size: int | None = None, max_sequences: int = 1) -> NativeBackend:
    usual = RuntimeOptions(ctx_size=_BEFORE_TOKENS + _PROMPT_TOKENS + _ANSWER_TOKENS)
    options = replace(usual, ubatch_size=ubatch_size or usual.ubatch_size)
    return NativeBackend(model, options, max_sequences=max_sequences)


def _logits(backend: NativeBackend, tokens: Tokens) -> NDArray[np.float32]:
    """Of the last tokens, shape `(tokens, n_vocab)`: of a prompt in one pass, of an answer one by one."""
    rows = [_forward(backend, Row(0, tokens[:_PROMPT_TOKENS], 0, _PROMPT_TOKENS - _COMPARED_TOKENS)).copy()]
    rows += [_forward(backend, Row(0, tokens[i : i + 1], i, 0)).copy() for i in range(_PROMPT_TOKENS, len(tokens))]
    return np.concatenate(rows)


def _times(backend: NativeBackend, tokens: Tokens) -> tuple[float, float]:
    """Seconds that the answer and the prompt take, each the shortest of some."""
    decode_s: list[float] = []
    prefill_s: list[float] = []
    while not decode_s or (len(decode_s) < _MAX_REPETITIONS and sum(decode_s + prefill_s) < _ENOUGH_S):
        backend.apply(KVOp("remove", 0, 0, 0, -1))
        started_s = time.perf_counter()
        _forward(backend, Row(0, tokens[:_PROMPT_TOKENS], 0, _PROMPT_TOKENS - 1))
        prefill_s.append(time.perf_counter() - started_s)
        started_s = time.perf_counter()
        for i in range(_PROMPT_TOKENS, len(tokens)):
            _forward(backend, Row(0, tokens[i : i + 1], i, 0))
        decode_s.append(time.perf_counter() - started_s)
    return min(decode_s), min(prefill_s)


def _forward(backend: NativeBackend, row: Row) -> NDArray[np.float32]:
    logits = backend.forward([row])
    if isinstance(logits, Refusal):
        raise EdgeinferError(f"ik_llama.cpp gave up: {logits.value}")
    return logits


def _divergence(reference: NDArray[np.float32], found: NDArray[np.float32]) -> float:
    """Mean Kullback-Leibler divergence over the rows, in nats; infinite where something is not a number."""
    with np.errstate(all="ignore"):
        mean = float(np.mean(scores.divergences(found, reference)))
    return max(mean, 0.0) if np.isfinite(mean) else float("inf")


def _leave_no_core() -> None:
    """To die of a model is what this process is for: its memory, with the weights, is not to lie about after that."""
    try:
        import resource
    except ImportError:
        return
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _end_with_stdin() -> None:
    with suppress(OSError):
        while os.read(0, 1):
            pass
    os._exit(SAYS_NOTHING)


def _trial(path: Path) -> Trial | None:
    """What `main` says, or what keeps the fork from it; None where that is for want of memory."""
    try:
        kernels()
    except ResourceError as error:  # the package is broken
        return Trial(math.inf, fault=error.message)
    try:
        return main(path)
    except (ResourceError, MemoryError):
        return None
    except EdgeinferError as error:
        return Trial(math.inf, fault=error.message.removeprefix(f"{path}: "))


def _end() -> None:
    """Tell what came out, and leave without a wait for the thread, or for memory to be given back."""
    code = 1
    try:
        trial = _trial(Path(sys.argv[1]))
        if trial is not None:
            sys.stdout.write(as_json(trial))
            sys.stdout.flush()
        code = SAYS_NOTHING if trial is None else 0
    except KeyboardInterrupt:
        code = SAYS_NOTHING
    finally:
        os._exit(code)


if __name__ == "__main__":
    _leave_no_core()
    threading.Thread(target=_end_with_stdin, daemon=True).start()
    _end()
