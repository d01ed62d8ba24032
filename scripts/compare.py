"""Measures edgeinfer against llama.cpp's own tools, both sides in one run, and prints a Markdown table.

Sides take turns (A B, B A, …) after a round that is not counted; figures are medians with minimum and maximum. The
peers are built by scripts/build_peers.py from the source of the very library that edgeinfer uses.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import build_peers
from fetch_model import fetch
from measuring import Figure, Run, alternate, peak_mb, run_commands, seconds
from toolbox import REPOSITORY, cache_dir, run

from edgeinfer.cli import console
from edgeinfer.errors import ResourceError

Row = tuple[str, str, str, str, str]
HEAD: Row = ("what", "edgeinfer", "llama.cpp", "ratio", "must reach")
EDGEINFER = (sys.executable, "-m", "edgeinfer")
LARGE = "qwen2.5-coder-0.5b"
MODELS = {"SmolLM2-135M": "smollm2", "Qwen2.5-Coder-0.5B": LARGE}
CTX_SIZE = "4096"
TESTS = ("-p", "512", "-n", "128", "-r", "2", "-o", "json")
BRIEF = ("-p", "0", "-n", "1", "-r", "1", "-o", "json")
SYNTHETIC_SIZE = "4G"
HELP_LIMIT_S = 0.3


@dataclass(frozen=True, slots=True)
class Bench:
    """What every comparison needs."""

    peers: build_peers.Peers
    scratch: Path
    repetitions: int


def convert_small(bench: Bench) -> Iterator[Row]:
    """SmolLM2's checkpoint to Q4_K_M."""
    yield from _convert(bench, "SmolLM2-135M", _script("make_checkpoint.py", "smollm2"))


def convert_large(bench: Bench) -> Iterator[Row]:
    """A Qwen2-class checkpoint of 1.26 GB to Q4_K_M."""
    yield from _convert(bench, "Qwen2.5-Coder-0.5B (1.26 GB)", _script("make_checkpoint.py", LARGE))


def _convert(bench: Bench, name: str, checkpoint: Path) -> Iterator[Row]:
    output, intermediate = bench.scratch / "ours.gguf", bench.scratch / "bf16.gguf"
    ours = [*EDGEINFER, "convert", checkpoint, "-t", "q4_k_m", "-o", output, "--overwrite"]
    to_bf16 = [bench.peers.python, bench.peers.convert_script, checkpoint, "--outtype", "bf16", "--outfile"]
    quantize = [bench.peers.tool("llama-quantize"), intermediate, bench.scratch / "theirs.gguf", "Q4_K_M"]
    runs = alternate(
        {
            "edgeinfer": lambda: run_commands(ours),
            "edgeinfer --no-verify": lambda: run_commands([*ours, "--no-verify"]),
            "llama.cpp": lambda: run_commands([*to_bf16, intermediate], quantize),
        },
        bench.repetitions,
    )
    verified, plain, theirs = runs.values()
    what = f"convert {name} to Q4_K_M"
    yield _lower(f"{what}, with verification", seconds(verified), seconds(theirs), "s", "0.40")
    yield _lower(f"{what}, `--no-verify`", seconds(plain), seconds(theirs), "s", "")
    yield _lower(f"{what}, peak memory, `--no-verify`", peak_mb(plain), peak_mb(theirs), "MB", "350 MB", 0)
    yield _lower(f"{what}, peak memory, with verification", peak_mb(verified), peak_mb(theirs), "MB", "", 0)
    yield (f"{what}, intermediate file", "none", f"{intermediate.stat().st_size / 1e6:.0f} MB", "", "none")


