"""Measures the prefix cache, both sides in one run, and prints a Markdown table.

A second process with the same long system prompt and another question: its time to the first token against the first
process's, and the whole of it against llama-completion with --prompt-cache. What the cache costs when nothing is ever
reused: against --no-prefix-cache. Every round begins with an empty cache of its own, in a directory that goes away.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import build_peers
from fetch_model import fetch
from measuring import Figure, Run, run_commands
from toolbox import cache_dir, run

from edgeinfer.cli import console

EDGEINFER = (sys.executable, "-m", "edgeinfer")
MODELS = {"Qwen2.5-Coder-0.5B": "qwen2.5-coder-0.5b", "SmolLM2-135M": "smollm2"}
QUESTIONS = ("Why is the sky blue?", "Which of these words occurs twice?")
_WORDS = (
    "time year people way day man thing woman life child world school state family student group country problem hand "
    "part place case week company system program question work government number night point home water room mother "
    "area money story fact month lot right study book eye job word business issue side kind head house service friend"
)
WORDS = _WORDS.split()
N_CTX = "4096"
SYSTEM_WORDS = 1980  # a word of these is a token
ROW = "| {} | {} | {} | {} | {} |"


def words(count: int, seed: int) -> str:
    """Plain English words in a random order."""
    rng = random.Random(seed)
    return " ".join(rng.choice(WORDS) for _ in range(count))


@contextmanager
def empty_home(scratch: Path) -> Iterator[None]:
    """An empty prefix cache for the commands within."""
    home = Path(tempfile.mkdtemp(dir=scratch))
    before = os.environ.get("EDGEINFER_HOME")
    os.environ["EDGEINFER_HOME"] = str(home)
    try:
        yield
    finally:
        os.environ.pop("EDGEINFER_HOME")
        if before is not None:
            os.environ["EDGEINFER_HOME"] = before
        shutil.rmtree(home)


def answer(model: Path, *arguments: str | Path) -> tuple[Run, dict[str, dict[str, float]]]:
    """Run a prompt; what it took, and the envelope."""
    done = run_commands([*EDGEINFER, "run", model, *arguments, "--temp", "0", "-c", N_CTX, "--json"])
    return done, json.loads(done.stdout)


def second_process(model: Path, scratch: Path, repetitions: int) -> Iterator[str]:
    """Time to the first token after load, of the first process and of the second."""
    first, second, cached, prompt = [], [], 0.0, 0.0
    for number in range(repetitions):
        system = words(SYSTEM_WORDS, number)
        with empty_home(scratch):
            for question, times in zip(QUESTIONS, (first, second), strict=True):
                _, found = answer(model, question, "-s", system, "-n", "8")
                times.append(found["timings"]["ttft_ms"])
                cached, prompt = found["usage"]["cached_tokens"], found["usage"]["prompt_tokens"]
        console.note(f"  {number + 1}/{repetitions} first {first[-1]:.0f} ms, second {second[-1]:.0f} ms")
    ours, cold = Figure(tuple(second)), Figure(tuple(first))
    ratio = f"1/{cold.median / ours.median:.0f}"
    what = f"{prompt:.0f} tokens of prompt, {cached:.0f} of them restored: time to the first token"
    yield ROW.format(what, ours.text("ms", 0), cold.text("ms", 0) + " in the first process", ratio, "≤ 1/50")


def against_prompt_cache(model: Path, tool: Path, scratch: Path, repetitions: int) -> Iterator[str]:
    """The whole second process, and llama-completion with --prompt-cache: the same raw prompts, 8 tokens."""
    sides: dict[str, list[float]] = {"ours": [], "theirs": []}
    files = [scratch / f"prompt-{i}.txt" for i in range(2)]
    for number in range(repetitions):
        for file, question in zip(files, QUESTIONS, strict=True):
            file.write_text(f"{words(SYSTEM_WORDS, number)}\n\n{question}")
        saved = scratch / "prompt-cache.bin"
        saved.unlink(missing_ok=True)
        theirs = [tool, "-m", model, "--prompt-cache", saved, "-n", "8", "--temp", "0", "-c", N_CTX, "-no-cnv"]
        with empty_home(scratch):
            for file in files:
                ours, _ = answer(model, "-f", file, "--raw", "-n", "8")
                other = run_commands([*theirs, "-f", file])
        sides["ours"].append(ours.seconds)
        sides["theirs"].append(other.seconds)
        console.note(f"  {number + 1}/{repetitions} edgeinfer {ours.seconds:.2f} s, the peer {other.seconds:.2f} s")
    ours_s, theirs_s = (Figure(tuple(values)) for values in sides.values())
    what = "the same, whole second process, against llama-completion --prompt-cache"
    yield ROW.format(what, ours_s.text("s"), theirs_s.text("s"), f"{ours_s.median / theirs_s.median:.3f}", "≤ 1.00")


def cost(model: Path, scratch: Path, repetitions: int) -> Iterator[str]:
    """Prompts that nobody repeats, 512 tokens and 64 of answer, with the cache and without, in turns."""
    sides: dict[str, list[float]] = {"with": [], "without": []}
    with empty_home(scratch):
        answer(model, "hi", "-n", "1")  # the files are in the page cache then
        for number in range(repetitions):
            for name, flags in (("with", ()), ("without", ("--no-prefix-cache",))):
                prompt = words(512, 1000 + 2 * number + (name == "with"))
                done, _ = answer(model, prompt, "--raw", "-n", "64", "--ignore-eos", *flags)
                sides[name].append(done.seconds)
            console.note(f"  {number + 1}/{repetitions} " + ", ".join(f"{k} {v[-1]:.2f} s" for k, v in sides.items()))
    ours, without = (Figure(tuple(values)) for values in sides.values())
    ratios = [a / b for a, b in zip(*sides.values(), strict=True)]
    ratio = f"{statistics.median(ratios):.3f}"
    what = "512 new tokens of prompt, 64 of answer, whole process, against --no-prefix-cache"
    yield ROW.format(what, ours.text("s"), without.text("s"), ratio, "≤ 1.03")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", action="append", choices=MODELS, help="only this one (repeatable)")
    parser.add_argument("--repetitions", type=int, default=5, metavar="N", help="default: %(default)s")
    parser.add_argument("--tools", type=Path, metavar="DIR", help="llama.cpp's tools, instead of building them")
    arguments = parser.parse_args()
    tool = (arguments.tools / "llama-completion") if arguments.tools else build_peers.build().tool("llama-completion")
    console.result(ROW.format("what", "edgeinfer", "against", "ratio", "must reach"))
    console.result("| --- | --- | --- | --- | --- |")
    cache_dir("compare").mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache_dir("compare")) as folder:
        scratch, n = Path(folder), arguments.repetitions
        for name in arguments.model or MODELS:
            model = fetch(MODELS[name])
            parts: tuple[Callable[[], Iterator[str]], ...] = (
                lambda model=model: second_process(model, scratch, n),  # type: ignore[misc]
                lambda model=model: against_prompt_cache(model, tool, scratch, n),  # type: ignore[misc]
                lambda model=model: cost(model, scratch, 2 * n),  # type: ignore[misc]
            )
            for part in parts:
                for row in part():
                    console.result(row.replace("| ", f"| {name}: ", 1))


if __name__ == "__main__":
    run(main)
