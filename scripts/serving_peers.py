"""Measures many requests at a time against llama.cpp's own tools, both sides in one run; prints a Markdown table.

Prompts with a common beginning: against llama-server, whose best number of slots the first round finds. Prompts of
their own: against llama-batched-bench at its best width. A long prompt that comes while others are answered: the
longest gap between two of their tokens, in decode steps. Ctrl-C in a long prompt. Both sides get random tokens.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import build_peers
from fetch_model import fetch
from measuring import Figure, run_commands
from toolbox import run

from edgeinfer.cli import console
from edgeinfer.errors import ResourceError

EDGEINFER = (sys.executable, "-m", "edgeinfer")
MODELS = {"Qwen2.5-Coder-0.5B": "qwen2.5-coder-0.5b", "SmolLM2-135M": "smollm2"}
N_REQUESTS, N_TAIL, N_ANSWER = 32, 16, 32
SLOTS = (4, 8, 16)
WIDTHS = (8, 16, 32)
TOKENS = (1000, 30000)  # ordinary words in both models
ROW = "| {} | {} | {} | {} | {} |"


def shared_prefix(model: Path, peers: build_peers.Peers, n_prefix: int, limit: str, repetitions: int) -> Iterator[str]:
    """32 prompts with a common beginning, 32 tokens each: seconds from the first request to the last answer."""
    best, best_s = 0, math.inf
    for slots in SLOTS:
        seconds = _serve(model, peers, slots, n_prefix, seed=0)
        console.note(f"  {slots} slots {seconds:.1f} s")
        if seconds > 1.2 * best_s:
            break  # more slots compute the common beginning more often still
        best, best_s = min((best_s, best), (seconds, slots))[::-1]
    ours, theirs = [], []
    for number in range(repetitions):
        theirs.append(_serve(model, peers, best, n_prefix, seed=1 + number))
        ours.append(_engine(model, n_prefix, seed=1 + number))
        console.note(f"  {number + 1}/{repetitions} edgeinfer {ours[-1]:.2f} s, {best} slots {theirs[-1]:.2f} s")
    a, b = Figure(tuple(ours)), Figure(tuple(theirs))
    what = f"{N_REQUESTS} prompts with {n_prefix} tokens in common, {N_ANSWER} tokens each"
    yield ROW.format(what, a.text("s"), f"{b.text('s')}, {best} slots", f"{b.median / a.median:.2f} ×", limit)


def _engine(model: Path, n_prefix: int, seed: int) -> float:
    """What `edgeinfer batch` does with as many tokens, in a process of its own; loading does not count."""
    shape = {"n_prefix": n_prefix, "n_requests": N_REQUESTS, "n_tail": N_TAIL, "n_answer": N_ANSWER}
    done = run_commands([sys.executable, "-c", _SHARED.format(model=str(model), seed=seed, **shape)])
    return float(done.stdout)


_SHARED = """
import math, time
import numpy as np
import edgeinfer
from edgeinfer.options import RuntimeOptions, SamplingParams
from edgeinfer.types import Request
rng = np.random.default_rng({seed})
greedy = SamplingParams(temperature=0)
def tokens(count):
    return rng.integers(1000, 30000, count, np.int32)
beginning = tokens({n_prefix})
prompts = [np.concatenate((beginning, tokens({n_tail}))) for _ in range({n_requests})]
n_ctx = {n_prefix} + 2 * {n_requests} * ({n_tail} + {n_answer})
options = RuntimeOptions(ctx_size=n_ctx, prefix_cache=False)
with edgeinfer.load({model!r}, options, max_sequences={n_requests}, latency_target_ms=math.inf) as model:
    engine = model.engine
    engine.submit(Request(99, tokens(2), greedy, 2))
    while engine.has_work:
        engine.step()
    started_s = time.perf_counter()
    answers = [engine.submit(Request(i, prompt, greedy, {n_answer})) for i, prompt in enumerate(prompts)]
    while engine.has_work:
        engine.step()
    print(time.perf_counter() - started_s)
    assert all(answer.n_answered == {n_answer} for answer in answers)
