"""ggml's tensors as the library lays them out in memory (ggml/include/ggml.h), seen from a graph's callback.

No function tells an operation or its operands, so fields are read; `prove_layout` holds them against functions of the
library before anybody follows a pointer.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgeinfer.errors import EdgeinferError
from edgeinfer.ggml_types import GGMLType
from edgeinfer.native.library import load_ggml_base


class Tensor(ctypes.Structure):
    """`struct ggml_tensor`. `ne` and `nb` are elements and bytes per step along each dimension, row first."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("buffer", ctypes.c_void_p),
        ("ne", ctypes.c_int64 * 4),
        ("nb", ctypes.c_size_t * 4),
        ("op", ctypes.c_int),
        ("op_params", ctypes.c_int32 * 16),
        ("flags", ctypes.c_int32),
        ("src", ctypes.c_void_p * 10),
        ("view_src", ctypes.c_void_p),
        ("view_offs", ctypes.c_size_t),
        ("data", ctypes.c_void_p),
        ("name", ctypes.c_char * 64),
        ("extra", ctypes.c_void_p),
        ("padding", ctypes.c_char * 8),
    )

    type: int
    ne: Any
    nb: Any
    op: int
    src: Any
    data: int | None
    name: bytes


def tensor_at(address: int) -> Tensor:
    """The tensor that a pointer points to, as it is in memory."""
    return Tensor.from_address(address)


def weight_name(weight: Tensor) -> str:
    """The name without what a scheduler of several devices adds: `CUDA0#blk.0.attn_k.weight#0`."""
    parts = weight.name.decode("utf-8", "replace").split("#")
    return parts[1] if len(parts) > 1 else parts[0]


def values(address: int) -> NDArray[Any]:
    """The elements of an F32 or I32 tensor, wherever they are, in numpy's order: shape `ne` reversed."""
    tensor = tensor_at(address)
    data = np.empty(_ggml().ggml_nbytes(address), np.uint8)
    _ggml().ggml_backend_tensor_get(address, data.ctypes.data, 0, data.nbytes)
    dtype = {GGMLType.F32: np.float32, GGMLType.I32: np.int32}[GGMLType(tensor.type)]
    return np.ndarray(tuple(tensor.ne)[::-1], dtype, data.data, 0, tuple(tensor.nb)[::-1])


class _InitParams(ctypes.Structure):
    _fields_ = (("mem_size", ctypes.c_size_t), ("mem_buffer", ctypes.c_void_p), ("no_alloc", ctypes.c_bool))


@cache
def _ggml() -> ctypes.CDLL:
    ggml, pointer = load_ggml_base(), ctypes.c_void_p
    for name, result, arguments in (
        ("ggml_init", pointer, [_InitParams]),
        ("ggml_free", None, [pointer]),
        ("ggml_tensor_overhead", ctypes.c_size_t, []),
        ("ggml_new_tensor_3d", pointer, [pointer, ctypes.c_int, *[ctypes.c_int64] * 3]),
        ("ggml_set_name", pointer, [pointer, ctypes.c_char_p]),
        ("ggml_mul_mat", pointer, [pointer] * 3),
        ("ggml_mul_mat_id", pointer, [pointer] * 4),
        ("ggml_op_desc", ctypes.c_char_p, [pointer]),
        ("ggml_nbytes", ctypes.c_size_t, [pointer]),
        ("ggml_backend_tensor_get", None, [pointer, pointer, ctypes.c_size_t, ctypes.c_size_t]),
    ):
        function = getattr(ggml, name)
        function.restype, function.argtypes = result, arguments
    return ggml


@cache
def prove_layout() -> tuple[int, int]:
    """The numbers of the operations MUL_MAT and MUL_MAT_ID, once the structure is shown to be what `Tensor` says.

    Raises EdgeinferError when the library lays its tensors out in another way.
    """
    ggml = _ggml()
    # The overhead of a tensor is the structure and a node of the context's list, of 32 bytes.
    context = ggml.ggml_init(_InitParams(8 * ggml.ggml_tensor_overhead(), None, True))
    try:
        experts = ggml.ggml_new_tensor_3d(context, GGMLType.F16, 64, 5, 3)
        rows = ggml.ggml_new_tensor_3d(context, GGMLType.F32, 64, 2, 7)
        matrix = ggml.ggml_new_tensor_3d(context, GGMLType.F16, 64, 11, 1)
        ids = ggml.ggml_new_tensor_3d(context, GGMLType.I32, 2, 7, 1)
        ggml.ggml_set_name(experts, b"blk.0.ffn_up_exps.weight")
        routed = ggml.ggml_mul_mat_id(context, experts, rows, ids)
        plain = ggml.ggml_mul_mat(context, matrix, rows)
        sound = (
            ggml.ggml_tensor_overhead() == ctypes.sizeof(Tensor) + 32
            and tensor_at(experts).name == b"blk.0.ffn_up_exps.weight"
            and _shape(experts) == (GGMLType.F16, [64, 5, 3, 1], [2, 128, 640, 1920])
            and _shape(ids) == (GGMLType.I32, [2, 7, 1, 1], [4, 8, 56, 56])
            and _shape(routed) == (GGMLType.F32, [5, 2, 7, 1], [4, 20, 40, 280])
            and list(tensor_at(routed).src) == [experts, rows, ids, *[None] * 7]
            and list(tensor_at(plain).src) == [matrix, rows, *[None] * 8]
            and (ggml.ggml_op_desc(plain), ggml.ggml_op_desc(routed)) == (b"MUL_MAT", b"MUL_MAT_ID")
        )
        found = tensor_at(plain).op, tensor_at(routed).op
    finally:
        ggml.ggml_free(context)
    if not sound or found[1] != found[0] + 1:
        raise EdgeinferError(
            "this build of the C library lays out tensors in another way", "install the pinned llama-cpp-python"
        )
    return found


def _shape(address: int) -> tuple[int, list[int], list[int]]:
    tensor = tensor_at(address)
    return tensor.type, list(tensor.ne), list(tensor.nb)
