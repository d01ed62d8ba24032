"""Fits a run to the machine before anything is loaded: what is free decides what is not asked for.

Pure: the machine is a value, so plans are made, and tested, for machines that are not at hand.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from edgeinfer.errors import ResourceError
from edgeinfer.options import DEFAULT_CTX_SIZE, RuntimeOptions
from edgeinfer.runtime.footprint import KV_PADDING_TOKENS, Footprint, Needs, Settings
from edgeinfer.runtime.offload import Offload, choose_offload, no_room
from edgeinfer.types import Device, Placement

MIN_CTX_SIZE = 512
"""A context that nobody asked for does not become smaller than this."""
SMALLER_CACHE_TYPE = "q8_0"
_BLOCK_LENGTH = 32  # of that type: heads must divide into it


@dataclass(frozen=True, slots=True)
class Machine:
    """What a run can have."""

    available_nbytes: int | None
    """Main memory; None where the system does not tell, and nothing is refused."""
    features: frozenset[str] = frozenset()
    """What the library says of the CPU and of itself."""
    devices: tuple[Device, ...] = ()


@dataclass(frozen=True, slots=True)
class Plan:
    """How a model will run, and what that takes."""

    settings: Settings
    placement: Placement
    needs: Needs
    available_nbytes: int | None
    changes: tuple[str, ...] = ()
    """What is less than usual because the memory does not suffice for more."""
    gpu_note: str = ""
    """Why the GPU does nothing, if it does nothing."""
    gpu_was_asked_for: bool = False

    def applied(self, options: RuntimeOptions) -> RuntimeOptions:
        """The options with what was decided about them."""
        s = self.settings
        return replace(options, ctx_size=s.ctx_size, cache_type_k=s.type_k, cache_type_v=s.type_v)

    @property
    def notes(self) -> tuple[str, ...]:
        """What a person should know without asking, a line each."""
        free = "" if self.available_nbytes is None else f" {_mib(self.available_nbytes)} of memory are available:"
        fitted = (f"{free} {', '.join(self.changes)}".strip(),) if self.changes else ()
        return fitted + ((self.gpu_note,) if self.gpu_note and self.gpu_was_asked_for else ())


def plan(
    footprint: Footprint,
    options: RuntimeOptions,
    machine: Machine,
    *,
    default_ctx_size: int | None = None,
    logit_rows: int = 2,
    sequences: int = 1,
    draft: Footprint | None = None,
) -> Plan:
    """Decide context, KV type, layout and offload; what the options say stands as it is.

    The context, unless asked for, is `default_ctx_size` or less; without that, the trained one, up to DEFAULT_CTX_SIZE.
    `draft` is a second model that runs beside the first one, in main memory. Raises ResourceError with the numbers when
    nothing that is allowed fits, UsageError for a GPU that there is not.
    """
    trained = footprint.n_ctx_train or DEFAULT_CTX_SIZE
    usual = Settings(
        ctx_size=options.ctx_size or default_ctx_size or min(DEFAULT_CTX_SIZE, trained),
        type_k=options.type_k,
        type_v=options.type_v,
        flash_attn=options.flash_attn != "off",
        mmap=options.mmap,
        ubatch_size=min(options.ubatch_size, options.batch_size),
        prefix_cache=options.prefix_cache,
        logit_rows=logit_rows,
        sequences=sequences,
    )
    found: Needs | None = None
    for settings in _candidates((footprint, draft) if draft else (footprint,), usual, options):
        offload = choose_offload(footprint, settings, options, machine.devices)
        if offload is None:
            continue
        found = _needs(footprint, settings, offload, draft)
        if machine.available_nbytes is None or found.total <= machine.available_nbytes:
            return Plan(
                settings,
                _placement(settings, offload, options),
                found,
                machine.available_nbytes,
                tuple(_changes(usual, settings)),
                _gpu_note(options, machine, offload),
                options.gpu_layers not in ("auto", 0),
            )
    if found is None:
        raise no_room(footprint.header.path, machine.devices)
    assert machine.available_nbytes is not None
    raise _refusal(footprint, options, settings, found, machine.available_nbytes)


def _candidates(footprints: tuple[Footprint, ...], usual: Settings, options: RuntimeOptions) -> Iterator[Settings]:
    """From the best on: first the context gives way, then the type of the KV cache, then the copies of weights."""
    sizes = [usual.ctx_size]
    if options.ctx_size is None:
        sizes += range(
            (usual.ctx_size - 1) // KV_PADDING_TOKENS * KV_PADDING_TOKENS, MIN_CTX_SIZE - 1, -KV_PADDING_TOKENS
        )
    kinds = [(usual.type_k, usual.type_v)]
    if all(map(_can_quantize_cache, footprints)) and options.flash_attn != "off":
        kinds.append((options.cache_type_k or SMALLER_CACHE_TYPE, options.cache_type_v or SMALLER_CACHE_TYPE))
    for repack in (True, False):
        for type_k, type_v in dict.fromkeys(kinds):
            for ctx_size in sizes:
                yield replace(usual, ctx_size=ctx_size, type_k=type_k, type_v=type_v, repack=repack)


def _can_quantize_cache(footprint: Footprint) -> bool:
    lengths = footprint.head_lengths()
    return bool(lengths) and not any(length % _BLOCK_LENGTH for length in lengths)


def _needs(footprint: Footprint, settings: Settings, offload: Offload, draft: Footprint | None) -> Needs:
    needs = footprint.needs(settings, offload.tensors)
    needs = replace(needs, kv=int(needs.kv * (1 - offload.kv_fraction)))
    if draft is None:
        return needs
    more = draft.needs(settings)
    return Needs(
        weights=needs.weights + more.weights,
        repacked=needs.repacked + more.repacked,
        read_once=needs.read_once + more.read_once,
        kv=needs.kv + more.kv,
        buffers=needs.buffers + more.buffers,
        vocabulary=needs.vocabulary + more.vocabulary,
        queued=needs.queued,
        program=needs.program,
    )


def _placement(settings: Settings, offload: Offload, options: RuntimeOptions) -> Placement:
    return Placement(
        repack=settings.repack,
        gpu_layers=offload.layers,
        experts_on_cpu=offload.experts_on_cpu,
        split_mode=options.split_mode,
        tensor_split=options.tensor_split,
        main_gpu=options.main_gpu,
    )


def _changes(usual: Settings, settings: Settings) -> Iterator[str]:
    if settings.ctx_size != usual.ctx_size:
        yield f"a context of {settings.ctx_size} tokens, not {usual.ctx_size} (-c)"
    kinds = settings.type_k, settings.type_v
    if kinds != (usual.type_k, usual.type_v):
        yield f"a KV cache of type {'/'.join(dict.fromkeys(kinds))} (-ctk, -ctv)"
    if not settings.repack:
        yield "no copies of weights for faster kernels"


def _gpu_note(options: RuntimeOptions, machine: Machine, offload: Offload) -> str:
    if options.gpu_layers == 0 or offload.layers:
        return ""
    if not machine.devices:
        return "this build of the library finds no GPU: all layers run on the CPU"
    return "the GPUs have too little free memory for a layer: all of them run on the CPU"


def _refusal(
    footprint: Footprint, options: RuntimeOptions, settings: Settings, needs: Needs, available_nbytes: int
) -> ResourceError:
    copies = f", copies of weights {_mib(needs.repacked)}" if needs.repacked else ""
    states = f" and {settings.sequences} recurrent states" if footprint.state_nbytes else ""
    message = (
        f"{footprint.header.path}: needs {_mib(needs.total)} (weights {_mib(needs.weights)}{copies}, KV cache{states} "
        f"{_mib(needs.kv)} for {settings.ctx_size} tokens, the rest {_mib(_rest(needs))}), "
        f"{_mib(available_nbytes)} are available"
    )
    ways = ["close other programs", "use a smaller model or type"]
    if options.ctx_size is not None and options.ctx_size > MIN_CTX_SIZE:
        ways.insert(0, "lower the context size (-c)")
    return ResourceError(message, ", or ".join([", ".join(ways[:-1]), ways[-1]]))


def _rest(needs: Needs) -> int:
    return needs.total - needs.weights - needs.repacked - needs.kv


def _mib(nbytes: int) -> str:
    return f"{-(-nbytes // (1 << 20))} MiB"
