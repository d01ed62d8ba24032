"""The options of every command that loads a model; llama.cpp's flags, the defaults of `options.RuntimeOptions`."""

from __future__ import annotations

from typing import Annotated

import typer

from edgeinfer.options import CACHE_TYPES, DRAFTS, FLASH_ATTN, MAX_DRAFT_TOKENS, RuntimeOptions

DEFAULTS = RuntimeOptions()

Threads = Annotated[int | None, typer.Option("--threads", metavar="N", help="Threads [default: physical cores].")]
FlashAttn = Annotated[str, typer.Option("-fa", "--flash-attn", metavar="|".join(FLASH_ATTN), help="Flash attention.")]
CacheTypeK = Annotated[
    str, typer.Option("-ctk", "--cache-type-k", metavar="TYPE", help=f"Type of the K cache: {', '.join(CACHE_TYPES)}.")
]
CacheTypeV = Annotated[str, typer.Option("-ctv", "--cache-type-v", metavar="TYPE", help="Type of the V cache.")]
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
