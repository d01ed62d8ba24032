"""Measures drafts against llama-server's draftless kinds of speculation, each against plain decoding in the same run.

Every kind has a server of its own; the same prompt, token by token, goes to it and to a server without speculation in
turn, greedily. edgeinfer answers with its one default setting and plainly in turn (`bench --suite speculation`). Prints
a Markdown table: medians with their range, and how many times as fast as plain decoding. Without --only it takes half
an hour; one workload with three repetitions takes about four minutes.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import build_peers
from fetch_model import fetch
from measuring import Figure, run_commands
from serving_peers import MODELS, ask_server, running_server
from toolbox import run

from edgeinfer.bench.workloads import WORKLOADS, Workload
from edgeinfer.cli import console
from edgeinfer.errors import ResourceError

KINDS = ("ngram-simple", "ngram-map-k", "ngram-map-k4v", "ngram-mod", "ngram-cache", "ngram-mod,ngram-map-k")
N_CTX = 2048
ROW = "| {} | {} | {} | {} | {} | {} |"
NAMES = {workload.name.replace(" ", "-"): workload for workload in WORKLOADS}

_OURS = """
import json, sys
import edgeinfer
from edgeinfer.bench.speculation import Suite, run
from edgeinfer.bench.workloads import WORKLOADS
from edgeinfer.options import RuntimeOptions
chosen = tuple(workload for workload in WORKLOADS if workload.name == {name!r})
options = RuntimeOptions(ctx_size={n_ctx})
print(json.dumps(list(run([{model!r}], Suite(repetitions={repetitions}, workloads=chosen), options))))
"""
_TOKENS = """
import json
import edgeinfer
from edgeinfer.options import RuntimeOptions
from edgeinfer.bench.workloads import WORKLOADS
with edgeinfer.load({model!r}, RuntimeOptions(ctx_size=512, prefix_cache=False)) as model:
    print(json.dumps({{workload.name: model.tokens(workload.prompt).tolist() for workload in WORKLOADS}}))
"""


def measure(
    model: Path, peers: build_peers.Peers, workloads: list[Workload], kinds: list[str], repetitions: int
) -> Iterator[str]:
    """A row for edgeinfer and for every kind, one workload after the other."""
    prompts = json.loads(_python(_TOKENS.format(model=str(model))))
    for workload in workloads:
        yield _ours(model, workload, repetitions)
        for kind in kinds:
            yield _theirs(model, peers, workload, prompts[workload.name], kind, repetitions)


def _ours(model: Path, workload: Workload, repetitions: int) -> str:
    code = _OURS.format(model=str(model), name=workload.name, repetitions=repetitions, n_ctx=N_CTX)
    (row,) = json.loads(_python(code))
    ratio = f"{row['speed_up']:.2f} × ({row['speed_up_min']:.2f} to {row['speed_up_max']:.2f})"
    speeds = (f"{row['plain_ts']:.1f} t/s", f"{row['draft_ts']:.1f} t/s")
    return ROW.format(workload.name, "edgeinfer", *speeds, ratio, f"{row['accepted_tokens']} / {row['drafted_tokens']}")


def _theirs(
    model: Path, peers: build_peers.Peers, workload: Workload, prompt: list[int], kind: str, repetitions: int
) -> str:
    body = {
        "prompt": prompt,
        "n_predict": workload.max_tokens,
        "temperature": workload.temperature,
        "seed": 1,
        "cache_prompt": True,
    }
    with ExitStack() as servers:
        plain = servers.enter_context(running_server(model, peers, 1, N_CTX))
        drafting = servers.enter_context(running_server(model, peers, 1, N_CTX, "--spec-type", kind))
        for url in (plain, drafting):  # from here on the prompt is computed, and the weights are in memory
            ask_server(url, body | {"n_predict": 2})
        pairs = []
        for number in range(repetitions):
            sides = [plain, drafting][:: -1 if number % 2 else 1]
            timings = {url: _timings(url, body) for url in sides}
            pairs.append((timings[plain], timings[drafting]))
            console.note(f"  {workload.name}, {kind} {number + 1}/{repetitions}")
    slow, quick = (Figure(tuple(pair[i]["predicted_per_second"] for pair in pairs)) for i in (0, 1))
    ratios = [b["predicted_per_second"] / a["predicted_per_second"] for a, b in pairs]
    ratio = f"{statistics.median(ratios):.2f} × ({min(ratios):.2f} to {max(ratios):.2f})"
    last = pairs[-1][1]
    counts = f"{last.get('draft_n_accepted', 0)} / {last.get('draft_n', 0)}"
    speeds = (f"{slow.median:.1f} t/s", f"{quick.median:.1f} t/s")
    return ROW.format(workload.name, f"llama-server {kind}", *speeds, ratio, counts)


def _timings(url: str, body: dict[str, Any]) -> dict[str, Any]:
    answer = ask_server(url, body)
    if answer["tokens_predicted"] < 2:
        raise ResourceError("llama-server gave no answer", "ask it by hand")
    timings: dict[str, Any] = answer["timings"]
    return timings


def _python(code: str) -> bytes:
    return run_commands([sys.executable, "-c", code]).stdout


def main() -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", action="append", choices=MODELS, help="only this one (repeatable)")
    parser.add_argument("--only", action="append", choices=NAMES, help="only this workload (repeatable)")
    parser.add_argument("--kind", action="append", choices=KINDS, help="only this kind of theirs (repeatable)")
    parser.add_argument("--repetitions", type=int, default=3, metavar="N", help="default: %(default)s")
    arguments = parser.parse_args()
    peers = build_peers.build()
    os.environ["EDGEINFER_HOME"] = tempfile.mkdtemp()
    workloads = [NAMES[name] for name in arguments.only or NAMES]
    console.result(ROW.format("workload", "who", "plain", "with drafts", "times as fast", "accepted / drafted"))
    console.result("| --- | --- | --- | --- | --- | --- |")
    for name in arguments.model or MODELS:
        rows = measure(fetch(MODELS[name]), peers, workloads, arguments.kind or list(KINDS), arguments.repetitions)
        for row in rows:
            console.result(row.replace("| ", f"| {name}: ", 1))


if __name__ == "__main__":
    run(main)
