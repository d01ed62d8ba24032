"""How many of a model's layers the GPUs hold, decided from headers and a list of devices.

The library gives the last layers to the GPUs, and each device a run of them in proportion to its share
(src/llama-model.cpp, load_tensors); the output counts as one more layer, and the embedding stays in main memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

from edgeinfer.errors import ResourceError, UsageError
from edgeinfer.gguf_file.header import TensorInfo
from edgeinfer.options import RuntimeOptions
from edgeinfer.runtime.footprint import Footprint, Settings, is_expert, layer_of
from edgeinfer.types import Device

MARGIN_NBYTES = 1 << 30
"""Of each GPU's free memory that is left alone: the driver's own, and what other programs take meanwhile."""
_F32_NBYTES = 4


@dataclass(frozen=True, slots=True)
class Offload:
    """What goes to the GPUs."""

    layers: int = 0
    experts_on_cpu: tuple[int, ...] = ()
    tensors: frozenset[str] = frozenset()
    """The names of the weights there."""
    kv_fraction: float = 0.0
    """The part of the KV cache there."""


def choose_offload(
    footprint: Footprint, settings: Settings, options: RuntimeOptions, devices: Sequence[Device]
) -> Offload | None:
    """As much as is asked for; of "auto" as much as fits. None when what is asked for does not fit.

    Raises UsageError for a device that there is not.
    """
    if not devices or options.gpu_layers == 0:
        return Offload()
    if options.main_gpu >= len(devices) or len(options.tensor_split) > len(devices):
        raise UsageError(f"there are {len(devices)} GPUs", "give --main-gpu and --tensor-split for those")
    for layers, experts_on_cpu in _attempts(footprint, options.gpu_layers):
        offload, nbytes = _offload(footprint, settings, options, devices, layers, experts_on_cpu)
        if all(n + MARGIN_NBYTES <= d.free_nbytes for n, d in zip(nbytes, devices, strict=True) if n):
            return offload
    return Offload() if options.gpu_layers == "auto" else None


def no_room(path: object, devices: Sequence[Device]) -> ResourceError:
    """The error for an offload that was asked for and does not fit."""
    free = ", ".join(f"{d.name} {d.free_nbytes >> 20} MiB" for d in devices)
    return ResourceError(
        f"{path}: the layers asked for do not fit into the memory of the GPUs, of which is free: {free}",
        "--gpu-layers auto takes as many as fit",
    )


def _attempts(footprint: Footprint, wanted: int | str) -> Iterator[tuple[int, tuple[int, ...]]]:
    """Numbers of layers, and the layers whose experts stay in main memory; the best first."""
    everything = footprint.n_layer + 1
    if wanted != "auto":
        yield everything if wanted == "all" else min(int(wanted), everything), ()
        return
    yield everything, ()
    with_experts = sorted({layer for t in footprint.tensors if is_expert(t) and (layer := layer_of(t)) is not None})
    for count in range(1, len(with_experts) + 1):
        yield everything, tuple(with_experts[:count])
    for layers in range(footprint.n_layer, 0, -1):
        yield layers, tuple(layer for layer in with_experts if layer >= everything - layers)


def _offload(
    footprint: Footprint,
    settings: Settings,
    options: RuntimeOptions,
    devices: Sequence[Device],
    layers: int,
    experts_on_cpu: tuple[int, ...],
) -> tuple[Offload, list[int]]:
    """What goes to the GPUs, and the bytes that each of them needs."""
    of_layer = _devices_of_layers(footprint.n_layer, layers, _shares(options, devices))
    nbytes, names = [0] * len(devices), set()
    stays = frozenset(experts_on_cpu)
    for tensor in footprint.tensors:
        layer = _layer_counted(footprint, tensor)
        device = of_layer.get(layer) if layer is not None else None
        if device is None or (is_expert(tensor) and layer in stays):
            continue
        nbytes[device] += tensor.nbytes
        if layer_of(tensor) is not None or not footprint.is_tied:  # a tied output is a copy of the embedding
            names.add(tensor.name)
    if options.split_mode == "row":
        nbytes = [int(sum(nbytes) * share) for share in _shares(options, devices)]
    kv = footprint.memory_nbytes(settings)
    logits = settings.ubatch_size * footprint.n_vocab * _F32_NBYTES  # this memory is taken, not only set aside
    buffers = footprint.activation_nbytes(settings) + logits
    for device in set(of_layer.values()):
        nbytes[device] += buffers
    blocks = [device for layer, device in of_layer.items() if layer < footprint.n_layer]
    for device in blocks:
        nbytes[options.main_gpu if options.split_mode == "row" else device] += kv // footprint.n_layer
    there = len(blocks) / max(1, footprint.n_layer)
    return Offload(layers, experts_on_cpu, frozenset(names), there), nbytes


def _layer_counted(footprint: Footprint, tensor: TensorInfo) -> int | None:
    """The layer that decides where a tensor goes; the output's is the one after the last. None for main memory."""
    if tensor.name.startswith("output") or (footprint.is_tied and tensor.name.startswith("token_embd")):
        return footprint.n_layer
    return layer_of(tensor)


def _shares(options: RuntimeOptions, devices: Sequence[Device]) -> list[float]:
    """The part of each device; they add up to 1."""
    if options.split_mode == "none":
        return [float(i == options.main_gpu) for i in range(len(devices))]
    parts = [float(part) for part in options.tensor_split] or [float(d.free_nbytes) for d in devices]
    parts += [0.0] * (len(devices) - len(parts))
    whole = sum(parts) or 1.0
    return [part / whole for part in parts]


def _devices_of_layers(n_layer: int, layers: int, shares: Sequence[float]) -> dict[int, int]:
    """The device of each layer that goes to one; the output is the layer after the last."""
    first, bounds = n_layer + 1 - layers, list(accumulate(shares))
    last = max((i for i, share in enumerate(shares) if share), default=0)  # rounding must lead nowhere else
    return {
        i: next((device for device, bound in enumerate(bounds) if bound > (i - first) / layers), last)
        for i in range(first, n_layer + 1)
    }
