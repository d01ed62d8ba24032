"""The options of every command that loads a model; llama.cpp's flags, the defaults of `options.RuntimeOptions`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from edgeinfer.cli import console
from edgeinfer.cli.option_groups import with_groups
from edgeinfer.options import (
    CACHE_TYPES,
    DEFAULT_CACHE_TYPE,
    DRAFTS,
    FLASH_ATTN,
    KERNELS,
    MAX_DRAFT_TOKENS,
    SPLIT_MODES,
    RuntimeOptions,
    parse_adapter,
    parse_gpu_layers,
    parse_tensor_split,
)

if TYPE_CHECKING:
    from edgeinfer.api.model import Model

DEFAULTS = RuntimeOptions()
MODEL_HELP = "A .gguf file, a directory with one, a name of `models list`, or ORG/NAME[:QUANT] on the Hugging Face Hub"

Threads = Annotated[int | None, typer.Option("--threads", metavar="N", help="Threads [default: physical cores].")]
Verbose = Annotated[bool, typer.Option("-v", "--verbose", help="Show the C library's log.")]


def loading(
    kernels: Annotated[
        str,
        typer.Option(
            "--kernels",
            metavar="|".join(KERNELS),
            help="Whose kernels run the model: auto takes the faster; ik is ik_llama.cpp, of edgeinfer[fast].",
        ),
    ] = DEFAULTS.kernels,
    flash_attn: Annotated[
        str, typer.Option("-fa", "--flash-attn", metavar="|".join(FLASH_ATTN), help="Flash attention.")
    ] = DEFAULTS.flash_attn,
    cache_type_k: Annotated[
        str | None,
        typer.Option(
            "-ctk",
            "--cache-type-k",
            metavar="TYPE",
            help=f"Type of the K cache: {', '.join(CACHE_TYPES)} [default: {DEFAULT_CACHE_TYPE}].",
        ),
    ] = DEFAULTS.cache_type_k,
    cache_type_v: Annotated[
        str | None,
        typer.Option(
            "-ctv", "--cache-type-v", metavar="TYPE", help=f"Type of the V cache [default: {DEFAULT_CACHE_TYPE}]."
        ),
    ] = DEFAULTS.cache_type_v,
    no_mmap: Annotated[bool, typer.Option("--no-mmap", help="Read the file instead of mapping it.")] = False,
    mlock: Annotated[
        bool, typer.Option("--mlock", help="Lock the model in memory, so that it is never swapped out.")
    ] = DEFAULTS.mlock,
    gpu_layers: Annotated[
        str, typer.Option("-ngl", "--gpu-layers", metavar="auto|all|N", help="Layers on the GPU; auto: as many as fit.")
    ] = "auto",
    split_mode: Annotated[
        str, typer.Option("-sm", "--split-mode", metavar="|".join(SPLIT_MODES), help="How several GPUs share a model.")
    ] = DEFAULTS.split_mode,
    tensor_split: Annotated[
        str,
        typer.Option("-ts", "--tensor-split", metavar="N,N...", help="Shares of the GPUs [default: by free memory]."),
    ] = "",
    main_gpu: Annotated[
        int, typer.Option("-mg", "--main-gpu", metavar="N", help="The GPU for everything, with split mode none.")
    ] = DEFAULTS.main_gpu,
    lora: Annotated[
        list[str] | None,
        typer.Option("--lora", metavar="FILE[=SCALE]", help="Add an adapter, a .gguf file, to the model (repeatable)."),
    ] = None,
) -> RuntimeOptions:
    """How a model is loaded."""
    return RuntimeOptions(
        kernels=kernels,
        flash_attn=flash_attn,
        cache_type_k=cache_type_k,
        cache_type_v=cache_type_v,
        mmap=not no_mmap,
        mlock=mlock,
        gpu_layers=parse_gpu_layers(gpu_layers),
        split_mode=split_mode,
        tensor_split=parse_tensor_split(tensor_split),
        main_gpu=main_gpu,
        lora=tuple(map(parse_adapter, lora or ())),
    )


@with_groups(options=loading)
def drafting(
    options: Callable[[], RuntimeOptions],
    draft: Annotated[
        str,
        typer.Option(
            "--draft",
            metavar="|".join((*DRAFTS, "FILE.gguf")),
            help="Guess several tokens and let the model check them at once.",
        ),
    ] = DEFAULTS.draft,
    draft_max: Annotated[
        int, typer.Option("--draft-max", metavar="N", help=f"Most tokens of a guess, 1 to {MAX_DRAFT_TOKENS}.")
    ] = DEFAULTS.draft_max,
    draft_layers: Annotated[
        int | None,
        typer.Option(
            "--draft-layers", metavar="N", help="With --draft layers: guess with this many of the first layers."
        ),
    ] = DEFAULTS.draft_layers,
) -> RuntimeOptions:
    """How a model is loaded, and where drafts come from."""
    return replace(options(), draft=draft, draft_max=draft_max, draft_layers=draft_layers)


@with_groups(options=drafting)
def answering(
    options: Callable[[], RuntimeOptions],
    threads: Threads = DEFAULTS.threads,
    no_prefix_cache: Annotated[
        bool, typer.Option("--no-prefix-cache", help="Neither use nor keep the KV state of prompts on disk.")
    ] = False,
) -> RuntimeOptions:
    """How a model is run to answer prompts, but for the context, which means another thing to every command."""
    return replace(options(), threads=threads, prefix_cache=not no_prefix_cache)


def fixed_cache_types(options: RuntimeOptions) -> RuntimeOptions:
    """The options for measurements: no smaller type where memory is short, but an error."""
    return replace(options, cache_type_k=options.type_k, cache_type_v=options.type_v)


def tell_plan(model: Model, *, verbose: bool) -> None:
    """Say on stderr what the machine made of the options, if that is not what one expects."""
    for note in model.plan.notes:
        console.note(f"note: {note}")
    if verbose and model.kernels_note:
        console.note(f"note: {model.kernels}'s kernels: {model.kernels_note}")
    if verbose and model.plan.gpu_note and not model.plan.gpu_was_asked_for:
        console.note(f"note: {model.plan.gpu_note}")
