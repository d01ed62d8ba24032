"""The GPUs that the library can use, and how a model is spread over them and main memory."""

from __future__ import annotations

import ctypes
from typing import Any

from edgeinfer.native.library import llama
from edgeinfer.types import Device, Placement

_GPU, _INTEGRATED_GPU = 1, 2  # enum ggml_backend_dev_type
_CPU = 0
_SPLIT_MODES = {"none": 0, "layer": 1, "row": 2}  # enum llama_split_mode


def _declare(name: str, arguments: list[Any], result: Any) -> Any:
    function = getattr(llama._lib, name)
    function.argtypes, function.restype = arguments, result
    return function


# What the bindings do not declare (ggml/include/ggml-backend.h).
_count = _declare("ggml_backend_dev_count", [], ctypes.c_size_t)
_get = _declare("ggml_backend_dev_get", [ctypes.c_size_t], ctypes.c_void_p)
_by_type = _declare("ggml_backend_dev_by_type", [ctypes.c_int], ctypes.c_void_p)
_name = _declare("ggml_backend_dev_name", [ctypes.c_void_p], ctypes.c_char_p)
_description = _declare("ggml_backend_dev_description", [ctypes.c_void_p], ctypes.c_char_p)
_type = _declare("ggml_backend_dev_type", [ctypes.c_void_p], ctypes.c_int)
_memory = _declare(
    "ggml_backend_dev_memory",
    [ctypes.c_void_p, ctypes.POINTER(ctypes.c_size_t), ctypes.POINTER(ctypes.c_size_t)],
    None,
)
_buffer_type = _declare("ggml_backend_dev_buffer_type", [ctypes.c_void_p], ctypes.c_void_p)


class _Override(ctypes.Structure):
    """struct llama_model_tensor_buft_override"""

    _fields_ = (("pattern", ctypes.c_char_p), ("buffer_type", ctypes.c_void_p))


def gpu_devices() -> tuple[Device, ...]:
    """The GPUs in the library's order; those that share the CPU's memory only where there is no other."""
    devices: dict[int, list[Device]] = {_GPU: [], _INTEGRATED_GPU: []}
    for index in range(_count()):
        handle = _get(index)
        if _type(handle) in devices:
            devices[_type(handle)].append(_device(handle))
    return tuple(devices[_GPU] or devices[_INTEGRATED_GPU])


def place(params: Any, placement: Placement) -> list[Any]:
    """Set a placement in `llama_model_params`; what it returns must live until the model is loaded."""
    params.use_extra_bufts = placement.repack
    params.n_gpu_layers = placement.gpu_layers
    params.split_mode = _SPLIT_MODES[placement.split_mode]
    params.main_gpu = placement.main_gpu
    kept: list[Any] = []
    if placement.tensor_split:
        parts = (ctypes.c_float * int(llama.llama_max_devices()))(*placement.tensor_split)
        params.tensor_split = parts
        kept.append(parts)
    if placement.experts_on_cpu:
        layers = "|".join(map(str, placement.experts_on_cpu))
        pattern = rf"^blk\.({layers})\.ffn_.*_exps".encode()
        overrides = (_Override * 2)(_Override(pattern, _buffer_type(_by_type(_CPU))), _Override(None, None))
        params.tensor_buft_overrides = ctypes.cast(overrides, ctypes.c_void_p)
        kept += [pattern, overrides]
    return kept


def _device(handle: int) -> Device:
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    _memory(handle, ctypes.byref(free), ctypes.byref(total))
    name, description = (f(handle).decode("utf-8", "replace") for f in (_name, _description))
    return Device(name, description, free.value, total.value)
