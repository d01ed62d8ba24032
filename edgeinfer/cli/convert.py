"""`edgeinfer convert`: a checkpoint becomes one quantized GGUF file."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from edgeinfer.cli import console, progress, table
from edgeinfer.cli.convert_options import converting
from edgeinfer.cli.option_groups import with_groups
from edgeinfer.errors import UsageError
from edgeinfer.options import ConvertOptions

if TYPE_CHECKING:
    from edgeinfer.api.convert import Converted
    from edgeinfer.convert.pipeline import Planned
    from edgeinfer.convert.plan import ConvertPlan


@with_groups(options=converting)
def command(
    source: Annotated[
        str,
        typer.Argument(
            metavar="SOURCE",
            help="Hugging Face checkpoint or PEFT (LoRA) adapter: a directory or ORG/NAME[@REVISION]; or a .gguf file.",
        ),
    ],
    output: Annotated[
        Path | None, typer.Option("-o", "--output", metavar="OUT", help="File to write [default: NAME-TYPE.gguf here].")
    ] = None,
    *,
    options: Callable[[], ConvertOptions],
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the plan and write nothing.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Quantize a Hugging Face checkpoint into one GGUF file, in one pass, and check the result.

    The checkpoint may be quantized already: FP8, GPTQ, AWQ, bitsandbytes, compressed-tensors, MXFP4, NVFP4. Of a model
    that also sees or hears, the text part is converted. A LoRA adapter becomes a file for `run --lora`, or is merged
    into its model with --lora. docs/convert.md has the list of models.
    """
    from edgeinfer.api.convert import plan_conversion, run_conversion

    wanted = options()
    if dry_run and wanted.has_target and wanted.calibrate is not None:
        raise UsageError(
            "--dry-run with --calibrate and a size: the types depend on what calibrating finds",
            "compute the matrix with `edgeinfer imatrix` and give it with --imatrix",
        )
    with progress.steps() as advance:
        planned = plan_conversion(source, output, wanted, advance)
    if dry_run:
        console.result_json(_plan_document(planned)) if as_json else console.result(_plan_text(planned))
        return
    for note in planned.plan.dropped:
        console.note(f"note: left out {note}")
    for note in planned.notes:
        console.note(f"note: {note}")
    if unweighted := planned.plan.unweighted:
        console.note(
            f"note: the importance matrix has nothing for {len(unweighted)} tensors, the first is {unweighted[0].name}"
        )
    if wanted.calibrate is not None:
        console.note(f"computing an importance matrix from {wanted.calibrate} with a temporary Q8_0 file")
    with progress.weights() as advance:
        converted = run_conversion(planned, wanted, advance)
    if as_json:
        console.result_json(dataclasses.asdict(converted))
    else:
        _summarize(converted, planned.plan, has_target=wanted.has_target)
        console.result(converted.output)


def _summarize(converted: Converted, plan: ConvertPlan, *, has_target: bool) -> None:
    size = f"{table.size(converted.bytes)} as {converted.type}, {converted.bits_per_weight:.2f} bits per weight"
    state = "verified" if converted.verified else "not verified"
    console.note(
        f"{converted.architecture}, {converted.parameters:,} parameters: {size}, {converted.seconds:.1f} s, {state}"
    )
    if has_target:
        console.note(f"types: {_shares_text(converted.tensor_types, converted.parameters)}")
    if plan.fallbacks:
        console.note(f"note: {_fallback_text(plan)}")


def _shares_text(weights_by_type: Mapping[str, int], parameters: int) -> str:
    """`Q5_0 61.2 %, Q8_0 20.1 %, …` of the weights."""
    return ", ".join(f"{name} {count / parameters:.1%}".replace("%", " %") for name, count in weights_by_type.items())


def _fallback_text(plan: ConvertPlan) -> str:
    pairs = [(t.fallback_from.name, t.type.name) for t in plan.fallbacks if t.fallback_from]
    counts = {pair: pairs.count(pair) for pair in sorted(set(pairs))}
    kinds = ", ".join(f"{count} {got} instead of {wanted}" for (wanted, got), count in counts.items())
    return (
        f"rows of {len(pairs)} of {len(plan.tensors)} tensors don't divide into the type's blocks: {kinds}; "
        f"{plan.bits_per_weight:.2f} bits per weight instead of {plan.bits_per_weight_without_fallbacks:.2f}"
    )


def _plan_document(planned: Planned) -> dict[str, Any]:
    plan = planned.plan
    return {
        "output": str(planned.output),
        "architecture": plan.architecture,
        "type": plan.file_type.name,
        "bytes": planned.nbytes,
        "bits_per_weight": round(plan.bits_per_weight, 4),
        "parameters": plan.n_parameters,
        "tensor_types": plan.weights_by_type,
        "tensors": [
            {
                "name": t.name,
                "shape": list(t.shape),
                "type": t.type.name,
                "bytes": t.nbytes,
                "fallback_from": t.fallback_from.name if t.fallback_from else None,
            }
            for t in plan.tensors
        ],
    }


def _plan_text(planned: Planned) -> str:
    plan = planned.plan
    rows = [
        (
            t.name,
            " x ".join(map(str, t.shape)),
            t.type.name,
            f"{t.nbytes:,}",
            f"instead of {t.fallback_from.name}" if t.fallback_from else "",
        )
        for t in plan.tensors
    ]
    lines = [
        table.render(("tensor", "shape", "type", "bytes", ""), rows, "<<<><"),
        "",
        f"{planned.output}: {plan.architecture}, {plan.n_parameters:,} parameters, {planned.nbytes:,} bytes, "
        f"{plan.bits_per_weight:.2f} bits per weight as {plan.file_type.name}",
    ]
    if len(plan.weights_by_type) > 1:
        lines.append(f"weights: {_shares_text(plan.weights_by_type, plan.n_parameters)}")
    if plan.fallbacks:
        lines.append(_fallback_text(plan))
    lines += [f"left out: {note}" for note in plan.dropped]
    lines += planned.notes
    return "\n".join(lines)