"""


def _serve(model: Path, peers: build_peers.Peers, slots: int, n_prefix: int, seed: int) -> float:
    """The same requests to llama-server, all at once."""
    rng = random.Random(seed)
    beginning = [rng.randrange(*TOKENS) for _ in range(n_prefix)]
    bodies = [
        {
            "prompt": beginning + [rng.randrange(*TOKENS) for _ in range(N_TAIL)],
            "n_predict": N_ANSWER,
            "temperature": 0,
            "ignore_eos": True,
            "cache_prompt": True,
        }
        for _ in range(N_REQUESTS)
    ]
    with running_server(model, peers, slots, slots * (n_prefix + N_TAIL + N_ANSWER + 64)) as url:
        ask_server(url, {"prompt": [TOKENS[0]], "n_predict": 2})
        started = time.perf_counter()
        with ThreadPoolExecutor(N_REQUESTS) as pool:
            answers = list(pool.map(lambda body: ask_server(url, body), bodies))
        seconds = time.perf_counter() - started
    if any(answer["tokens_predicted"] != N_ANSWER for answer in answers):
        raise ResourceError("llama-server gave fewer tokens than asked for", "look at its log")
    return seconds


@contextmanager
def running_server(model: Path, peers: build_peers.Peers, slots: int, n_ctx: int, *flags: str) -> Iterator[str]:
    """llama-server with so many slots, until the end of the `with` statement; its address."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [peers.tool("llama-server"), "-m", model, "-np", slots, "-c", n_ctx, "--port", port, *flags]
    silent = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    child = subprocess.Popen([*map(str, command), "--host", "127.0.0.1", "--no-webui"], **silent)  # type: ignore[call-overload]
    url = f"http://127.0.0.1:{port}"
    try:
        for _ in range(600):
            if child.poll() is not None:
                raise ResourceError(f"llama-server ended with code {child.returncode}", "run it by hand")
            try:
                with urllib.request.urlopen(f"{url}/health", timeout=2):
                    break
            except (urllib.error.URLError, OSError):
                time.sleep(0.1)
        yield url
    finally:
        child.terminate()
        child.wait()


def ask_server(url: str, body: dict[str, Any]) -> dict[str, Any]:
    """llama-server's completion of a request."""
    request = urllib.request.Request(
        f"{url}/completion", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=1800) as response:
        answer: dict[str, Any] = json.loads(response.read())
    return answer


def unrelated(model: Path, peers: build_peers.Peers, repetitions: int) -> Iterator[str]:
    """Prompts of 128 tokens with nothing in common, 32 tokens each, at llama-batched-bench's best width."""
    first = {width: _batched_bench(model, peers, width) for width in WIDTHS}
    best = max(first, key=lambda width: first[width]["speed_tg"])
    ours: dict[str, list[float]] = {"speed_pp": [], "speed_tg": []}
    theirs: dict[str, list[float]] = {"speed_pp": [], "speed_tg": []}
    flags = ["-p", "128", "-n", str(N_ANSWER), "--parallel", str(best), "-o", "json"]
    for _ in range(repetitions):
        (row,) = json.loads(run_commands([*EDGEINFER, "bench", model, "--suite", "batch", *flags]).stdout)
        other = _batched_bench(model, peers, best)
        for name in ours:
            ours[name].append(row[name])
            theirs[name].append(other[name])
    for name, label in (("speed_pp", "prompts"), ("speed_tg", "answers")):
        a, b = Figure(tuple(ours[name])), Figure(tuple(theirs[name]))
        what = f"{best} unrelated prompts of 128 tokens, {N_ANSWER} tokens each: {label}"
        yield ROW.format(what, a.text("t/s", 0), b.text("t/s", 0), f"{a.median / b.median:.3f}", "≥ 0.95")


def _batched_bench(model: Path, peers: build_peers.Peers, width: int) -> dict[str, float]:
    n_ctx = width * (128 + N_ANSWER)
    flags = ["-c", n_ctx, "-npp", 128, "-ntg", N_ANSWER, "-npl", width, "-kvu", "--output-format", "jsonl"]
    done = run_commands([peers.tool("llama-batched-bench"), "-m", model, *map(str, flags)])
    row: dict[str, float] = json.loads(next(line for line in done.stdout.splitlines() if line.startswith(b"{")))
    return row


def gap(model: Path, repetitions: int) -> Iterator[str]:
    """Four answers are being written when a prompt of 2,000 tokens arrives."""
    ratios, gaps, steps = [], [], []
    for number in range(repetitions):
        code = _GAP.format(model=str(model), seed=number)
        done = run_commands([sys.executable, "-c", code])
        found = json.loads(done.stdout)
        gaps.append(found["gap_ms"])
        steps.append(found["step_ms"])
        ratios.append(found["gap_ms"] / found["step_ms"])
        console.note(f"  {number + 1}/{repetitions} step {steps[-1]:.0f} ms, longest gap {gaps[-1]:.0f} ms")
    what = "longest gap between two tokens of four answers while a prompt of 2,000 tokens comes in"
    a, b = Figure(tuple(gaps)), Figure(tuple(steps))
    yield ROW.format(
        what, a.text("ms", 0), b.text("ms", 0) + " a step", f"{statistics.median(ratios):.2f}", "≤ 3 steps"
    )


