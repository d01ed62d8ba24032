"""The options of every command that loads a model; llama.cpp's flags, the defaults of `options.RuntimeOptions`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from edgeinfer.cli import console
from edgeinfer.options import (
    CACHE_TYPES,
    DEFAULT_CACHE_TYPE,
    DRAFTS,
    FLASH_ATTN,
    MAX_DRAFT_TOKENS,
    SPLIT_MODES,
    RuntimeOptions,
)

if TYPE_CHECKING:
    from edgeinfer.api.model import Model

DEFAULTS = RuntimeOptions()
MODEL_HELP = "A .gguf file, a directory with one, a name of `models list`, or ORG/NAME[:QUANT] on the Hugging Face Hub"

Threads = Annotated[int | None, typer.Option("--threads", metavar="N", help="Threads [default: physical cores].")]
FlashAttn = Annotated[str, typer.Option("-fa", "--flash-attn", metavar="|".join(FLASH_ATTN), help="Flash attention.")]
CacheTypeK = Annotated[
    str | None,
    typer.Option(
        "-ctk",
        "--cache-type-k",
        metavar="TYPE",
        help=f"Type of the K cache: {', '.join(CACHE_TYPES)} [default: {DEFAULT_CACHE_TYPE}].",
    ),
]
CacheTypeV = Annotated[
    str | None,
    typer.Option(
        "-ctv", "--cache-type-v", metavar="TYPE", help=f"Type of the V cache [default: {DEFAULT_CACHE_TYPE}]."
    ),
]
NoMmap = Annotated[bool, typer.Option("--no-mmap", help="Read the file instead of mapping it.")]
Mlock = Annotated[bool, typer.Option("--mlock", help="Lock the model in memory, so that it is never swapped out.")]
NoPrefixCache = Annotated[
    bool, typer.Option("--no-prefix-cache", help="Neither use nor keep the KV state of prompts on disk.")
]
Draft = Annotated[
    str,
    typer.Option(
        "--draft",
        metavar="|".join((*DRAFTS, "FILE.gguf")),
        help="Guess several tokens and let the model check them at once.",
    ),
]
DraftMax = Annotated[
    int, typer.Option("--draft-max", metavar="N", help=f"Most tokens of a guess, 1 to {MAX_DRAFT_TOKENS}.")
]
DraftLayers = Annotated[
    int | None,
    typer.Option("--draft-layers", metavar="N", help="With --draft layers: guess with this many of the first layers."),
]
GpuLayers = Annotated[
    str, typer.Option("-ngl", "--gpu-layers", metavar="auto|all|N", help="Layers on the GPU; auto: as many as fit.")
]
SplitMode = Annotated[
    str, typer.Option("-sm", "--split-mode", metavar="|".join(SPLIT_MODES), help="How several GPUs share a model.")
]
TensorSplit = Annotated[
    str, typer.Option("-ts", "--tensor-split", metavar="N,N...", help="Shares of the GPUs [default: by free memory].")
]
MainGpu = Annotated[
    int, typer.Option("-mg", "--main-gpu", metavar="N", help="The GPU for everything, with split mode none.")
]


def tell_plan(model: Model, *, verbose: bool) -> None:
    """Say on stderr what the machine made of the options, if that is not what one expects."""
    for note in model.plan.notes:
        console.note(f"note: {note}")
    if verbose and model.plan.gpu_note and not model.plan.gpu_was_asked_for:
        console.note(f"note: {model.plan.gpu_note}")