def convert_gguf(bench: Bench) -> Iterator[Row]:
    """A GGUF file as the source: BF16 to Q4_K_M."""
    source, output = bench.scratch / "source.gguf", bench.scratch / "ours.gguf"
    checkpoint = _script("make_checkpoint.py", LARGE)
    run_commands([*EDGEINFER, "convert", checkpoint, "-t", "bf16", "-o", source, "--overwrite", "--no-verify"])
    ours = [*EDGEINFER, "convert", source, "-t", "q4_k_m", "-o", output, "--overwrite"]
    quantize = [bench.peers.tool("llama-quantize"), source, bench.scratch / "theirs.gguf", "Q4_K_M"]
    runs = alternate(
        {
            "edgeinfer": lambda: run_commands(ours),
            "edgeinfer --no-verify": lambda: run_commands([*ours, "--no-verify"]),
            "llama-quantize": lambda: run_commands(quantize),
        },
        bench.repetitions,
    )
    verified, plain, theirs = runs.values()
    what = "convert Qwen2.5-Coder-0.5B from a BF16 GGUF to Q4_K_M"
    yield _lower(f"{what}, with verification", seconds(verified), seconds(theirs), "s", "1.00")
    yield _lower(f"{what}, `--no-verify`", seconds(plain), seconds(theirs), "s", "")
    yield _lower(f"{what}, peak memory, `--no-verify`", peak_mb(plain), peak_mb(theirs), "MB", "350 MB", 0)


def throughput(bench: Bench) -> Iterator[Row]:
    """Tokens per second of a prompt and one by one: pp512, tg128."""
    for name, entry in MODELS.items():
        model = fetch(entry)
        ours = [*EDGEINFER, "bench", model, *TESTS]
        threads = str(json.loads(run_commands([*EDGEINFER, "bench", model, *BRIEF]).stdout)[0]["n_threads"])
        theirs: list[str | Path] = [bench.peers.tool("llama-bench"), "-m", model, *TESTS, "-t", threads]
        runs = alternate(
            {
                "edgeinfer": lambda ours=ours, threads=threads: run_commands([*ours, "-t", threads]),  # type: ignore[misc]
                "llama-bench": lambda theirs=theirs: run_commands(theirs),  # type: ignore[misc]
            },
            bench.repetitions,
        )
        for test, label in enumerate(("pp512", "tg128")):
            a, b = (Figure(tuple(_median_rate(run, test) for run in side)) for side in runs.values())
            ratio = f"{a.median / b.median:.3f}"
            yield (f"{label} {name}, {threads} threads", a.text("t/s"), b.text("t/s"), ratio, "≥ 0.98")


def _median_rate(run: Run, test: int) -> float:
    """Of a run's own repetitions: another process that wakes up spoils one of them, not the figure."""
    return statistics.median(json.loads(run.stdout)[test]["samples_ts"])


def start(bench: Bench) -> Iterator[Row]:
    """The whole process for one token, of a chat and of a text to go on with: the same prompt on both sides."""
    for name, entry in MODELS.items():
        model = fetch(entry)
        same = ["-n", "1", "--temp", "0", "-c", CTX_SIZE]
        ours: list[str | Path] = [*EDGEINFER, "run", model, "hi", *same, "--no-prefix-cache"]
        theirs: list[str | Path] = [bench.peers.tool("llama-completion"), "-m", model, "-p", "hi", *same]
        commands: dict[str, list[str | Path]] = {
            "edgeinfer run": ours,
            "llama-completion -cnv -st --jinja": [*theirs, "-cnv", "-st", "--jinja"],
            "edgeinfer run --raw": [*ours, "--raw"],
            "llama-completion -no-cnv": [*theirs, "-no-cnv"],
        }
        sides = {label: lambda command=command: run_commands(command) for label, command in commands.items()}
        chat, their_chat, raw, their_raw = map(seconds, alternate(sides, bench.repetitions).values())
        what = f'`run {name} "hi" -n 1'
        yield _lower(f"{what}`, whole process, as a chat", chat, their_chat, "s", "1.00")
        yield _lower(f"{what} --raw`, the same without a template", raw, their_raw, "s", "1.00")
        yield _lower(f"{what}`, against theirs without a template", chat, their_raw, "s", "")