# In a process of its own, so that nothing of one round is left for the next.
_GAP = """
import json, statistics, time
import numpy as np
import edgeinfer
from edgeinfer.options import RuntimeOptions, SamplingParams
from edgeinfer.types import Request
rng = np.random.default_rng({seed})
def request(i, length, answer):
    return Request(i, rng.integers(1000, 30000, length, np.int32), SamplingParams(temperature=0), answer)
options = RuntimeOptions(ctx_size=4096, prefix_cache=False)
with edgeinfer.load({model!r}, options, max_sequences=5) as model:
    engine = model.engine
    for i in range(4):
        engine.submit(request(i, 32, 400))
    times = []
    def steps(count):
        for _ in range(count):
            if any(event.request_id < 4 and event.tokens for event in engine.step()):
                times.append(time.perf_counter())
    steps(40)
    plain = statistics.median(np.diff(times[-30:]))
    times = times[-1:]
    late = engine.submit(request(9, 2000, 8))
    while late.first_token_s is None:
        steps(1)
    print(json.dumps({{"step_ms": plain * 1e3, "gap_ms": max(np.diff(times)) * 1e3}}))
"""


def interrupt(model: Path, repetitions: int) -> Iterator[str]:
    """Ctrl-C in a prompt of some thousand tokens: how long until the process is gone."""
    rng = random.Random(1)
    times = []
    with tempfile.TemporaryDirectory() as folder:
        prompt = Path(folder, "prompt.txt")
        command = [*EDGEINFER, "run", str(model), "-f", str(prompt), "--raw", "-n", "8", "-c", "8192", "-v"]
        for number in range(repetitions):
            prompt.write_text(" ".join(f"word{rng.randrange(10**6)}" for _ in range(600)))
            child = subprocess.Popen(
                [*command, "--no-prefix-cache"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
            )
            time.sleep(3 + 0.37 * number)  # loaded by then, and in one of many passes
            if child.poll() is not None:
                raise ResourceError("the prompt was over before it could be interrupted", "take a larger model")
            sent = time.perf_counter()
            child.send_signal(signal.SIGINT)
            child.wait()
            times.append((time.perf_counter() - sent) * 1e3)
    figure = Figure(tuple(times))
    yield ROW.format("Ctrl-C in a long prompt, until the process is gone", figure.text("ms", 0), "", "", "≤ 250 ms")


def main() -> None:
    """Measure, and print the table."""
    parts = ("prefix-500", "prefix-2000", "unrelated", "gap", "interrupt")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", action="append", choices=MODELS, help="only this one (repeatable)")
    parser.add_argument("--only", action="append", choices=parts, help="only this part (repeatable)")
    parser.add_argument("--repetitions", type=int, default=5, metavar="N", help="default: %(default)s")
    arguments = parser.parse_args()
    peers, n = build_peers.build(), arguments.repetitions
    os.environ["EDGEINFER_HOME"] = tempfile.mkdtemp()
    console.result(ROW.format("what", "edgeinfer", "llama.cpp", "ratio", "must reach"))
    console.result("| --- | --- | --- | --- | --- |")
    for name in arguments.model or MODELS:
        model = fetch(MODELS[name])
        rows = {
            "prefix-500": lambda model=model: shared_prefix(model, peers, 500, "≥ 2 ×", n),  # type: ignore[misc]
            "prefix-2000": lambda model=model: shared_prefix(model, peers, 2000, "≥ 4 ×", n),  # type: ignore[misc]
            "unrelated": lambda model=model: unrelated(model, peers, n),  # type: ignore[misc]
            "gap": lambda model=model: gap(model, n),  # type: ignore[misc]
            "interrupt": lambda model=model: interrupt(model, n),  # type: ignore[misc]
        }
        for part in _chosen(arguments.only, parts):
            for row in rows[part]():
                console.result(row.replace("| ", f"| {name}: ", 1))


def _chosen(only: Sequence[str] | None, parts: Sequence[str]) -> Sequence[str]:
    return only or parts


if __name__ == "__main__":
    run(main)
