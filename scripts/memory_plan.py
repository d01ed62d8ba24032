"""Compares the plan for a model's memory with what runs really take, and prints a Markdown table.

Every run is a process of its own that answers a prompt which nearly fills the context: the plan is for the most that a
context of this size can need. There are no drafts, for a run takes as many of their rows of logits as it happens to.
Fails when a plan is below what was measured, or more than a tenth above it.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from fetch_model import fetch
from measuring import run_commands
from prefix_cache import empty_home, words
from toolbox import run

from edgeinfer.api.files import checked_header
from edgeinfer.api.memory import plan_run
from edgeinfer.api.vocabulary import tokenize
from edgeinfer.cli import console
from edgeinfer.errors import CheckFailedError
from edgeinfer.options import RuntimeOptions
from edgeinfer.runtime.footprint import Needs

MODELS = {
    "SmolLM2-135M Q4_1": "smollm2",
    "Gemma-3-270M Q4_K_M": "gemma3-270m",
    "Qwen2.5-0.5B Q4_K_M": "qwen2.5-coder-0.5b",
}
CONTEXTS = (512, 1024, 2048, 4096)
LEFT_TOKENS = 16  # of the context, for the answer
MOST = 1.1
MIB = 1 << 20
ROW = "| {} | {} | {} | {} | {} |"


@dataclass(frozen=True, slots=True)
class Row:
    """One comparison; bytes."""

    model: str
    ctx_size: int
    needs: Needs
    measured: int

    @property
    def ratio(self) -> float:
        """How much the plan is of the measurement."""
        return self.needs.peak / self.measured


def compare(name: str, path: Path, ctx_size: int, scratch: Path) -> Row:
    """Plan a run, and run it."""
    plan = plan_run(checked_header(path), RuntimeOptions(ctx_size=ctx_size, draft="off"))
    prompt = scratch / "prompt.txt"
    prompt.write_text(_prompt(path, ctx_size - LEFT_TOKENS))
    flags = ("--raw", "-f", prompt, "-c", str(ctx_size), "-n", "8", "--temp", "0", "--draft", "off", "--json")
    with empty_home(scratch):
        done = run_commands((sys.executable, "-m", "edgeinfer", "run", path, *flags))
    return Row(name, ctx_size, plan.needs, done.peak_rss_bytes)


def _prompt(path: Path, n_tokens: int) -> str:
    """So many tokens at most, and only a few less: a word is a token, as a rule."""
    text = words(n_tokens, seed=1).split()
    while (excess := len(tokenize(path, " ".join(text))) - n_tokens) > 0:
        del text[-excess:]
    return " ".join(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", action="append", choices=[*MODELS.values()], help="only this one (repeatable)")
    parser.add_argument("--contexts", default=",".join(map(str, CONTEXTS)), help="sizes, with commas between them")
    arguments = parser.parse_args()
    os.environ.pop("EDGEINFER_PREFIX_CACHE_SIZE", None)
    rows = []
    console.result(ROW.format("model", "context", "planned", "measured", "ratio"))
    console.result("| --- | --- | --- | --- | --- |")
    with tempfile.TemporaryDirectory() as folder:
        for name, key in MODELS.items():
            if arguments.model and key not in arguments.model:
                continue
            for ctx_size in map(int, arguments.contexts.split(",")):
                row = compare(name, fetch(key), ctx_size, Path(folder))
                rows.append(row)
                planned, measured = (f"{nbytes / MIB:.0f} MiB" for nbytes in (row.needs.peak, row.measured))
                console.result(ROW.format(name, ctx_size, planned, measured, f"{row.ratio:.3f}"))
                console.note(f"  {row.needs}")
    wrong = [f"{r.model} at {r.ctx_size}: {r.ratio:.3f}" for r in rows if not 1 <= r.ratio <= MOST]
    if wrong:
        raise CheckFailedError(f"plans that are off: {', '.join(wrong)}", "see runtime/footprint.py")


if __name__ == "__main__":
    run(main)
