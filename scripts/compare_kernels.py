"""Measures ik_llama.cpp's kernels against llama.cpp's in edgeinfer, and against the fork's own llama-bench.

Needs edgeinfer[fast]. Sides take turns; figures are medians with minimum and maximum, and their ratio. The fork's
llama-bench is compiled from the package's source and linked with the library of the installed package. Prints a
Markdown table.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from build_kernels import source
from fetch_model import fetch
from make_checkpoint import cached_checkpoint
from measuring import Figure, Run, alternate, run_commands, seconds
from sample_texts import sample_texts
from target_size import spread
from toolbox import cache_dir, run

from edgeinfer.api.convert import convert
from edgeinfer.cli import console
from edgeinfer.errors import ResourceError
from edgeinfer.native import ik_package
from edgeinfer.options import ConvertOptions

EDGEINFER = (sys.executable, "-m", "edgeinfer")
SIDES = ("llama.cpp", "ik")
HEAD = ("what", "model", "ik", "llama.cpp", "ratio")
THREADS = "2"
N_CHUNKS = "6"
N_CHARACTERS = 150_000
N_COMMON_CHARACTERS = 2000
_MAIN = """\
#include <cstdint>
int LLAMA_BUILD_NUMBER = 0;
const char * LLAMA_COMMIT = "";
int32_t cpu_get_num_math() { return 1; }
"""
"""What llama-bench takes of the fork's libcommon."""


@dataclass(frozen=True, slots=True)
class Case:
    """A model, and what the table calls it."""

    name: str
    path: Path


Row = tuple[str, ...]


def throughput(case: Case, repetitions: int) -> Iterator[Row]:
    """A prompt of 512 tokens and 128 tokens one by one."""
    tests = ["-p", "512", "-n", "128", "-r", "2", "-t", THREADS]
    theirs: list[str | Path] = [fork_bench(), "-m", case.path, "-rtr", "1", "-o", "json", *tests]
    sides: dict[str, Callable[[], Run]] = {
        **{side: _ours(case, side, *tests, "-o", "json") for side in SIDES},
        "ik's llama-bench": lambda: run_commands([*theirs, "-fa", "1"]),
    }
    runs = alternate(sides, repetitions)
    for number, label in enumerate(("pp512", "tg128")):
        reference, ours, bench = (
            Figure(tuple(max(json.loads(r.stdout)[number]["samples_ts"]) for r in side)) for side in runs.values()
        )
        yield _row(label, case, ours, reference, "t/s")
        yield _row(f"{label}, against the fork's llama-bench", case, ours, bench, "t/s")


def prefix(case: Case, repetitions: int) -> Iterator[Row]:
    """32 prompts that begin alike, 32 tokens each: the seconds of the whole `edgeinfer batch`."""
    beginning = sample_texts(N_CHARACTERS)[0][:N_COMMON_CHARACTERS]
    with tempfile.TemporaryDirectory() as scratch:
        rows = Path(scratch, "rows.jsonl")
        rows.write_text("".join(json.dumps(_request(n, beginning)) + "\n" for n in range(32)), "utf-8")
        command = [*EDGEINFER, "batch", case.path, rows]
        command += ["--no-prefix-cache", "--parallel", "32", "--threads", THREADS]
        sides = {side: lambda side=side: run_commands([*command, "--kernels", side]) for side in SIDES}  # type: ignore[misc]
        reference, ours = (seconds(side) for side in alternate(sides, repetitions).values())
    yield _row("32 prompts with some 500 tokens in common, 32 tokens each", case, ours, reference, "s")


def _request(number: int, beginning: str) -> dict[str, Any]:
    prompt = f"{beginning}\n\nQuestion {number}: what stands in line {3 * number + 1}?"
    return {"id": number, "prompt": prompt, "max_tokens": 32, "temperature": 0, "ignore_eos": True}


def speculation(case: Case, repetitions: int) -> Iterator[Row]:
    """What people ask, with drafts."""
    tests = ["--suite", "speculation", "-r", "1", "-n", "96", "-t", THREADS, "-o", "json"]
    runs = alternate({side: _ours(case, side, *tests) for side in SIDES}, repetitions)
    answers = {side: [json.loads(r.stdout) for r in of_side] for side, of_side in runs.items()}
    for number, workload in enumerate(row["workload"] for row in answers["ik"][0]):
        reference, ours = (Figure(tuple(rows[number]["draft_ts"] for rows in answers[side])) for side in SIDES)
        yield _row(workload, case, ours, reference, "t/s")


