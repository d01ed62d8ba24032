"""`edgeinfer doctor`: what this machine offers, what the library makes of it, and whether a model suits it."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from edgeinfer.api.files import checked_header, resolve
from edgeinfer.api.kernels import choose
from edgeinfer.api.memory import installed_nbytes, plan_run, this_machine
from edgeinfer.api.models import list_models
from edgeinfer.bench import machine, roofline
from edgeinfer.errors import ResourceError
from edgeinfer.gguf_file.header import Header
from edgeinfer.gguf_file.shards import read_shards
from edgeinfer.home import home
from edgeinfer.native import library
from edgeinfer.native.devices import default_threads
from edgeinfer.native.kernels import fork_is_installed
from edgeinfer.options import RuntimeOptions
from edgeinfer.runtime.footprint import KV_PADDING_TOKENS, Footprint, repacked_types
from edgeinfer.runtime.memory import Machine, Plan
from edgeinfer.types import Device

# The widest arithmetic of the kernels, the best first (ggml_backend_cpu_get_features).
_SIMD = (
    *("AMX_INT8", "AVX512_VNNI", "AVX_VNNI", "AVX512", "AVX2", "AVX", "SSSE3"),
    *("SVE", "MATMUL_INT8", "DOTPROD", "NEON", "RISCV_V", "VSX", "VXE", "WASM_SIMD"),
)


@dataclass(frozen=True, slots=True)
class Cpu:
    """The processor, and which kernels of the library run on it."""

    name: str
    logical_cpus: int
    threads: int
    """Physical cores that this process may use: the default of --threads."""
    features: tuple[str, ...]
    simd: str
    """What the kernels compute with, "" for plain code."""
    repacked_types: tuple[str, ...]
    """Types whose weights are copied into the layout of faster kernels."""


@dataclass(frozen=True, slots=True)
class Memory:
    """Main memory; None where the system does not tell."""

    installed_bytes: int | None
    available_bytes: int | None
    bandwidth_gbps: float
    """Read by as many threads as a model would use."""


@dataclass(frozen=True, slots=True)
class Library:
    """The compiled library."""

    package: str
    version: str
    build: str


@dataclass(frozen=True, slots=True)
class Fork:
    """The second library, ik_llama.cpp."""

    installed: bool
    version: str
    problem: str
    """Why it is not used, "" where it can be."""


@dataclass(frozen=True, slots=True)
class StoreInfo:
    """Where models are kept."""

    path: str
    models: int
    bytes: int


@dataclass(frozen=True, slots=True)
class Verdict:
    """How a model would run here."""

    model: str
    fits: bool
    reason: str
    """Why it does not fit, or what is made smaller so that it does."""
    ctx_size: int | None
    """The context that it would run with."""
    max_ctx_size: int | None
    """The longest that fits, up to the trained one."""
    needed_bytes: int | None
    weights_bytes: int
    gpu_layers: int
    kernels: str
    """The library that would run it."""
    kernels_note: str
    """Why that one, or when it is decided."""
    decode_tps_limit: float | None
    """Tokens per second if reading the weights were all there is to do; None when a GPU does it."""


@dataclass(frozen=True, slots=True)
class Report:
    """What `doctor --json` prints."""

    cpu: Cpu
    memory: Memory
    gpus: tuple[Device, ...]
    library: Library
    fork: Fork
    store: StoreInfo
    model: Verdict | None


def examine(model: str | None = None) -> Report:
    """Look at the machine and, if one is named, at a model that is here; measures the memory for about a second.

    Raises NotFoundError and UnusableInputError for the model.
    """
    header = checked_header(resolve(model, fetch=False)) if model is not None else None
    found, threads = this_machine(), default_threads()
    stored = list_models()
    bandwidth_gbps = roofline.memory_bandwidth_gbps(threads)
    return Report(
        cpu=_cpu(found, threads),
        memory=Memory(installed_nbytes(), found.available_nbytes, round(bandwidth_gbps, 2)),
        gpus=found.devices,
        library=Library(machine.library_build(), library.version(), library.system_info().strip(" |")),
        fork=_fork(),
        store=StoreInfo(str(home() / "models"), len(stored), sum(m.bytes for m in stored)),
        model=_verdict(header, found, bandwidth_gbps) if header is not None else None,
    )


def _fork() -> Fork:
    if not fork_is_installed():
        return Fork(False, "", "not installed: pip install 'edgeinfer[fast]'")
    from edgeinfer.native import ik

    version = ik.version()
    return Fork(True, version, "" if version == ik.VERSION else f"version {version or 'unknown'}, not {ik.VERSION}")


def _cpu(found: Machine, threads: int) -> Cpu:
    return Cpu(
        name=machine.cpu_name(),
        logical_cpus=os.cpu_count() or threads,
        threads=threads,
        features=tuple(sorted(found.features)),
        simd=next((name for name in _SIMD if name in found.features), ""),
        repacked_types=tuple(t.name for t in repacked_types(found.features)),
    )


def _verdict(header: Header, found: Machine, bandwidth_gbps: float) -> Verdict:
    footprint = Footprint(read_shards(header), found.features)
    plan, reason = None, ""
    try:
        plan = plan_run(header, RuntimeOptions())
        reason = ", ".join(plan.changes)
    except ResourceError as error:
        reason = error.message.removeprefix(f"{header.path}: ")
    choice = choose(header, RuntimeOptions(), plan, may_try=False) if plan else None
    on_gpu = plan is not None and plan.placement.gpu_layers > 0
    per_token = sum(roofline.weight_nbytes_per_token(shard) for shard in read_shards(header))
    return Verdict(
        model=str(Path(header.path)),
        fits=plan is not None,
        reason=reason,
        ctx_size=plan.settings.ctx_size if plan else None,
        max_ctx_size=_longest(footprint, plan) if plan else None,
        needed_bytes=plan.needs.total if plan else None,
        weights_bytes=sum(tensor.nbytes for tensor in footprint.tensors),
        gpu_layers=plan.placement.gpu_layers if plan else 0,
        kernels=choice.name if choice else "",
        kernels_note=choice.note if choice else "",
        decode_tps_limit=None if on_gpu or not per_token else round(bandwidth_gbps * 1e9 / per_token, 1),
    )


def _longest(footprint: Footprint, plan: Plan) -> int:
    """The longest context that main memory has room for, with everything else as it is planned."""
    least, most = plan.settings.ctx_size, max(footprint.n_ctx_train, plan.settings.ctx_size)
    if plan.available_nbytes is None or plan.placement.gpu_layers:
        return least if plan.placement.gpu_layers else most

    def spare_nbytes(ctx_size: int) -> int:
        assert plan.available_nbytes is not None
        return plan.available_nbytes - footprint.needs_of(plan.settings, ctx_size).total

    if spare_nbytes(most) >= 0:
        return most
    while most - least > KV_PADDING_TOKENS:
        middle = (least + most) // 2
        least, most = (middle, most) if spare_nbytes(middle) >= 0 else (least, middle)
    return max(plan.settings.ctx_size, least // KV_PADDING_TOKENS * KV_PADDING_TOKENS)
