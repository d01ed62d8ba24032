"""`edgeinfer convert`: a checkpoint becomes one quantized GGUF file."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from edgeinfer.cli import console, progress, table
from edgeinfer.cli.runtime_options import Threads
from edgeinfer.errors import UsageError
from edgeinfer.options import ConvertOptions, parse_adapter

if TYPE_CHECKING:
    from edgeinfer.api.convert import Converted
    from edgeinfer.convert.pipeline import Planned
    from edgeinfer.convert.plan import ConvertPlan

_DEFAULTS = ConvertOptions()


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
    type_: Annotated[
        str | None,
        typer.Option(
            "-t",
            "--type",
            metavar="TYPE",
            help="File type as llama.cpp names them: Q8_0, Q6_K, … [default: Q4_K_M; F32 for an adapter].",
        ),
    ] = _DEFAULTS.type,
    target_bpw: Annotated[
        float | None,
        typer.Option("--target-bpw", metavar="BITS", help="Instead of a type: the most bits per weight, as 4.5."),
    ] = _DEFAULTS.target_bpw,
    target_size: Annotated[
        str | None, typer.Option("--target-size", metavar="SIZE", help="Instead of a type: the largest file, as 300M.")
    ] = None,
    tensor_type: Annotated[
        list[str] | None,
        typer.Option("--tensor-type", metavar="REGEX=TYPE", help="Type of the tensors whose name fits (repeatable)."),
    ] = None,
    output_tensor_type: Annotated[
        str | None, typer.Option("--output-tensor-type", metavar="TYPE", help="Type of output.weight.")
    ] = _DEFAULTS.output_tensor_type,
    token_embedding_type: Annotated[
        str | None, typer.Option("--token-embedding-type", metavar="TYPE", help="Type of token_embd.weight.")
    ] = _DEFAULTS.token_embedding_type,
    imatrix: Annotated[
        Path | None, typer.Option("--imatrix", metavar="FILE", help="Importance matrix of this model: GGUF or .dat.")
    ] = None,
    calibrate: Annotated[
        Path | None, typer.Option("--calibrate", metavar="FILE", help="Compute an importance matrix from a text file.")
    ] = None,
    pure: Annotated[bool, typer.Option("--pure", help="Give every tensor TYPE; no mixture.")] = _DEFAULTS.pure,
    no_fallback: Annotated[
        bool, typer.Option("--no-fallback", help="Refuse instead of choosing another type for rows that don't divide.")
    ] = False,
    pre: Annotated[
        str | None,
        typer.Option("--pre", metavar="NAME", help="llama.cpp's name of the pre-tokenizer [default: found out]."),
    ] = _DEFAULTS.pre,
    allow_requantize: Annotated[
        bool, typer.Option("--allow-requantize", help="Quantize a GGUF source's quantized tensors again.")
    ] = _DEFAULTS.allow_requantize,
    split_max_size: Annotated[
        str | None, typer.Option("--split-max-size", metavar="SIZE", help="Write shards of up to SIZE: 500M, 2G.")
    ] = None,
    lora: Annotated[
        list[str] | None,
        typer.Option("--lora", metavar="DIR[=SCALE]", help="Merge a PEFT adapter into the weights (repeatable)."),
    ] = None,
    base: Annotated[
        str | None,
        typer.Option(
            "--base", metavar="CHECKPOINT", help="What an adapter was trained on [default: what the adapter states]."
        ),
    ] = None,
    threads: Threads = _DEFAULTS.threads,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace OUT if it exists.")] = _DEFAULTS.overwrite,
    no_verify: Annotated[bool, typer.Option("--no-verify", help="Don't reopen and check the result.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the plan and write nothing.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Quantize a Hugging Face checkpoint into one GGUF file, in one pass, and check the result.

    The checkpoint may be quantized already: FP8, GPTQ, AWQ, bitsandbytes, compressed-tensors, MXFP4, NVFP4. Of a model
    that also sees or hears, the text part is converted. A LoRA adapter becomes a file for `run --lora`, or is merged
    into its model with --lora. docs/convert.md has the list of models.
    """
    from edgeinfer.api.convert import plan_conversion, run_conversion

    options = ConvertOptions(
        type=type_,
        target_bpw=target_bpw,
        target_size=None if target_size is None else _target_nbytes(target_size),
        tensor_type=tuple(map(_pattern_and_type, tensor_type or ())),
        output_tensor_type=output_tensor_type,
        token_embedding_type=token_embedding_type,
        pure=pure,
        fallback=not no_fallback,
        pre=pre,
        allow_requantize=allow_requantize,
        split_max_size=None if split_max_size is None else _nbytes(split_max_size),
        imatrix=imatrix,
        calibrate=calibrate,
        lora=tuple(map(parse_adapter, lora or ())),
        base=base,
        threads=threads,
        overwrite=overwrite,
        verify=not no_verify,
    )
    if dry_run and options.has_target and calibrate is not None:
        raise UsageError(
            "--dry-run with --calibrate and a size: the types depend on what calibrating finds",
            "compute the matrix with `edgeinfer imatrix` and give it with --imatrix",
        )
    with progress.steps() as advance:
        planned = plan_conversion(source, output, options, advance)
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
    if calibrate is not None:
        console.note(f"computing an importance matrix from {calibrate} with a temporary Q8_0 file")
    with progress.weights() as advance:
        converted = run_conversion(planned, options, advance)
    if as_json:
        console.result_json(dataclasses.asdict(converted))
    else:
        _summarize(converted, planned.plan, has_target=options.has_target)
        console.result(converted.output)


def _pattern_and_type(text: str) -> tuple[str, str]:
    pattern, found, name = text.rpartition("=")
    if not found or not pattern:
        raise UsageError(f"--tensor-type {text!r} is not REGEX=TYPE", "for example attn_v=q8_0")
    return pattern, name


def _nbytes(text: str) -> int:
    """A size as llama-gguf-split takes it: whole millions or billions of bytes."""
    match = re.fullmatch(r"(\d{1,9})([MG])", text.upper())
    if not match or not int(match[1]):
        raise UsageError(f"--split-max-size {text!r} is not a size", "for example 500M or 2G")
    return int(match[1]) * {"M": 10**6, "G": 10**9}[match[2]]


def _target_nbytes(text: str) -> int:
    """A size in bytes, or in millions or billions of them, with decimals: `380M`, `380MB`."""
    match = re.fullmatch(r"(\d{1,18}(?:\.\d{1,9})?)([KMG]?)B?", text.upper())
    if not match:
        raise UsageError(f"--target-size {text!r} is not a size", "for example 380M or 1.5G, powers of ten")
    return math.floor(Decimal(match[1]) * {"": 1, "K": 10**3, "M": 10**6, "G": 10**9}[match[2]])


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
