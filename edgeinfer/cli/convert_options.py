"""The options of `edgeinfer convert`; llama-quantize's flags, the fields of `options.ConvertOptions`."""

from __future__ import annotations

import math
import re
from decimal import Decimal
from pathlib import Path
from typing import Annotated

import typer

from edgeinfer.cli.runtime_options import Threads
from edgeinfer.errors import UsageError
from edgeinfer.options import ConvertOptions, parse_adapter

_DEFAULTS = ConvertOptions()


def converting(
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
) -> ConvertOptions:
    """How a checkpoint becomes a file."""
    return ConvertOptions(
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
