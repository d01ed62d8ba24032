"""Holds `imatrix` and `eval` against llama-imatrix and llama-perplexity; prints the comparison as a table.

MODEL and REFERENCE are .gguf files of one model; the text is the docstrings of Python's standard library. With
`--golden` the model is SmolLM2, the text a small one, and what the peers say goes to tests/quality/golden.json.
Needs the peers (scripts/build_peers.py) and, for a reference, 25 MB of disk per chunk and 50k tokens of vocabulary.
"""

from __future__ import annotations

import argparse
import ast
import ctypes
import json
import re
import subprocess
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

import build_peers
import llama_cpp
import numpy as np
from fetch_model import fetch
from toolbox import REPOSITORY, run

from edgeinfer.api.imatrix import imatrix
from edgeinfer.convert.file_types import FILE_TYPES
from edgeinfer.convert.imatrix import load_imatrix
from edgeinfer.errors import ResourceError
from edgeinfer.native.devices import default_threads
from edgeinfer.quality.evaluate import Evaluation, evaluate
from edgeinfer.types import Importance

GOLDEN = REPOSITORY / "tests" / "quality" / "golden.json"
GOLDEN_CTX_SIZE, GOLDEN_CHUNKS = 128, 3
SAMPLED_COLUMNS = 4

# What llama-perplexity prints after "Mean    KLD:" and the like, and where we have it.
_PATTERNS = {
    "perplexity": r"Mean PPL\(Q\) +: +(\S+) ± +(\S+)",
    "reference_perplexity": r"Mean PPL\(base\) +: +(\S+) ± +(\S+)",
    "log_perplexity_ratio": r"Mean ln\(PPL\(Q\)/PPL\(base\)\) +: +(\S+) ± +(\S+)",
    "kld_mean": r"Mean +KLD: +(\S+) ± +(\S+)",
    "kld_median": r"Median +KLD: +(\S+)",
    "kld_p90": r"90\.0% +KLD: +(\S+)",
    "kld_p99": r"99\.0% +KLD: +(\S+)",
    "kld_max": r"Maximum KLD: +(\S+)",
    "delta_p_mean": r"Mean +Δp: +(\S+) ± +(\S+) %",
    "delta_p_rms": r"RMS Δp +: +(\S+) ± +(\S+) %",
    "same_top": r"Same top p: +(\S+) ± +(\S+) %",
}
_PERCENT = ("delta_p_mean", "delta_p_rms", "same_top")


def golden_text() -> str:
    """About 500 tokens that do not repeat each other."""
    subjects = ("The river", "A small engine", "Our neighbour", "This table", "The old library")
    verbs = ("carries", "holds", "measures", "repairs", "remembers")
    objects = ("seven stones", "the morning light", "12.5 litres of water", "a letter from 1908", "every second word")
    return "\n".join(
        f"{subjects[i % 5]} {verbs[i * 3 % 7 % 5]} {objects[i * 2 % 11 % 5]}, and then number {i * i} follows."
        for i in range(40)
    )


def library_text() -> str:
    """The longer docstrings of Python's standard library: half a million characters that every machine has."""
    found = []
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        for node in ast.walk(ast.parse(path.read_bytes())):
            if isinstance(node, ast.Module | ast.FunctionDef | ast.ClassDef):
                found.append(ast.get_docstring(node) or "")
    return "\n\n".join(text for text in found if len(text) > 400)


def peer_imatrix(tools: build_peers.Peers, model: Path, text: Path, output: Path, ctx: int, chunks: int) -> None:
    """llama-imatrix."""
    _tool(tools, "llama-imatrix", "-m", model, "-f", text, "-o", output, "-c", ctx, "--chunks", chunks, "--no-ppl")


def peer_perplexity(tools: build_peers.Peers, model: Path, text: Path, ctx: int, chunks: int) -> tuple[float, float]:
    """llama-perplexity's final estimate and its error."""
    log = _tool(tools, "llama-perplexity", "-m", model, "-f", text, "-c", ctx, "--chunks", chunks)
    match = re.search(r"Final estimate: PPL = (\S+) \+/- (\S+)", log)
    assert match, log[-2000:]
    return float(match[1]), float(match[2])


def peer_divergence(
    tools: build_peers.Peers, model: Path, reference: Path, text: Path, ctx: int, chunks: int, scratch: Path
) -> dict[str, float]:
    """llama-perplexity --kl-divergence, by our names; probabilities from 0 to 1."""
    logits = scratch / "logits"
    base = ("-f", text, "-c", ctx, "--chunks", chunks, "--kl-divergence-base", logits)
    _tool(tools, "llama-perplexity", "-m", reference, *base)
    log = _tool(tools, "llama-perplexity", "-m", model, *base, "--kl-divergence")
    found = {}
    for name, pattern in _PATTERNS.items():
        match = re.search(pattern, log)
        assert match, f"{name} not in {log[-4000:]}"
        scale = 0.01 if name in _PERCENT else 1
        found[name] = float(match[1].rstrip("%")) * scale
        if match.lastindex == 2:
            found[f"{name}_error"] = float(match[2]) * scale
    return found


