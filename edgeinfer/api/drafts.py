"""The drafts of a model that is being loaded: their sources, what passes cost on this machine, what `-v` tells."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import platform
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edgeinfer.api.adapters import LoadedAdapter
from edgeinfer.atomic_file import replace_file
from edgeinfer.gguf_file.header import Header
from edgeinfer.home import home
from edgeinfer.native.context import NativeBackend
from edgeinfer.options import RuntimeOptions
from edgeinfer.runtime.drafting import Drafting
from edgeinfer.speculation.cost import CostCurve
from edgeinfer.speculation.draft import Source
from edgeinfer.speculation.edit import Edit
from edgeinfer.speculation.grammar import Structure
from edgeinfer.speculation.lookup import Lookup
from edgeinfer.speculation.memory import Memory
from edgeinfer.types import Capabilities

_MAX_NBYTES = 4096
_MAX_COST = 1e4
"""Times what one row takes; more is no measurement."""


def open_drafting(
    options: RuntimeOptions,
    backend: NativeBackend,
    curve: CostCurve,
    model: Source | None = None,
    memory: Memory | None = None,
) -> Drafting:
    """The drafts that the options ask for, a draft model's and earlier answers' too; `curve` is what passes cost."""
    sources: list[Source] = [] if options.draft == "off" else [Structure(), Lookup(), Edit()]
    if sources:
        sources += [source for source in (memory, model) if source is not None]
    return Drafting(sources, backend.n_vocab, time.perf_counter, curve=curve, most_tokens=options.draft_max)


def draft_notes(drafting: Drafting, capabilities: Capabilities) -> Iterator[str]:
    """One line for every source that was used, and one that sums up."""
    if not capabilities.can_trim:
        yield "no drafts: this model's memory cannot take tokens back"
        return
    for name, use in drafting.use.items():
        if use.failures:
            yield f"draft {name}: failed in {use.failures} answers"
        if use.drafted_tokens:
            share = 100 * use.accepted_tokens / use.drafted_tokens
            yield f"draft {name}: {use.drafted_tokens} tokens, {use.accepted_tokens} accepted ({share:.0f} %)"
    if drafting.was_stopped:
        yield "drafts ended: the model's window had left tokens behind that taking others back needs"
    if drafting.speed_up is not None and any(use.drafted_tokens for use in drafting.use.values()):
        yield f"drafts: {drafting.speed_up:.2f} times the speed of decoding without them"


@dataclass(frozen=True, slots=True)
class CostFile:
    """What passes over several rows cost, as learned by earlier processes. A file that is missing or broken is none."""

    path: Path

    @classmethod
    def of(
        cls,
        header: Header,
        backend: NativeBackend,
        options: RuntimeOptions,
        build: str,
        adapters: Sequence[LoadedAdapter] = (),
    ) -> CostFile:
        """By all that changes the shape of the curve: model, adapters, threads, kinds of cache, library, machine."""
        about: tuple[object, ...] = (
            build,
            header.architecture,
            header.path.name,
            header.tensor_nbytes,
            backend.threads,
            options.flash_attn,
            options.type_k,
            options.type_v,
            platform.node(),
            platform.machine(),
            os.cpu_count(),
        )
        # Whatever their scale, they take their time.
        about += tuple((adapter.header.path.name, adapter.header.tensor_nbytes) for adapter in adapters)
        return cls(home() / "speculation" / f"{hashlib.sha256(repr(about).encode()).hexdigest()[:32]}.json")

    def read(self) -> dict[int, float]:
        """Rows and their cost; empty where nothing is known."""
        try:
            with self.path.open("rb") as file:
                data: Any = json.loads(file.read(_MAX_NBYTES))
            shape = {int(rows): float(cost) for rows, cost in data["cost"].items()}
        except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
            return {}
        return shape if all(1 <= cost <= _MAX_COST and math.isfinite(cost) for cost in shape.values()) else {}

    def write(self, curve: CostCurve) -> None:
        """Keep what was learned, if anything was and it can be kept."""
        if not curve.shape or curve.shape == self.read():
            return
        with contextlib.suppress(OSError):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            replace_file(self.path, json.dumps({"cost": curve.shape}).encode())
