"""`edgeinfer doctor`: what would run here, and how."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from edgeinfer.cli import console, table

if TYPE_CHECKING:
    from edgeinfer.bench.doctor import Report, Verdict


def command(
    model: Annotated[
        str | None, typer.Argument(metavar="[MODEL]", help="Say how this model would run; nothing is fetched.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Show what this machine offers: CPU and kernels, memory and its speed, GPUs, the library, the store."""
    from edgeinfer.bench.doctor import examine

    report = examine(model)
    console.result_json(asdict(report)) if as_json else console.result(_text(report))


def _text(report: Report) -> str:
    cpu, memory = report.cpu, report.memory
    plural = "" if cpu.threads == 1 else "s"
    gpus = [f"{g.name}: {g.description}, {_size(g.free_nbytes)} of {_size(g.total_nbytes)} free" for g in report.gpus]
    rows = [
        ("cpu", f"{cpu.name}; {cpu.threads} thread{plural} by default, {cpu.logical_cpus} logical CPUs"),
        ("features", " ".join(cpu.features)),
        ("kernels", f"{cpu.simd or 'plain code'}; faster layout for {', '.join(cpu.repacked_types) or 'no type'}"),
        ("memory", f"{_size(memory.available_bytes)} of {_size(memory.installed_bytes)} available"),
        ("bandwidth", f"{memory.bandwidth_gbps:.1f} GB/s, read by {cpu.threads} thread{plural}"),
        ("gpu", "; ".join(gpus) or "none that this build of the library can use"),
        ("library", f"{report.library.package}, llama.cpp {report.library.version}"),
        ("ik", report.fork.problem or f"ik-llama-cpp-python {report.fork.version}: runs models where it is faster"),
        ("store", f"{report.store.path}: {report.store.models} models, {_size(report.store.bytes)}"),
        *(_verdict(report.model) if report.model else ()),
    ]
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{width}}  {table.hanging(text, width + 2)}" for name, text in rows)


def _verdict(verdict: Verdict) -> list[tuple[str, str]]:
    rows = [("model", verdict.model)]
    if not verdict.fits:
        return [*rows, ("fits", f"no: {verdict.reason}")]
    rows.append(
        ("fits", f"yes, needs {_size(verdict.needed_bytes)}" + (f": {verdict.reason}" if verdict.reason else ""))
    )
    rows.append(("context", f"{verdict.ctx_size} tokens unless told otherwise, {verdict.max_ctx_size} at most"))
    rows.append(("run by", f"{verdict.kernels}" + (f" ({verdict.kernels_note})" if verdict.kernels_note else "")))
    if verdict.gpu_layers:
        rows.append(("gpu layers", str(verdict.gpu_layers)))
    if verdict.decode_tps_limit is not None:
        rows.append(
            ("decode", f"at most {verdict.decode_tps_limit:.1f} tokens/s, at the memory's speed as measured now")
        )
    return rows


def _size(nbytes: int | None) -> str:
    return "unknown" if nbytes is None else table.size(nbytes)