def _tool(tools: build_peers.Peers, name: str, *arguments: object) -> str:
    command = [str(tools.tool(name)), *map(str, arguments), "-t", str(default_threads())]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    if done.returncode:
        raise ResourceError(f"{name} failed with code {done.returncode}", done.stderr[-500:])
    return done.stdout + done.stderr


def sample(entry: Importance) -> dict[str, Any]:
    """A few numbers that stand for an entry: its counts, its sum, some columns."""
    columns = np.linspace(0, entry.sums.size - 1, SAMPLED_COLUMNS).astype(int)
    return {
        "counts": entry.counts.tolist(),
        "total": float(entry.sums.sum(dtype=np.float64)),
        "columns": [float(entry.sums[i]) for i in columns],
    }


def ours_by_name(result: Evaluation) -> dict[str, float]:
    """The figures of an evaluation in one flat dictionary."""
    assert result.divergence
    slots = type(result.divergence).__dataclass_fields__
    figures = {name: getattr(result.divergence, name) for name in slots if name != "reference"}
    return {"perplexity": result.perplexity, "perplexity_error": result.perplexity_error, **figures}


def requantize(model: Path, output: Path) -> None:
    """A smaller copy of a quantized model: Q3_K_M, by the installed library."""
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype, params.allow_requantize = FILE_TYPES["Q3_K_M"].id, True
    if llama_cpp.llama_model_quantize(bytes(model), bytes(output), ctypes.byref(params)):
        raise ResourceError(f"{model}: cannot be quantized again", "see the library's log")


def _write_golden(tools: build_peers.Peers, scratch: Path) -> None:
    model, text, matrix = fetch("smollm2"), scratch / "text.txt", scratch / "matrix.gguf"
    text.write_text(golden_text(), "utf-8")
    size = GOLDEN_CTX_SIZE, GOLDEN_CHUNKS
    peer_imatrix(tools, model, text, matrix, *size)
    other = scratch / "other.gguf"  # the divergence needs two models
    requantize(model, other)
    golden = {
        "imatrix": {name: sample(entry) for name, entry in sorted(load_imatrix(matrix).entries.items())},
        "perplexity": peer_perplexity(tools, model, text, *size),
        "divergence": peer_divergence(tools, other, model, text, *size, scratch),
    }
    GOLDEN.write_text(json.dumps(golden, indent=1) + "\n", "utf-8")
    print(GOLDEN)


def _compare(tools: build_peers.Peers, model: Path, reference: Path, chunks: int, scratch: Path) -> None:
    text, size = scratch / "text.txt", (512, chunks)
    text.write_text(library_text(), "utf-8")
    theirs, ours = scratch / "theirs.gguf", scratch / "ours.gguf"
    peer_imatrix(tools, reference, text, theirs, *size)
    computed = imatrix(reference, text, ours, ctx_size=512, chunks=chunks)
    print(f"imatrix of {reference.name}: {difference(ours, theirs)}; {computed.seconds:.1f} s")
    plain = evaluate(reference, text, chunks=chunks)
    value, error = peer_perplexity(tools, reference, text, *size)
    print(f"perplexity of {reference.name}: {plain.perplexity:.4f} ± {plain.perplexity_error:.5f}, ", end="")
    print(f"llama-perplexity {value:.4f} ± {error:.5f}")
    result = evaluate(model, text, reference=reference, chunks=chunks)
    peer = peer_divergence(tools, model, reference, text, *size, scratch)
    print(f"{model.name} against {reference.name}, {result.tokens} tokens, {result.seconds:.1f} s")
    print("| figure | edgeinfer eval | llama-perplexity |\n| --- | --- | --- |")
    for name, figure in ours_by_name(result).items():
        if name in peer:
            print(f"| {name} | {figure:.6f} | {peer[name]:.6f} |")


def difference(ours: Path, theirs: Path) -> str:
    """The largest relative difference of any mean square in two matrices of the same tensors."""
    a, b = load_imatrix(ours).entries, load_imatrix(theirs).entries
    assert a.keys() == b.keys(), a.keys() ^ b.keys()
    worst, name_of_worst, total = 0.0, "", 0
    for name in a:
        assert a[name].counts.tolist() == b[name].counts.tolist(), name
        relative = np.abs(a[name].sums - b[name].sums) / np.maximum(b[name].sums, np.finfo(np.float32).tiny)
        total += relative.size
        if relative.max() > worst:
            worst, name_of_worst = float(relative.max()), name
    return f"largest relative difference {worst:.2g} of {total} values in {len(a)} tensors ({name_of_worst})"


def main() -> None:
    """Compare, or write the golden file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", type=Path, help="a quantized .gguf file")
    parser.add_argument("reference", nargs="?", type=Path, help="the same model, unquantized: also for the matrix")
    parser.add_argument("--chunks", type=int, default=20, help="passages of 512 tokens (default 20)")
    parser.add_argument("--golden", action="store_true", help="rewrite tests/quality/golden.json instead")
    arguments = parser.parse_args()
    if not arguments.golden and not (arguments.model and arguments.reference):
        parser.error("give MODEL and REFERENCE, or --golden")
    tools = build_peers.build()
    with tempfile.TemporaryDirectory() as scratch:
        if arguments.golden:
            _write_golden(tools, Path(scratch))
        else:
            _compare(tools, arguments.model, arguments.reference, arguments.chunks, Path(scratch))


if __name__ == "__main__":
    run(main)