def quality(types: list[str]) -> Iterator[Row]:
    """The mean KL divergence of SmolLM2 in each type to BF16."""
    folder = cache_dir("kernels")
    folder.mkdir(parents=True, exist_ok=True)
    reference, text = folder / "smollm2-bf16.gguf", folder / "text.txt"
    if not reference.exists():
        spread(fetch("smollm2"), reference)
    text.write_text(sample_texts(N_CHARACTERS)[1], "utf-8")
    for kind in types:
        case = Case(f"SmolLM2-135M {kind}", _converted(reference, "smollm2", kind))
        arguments = [case.path, "-f", text, "--reference", reference, "--chunks", N_CHUNKS, "--json"]
        ours, theirs = (
            json.loads(run_commands([*EDGEINFER, "eval", *arguments, "--kernels", side]).stdout)["divergence"][
                "kld_mean"
            ]
            for side in SIDES[::-1]
        )
        yield ("KL divergence to BF16", case.name, f"{ours:.5f}", f"{theirs:.5f}", f"{ours / theirs:.3f}")


def _ours(case: Case, kernels: str, *arguments: str) -> Callable[[], Run]:
    return lambda: run_commands([*EDGEINFER, "bench", case.path, "--kernels", kernels, *arguments])


def _row(what: str, case: Case, ours: Figure, reference: Figure, unit: str) -> Row:
    ratio = ours.median / reference.median if unit == "t/s" else reference.median / ours.median
    return (what, case.name, ours.text(unit, 1), reference.text(unit, 1), f"{ratio:.2f}")


def _converted(source: Path, name: str, kind: str) -> Path:
    path = cache_dir("kernels") / f"{name}-{kind}.gguf"
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists():
        convert(source, path, ConvertOptions(type=kind, verify=False))
    return path


def fork_bench() -> Path:
    """The fork's llama-bench, linked with the library that edgeinfer uses. Built once for each of those."""
    libraries = ik_package.library_folders()
    if not libraries:
        raise ResourceError("ik_llama.cpp is not installed", "pip install 'edgeinfer[fast]'")
    folder = cache_dir("kernels") / hashlib.sha256(ik_package.identity().encode()).hexdigest()[:16]
    program = folder / "llama-bench"
    if program.exists():
        return program
    folder.mkdir(parents=True, exist_ok=True)
    main = folder / "main.cpp"
    main.write_text(_MAIN, "utf-8")
    fork = source()
    headers = [f"-I{fork / part}" for part in ("", "include", "ggml/include", "common", "vendor", "src")]
    console.note("compiling the fork's llama-bench")
    run_commands(
        ["c++", "-O2", "-std=c++17", *headers, main, fork / "examples/llama-bench/llama-bench.cpp"]
        + [libraries[0] / "libllama.so", libraries[0] / "libggml.so", "-Wl,--allow-shlib-undefined"]
        + [f"-Wl,-rpath,{library}" for library in libraries]
        + ["-o", program]
    )
    return program


def _of_checkpoint(name: str, shown: str, kind: str) -> Case:
    return Case(f"{shown} {kind}", _converted(cached_checkpoint(name), f"{name}-checkpoint", kind))


CASES: dict[str, Callable[[], Case]] = {
    "qwen": lambda: Case("Qwen2.5-Coder-0.5B Q4_K_M", fetch("qwen2.5-coder-0.5b")),
    "qwen-q4_0": lambda: _of_checkpoint("qwen2.5-coder-0.5b", "Qwen2.5-Coder-0.5B", "Q4_0"),
    "smollm2": lambda: Case("SmolLM2-135M Q4_1", fetch("smollm2")),
    "smollm2-q4_k_m": lambda: _of_checkpoint("smollm2", "SmolLM2-135M", "Q4_K_M"),
}
"""The models, by what --models calls them; fetched and made when they are measured."""
PARTS: dict[str, Any] = {"throughput": throughput, "prefix": prefix, "speculation": speculation}
TYPES = "Q4_0,Q4_1,Q4_K_M,Q5_K_M,Q6_K,Q8_0,IQ4_XS"


def main() -> None:
    """Measure, and print each row as soon as it is known."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=(*PARTS, "quality"), help="one part")
    parser.add_argument("--models", default=",".join(CASES), help="default: all, %(default)s")
    parser.add_argument("--types", default=TYPES, help="of the quality")
    parser.add_argument("--repetitions", type=int, default=3)
    arguments = parser.parse_args()
    names = arguments.models.split(",")
    if unknown := set(names) - CASES.keys():
        parser.error(f"--models has {', '.join(sorted(unknown))}, not one of {', '.join(CASES)}")
    for row in (HEAD, ("---",) * len(HEAD)):
        _print(row)
    for part in (PARTS[name] for name in PARTS if arguments.only in (None, name)):
        for name in names:
            for row in part(CASES[name](), arguments.repetitions):
                _print(row)
    for row in quality(arguments.types.split(",")) if arguments.only in (None, "quality") else ():
        _print(row)


def _print(row: Row) -> None:
    console.result(f"| {' | '.join(row)} |")


if __name__ == "__main__":
    try:
        run(main)
    except subprocess.SubprocessError as error:
        console.note(str(error))
        raise SystemExit(1) from None