def help_text(bench: Bench) -> Iterator[Row]:
    """How long --help takes."""
    runs = alternate({"edgeinfer --help": lambda: run_commands([*EDGEINFER, "--help"])}, 2 * bench.repetitions)
    yield ("`edgeinfer --help`", seconds(runs["edgeinfer --help"]).text("s"), "", "", f"< {HELP_LIMIT_S} s")


def memory(bench: Bench) -> Iterator[Row]:
    """Peak memory of convert must not grow with the checkpoint; each measured once, for it hardly varies."""
    synthetic = cache_dir("checkpoints") / f"synthetic-llama-{SYNTHETIC_SIZE}"
    if not synthetic.is_dir():
        _script("make_synthetic_checkpoint.py", synthetic, "--size", SYNTHETIC_SIZE)
    for name, checkpoint in (("SmolLM2-135M", _script("make_checkpoint.py", "smollm2")), ("synthetic", synthetic)):
        nbytes = sum(path.stat().st_size for path in checkpoint.glob("*.safetensors"))
        console.note(f"  converting {nbytes / 1e9:.2f} GB")
        command = [*EDGEINFER, "convert", checkpoint, "-t", "q4_k_m", "-o", bench.scratch / "out.gguf", "--overwrite"]
        done = run_commands([*command, "--no-verify"])
        what = f"convert {name} ({nbytes / 1e9:.2f} GB), peak memory"
        yield (what, f"{done.peak_rss_bytes / 1e6:.0f} MB in {done.seconds:.1f} s", "", "", "does not grow")


COMPARISONS: dict[str, Callable[[Bench], Iterator[Row]]] = {
    "convert-small": convert_small,
    "convert-large": convert_large,
    "convert-gguf": convert_gguf,
    "throughput": throughput,
    "start": start,
    "help": help_text,
    "memory": memory,
}


def _lower(what: str, ours: Figure, theirs: Figure, unit: str, limit: str, digits: int = 2) -> Row:
    """A row where less is better."""
    ratio = f"{ours.median / theirs.median:.3f}"
    return (what, ours.text(unit, digits), theirs.text(unit, digits), ratio, f"≤ {limit}" if limit else "")


def _script(name: str, *arguments: str | Path) -> Path:
    """Run another script in its own process (it imports numpy) and return the path that it prints."""
    command = [sys.executable, str(REPOSITORY / "scripts" / name), *map(str, arguments)]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=False)
    if done.returncode:
        raise ResourceError(f"{name} failed", "its own message stands above")
    return Path(done.stdout.decode().strip())


def _line(cells: Row) -> str:
    return "| " + " | ".join(cells) + " |"


def _machine() -> str:
    from edgeinfer.bench.machine import cpu_name, library_build

    load = f", load average at the start {os.getloadavg()[0]:.1f}" if hasattr(os, "getloadavg") else ""
    return f"{cpu_name()}, {os.cpu_count()} CPUs, {platform.system()}, {library_build()}{load}"


def main() -> None:
    """Compare, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", choices=COMPARISONS, help="run only this one (repeatable)")
    parser.add_argument("--repetitions", type=int, default=5, metavar="N", help="default: %(default)s")
    arguments = parser.parse_args()
    machine = _machine()
    peers = build_peers.build()
    console.result("\n".join([_line(HEAD), "| --- | --- | --- | --- | --- |"]))
    cache_dir("compare").mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache_dir("compare")) as scratch:
        bench = Bench(peers, Path(scratch), arguments.repetitions)
        for name in arguments.only or COMPARISONS:
            console.note(f"{name}: {COMPARISONS[name].__doc__}")
            for row in COMPARISONS[name](bench):
                console.result(_line(row))
    console.result(f"\n{machine}")


if __name__ == "__main__":
    run(main)
