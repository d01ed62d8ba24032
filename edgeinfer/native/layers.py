"""A model made of some of another one's layers, which shares the file that those are mapped from.

The library lets its caller fill the tensors of a model (`llama_model_init_from_user`). Here they are not filled: each
one is pointed at its data in a mapping of the file, the same pages of memory that the whole model uses. The memory that
the library reserved for them is never touched.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgeinfer.errors import UnusableInputError
from edgeinfer.native import library
from edgeinfer.native.library import llama, load_ggml_base
from edgeinfer.native.model import NativeModel, NativeVocabulary
from edgeinfer.native.tensors import prove_layout, tensor_at

_F32 = 0
_NEUTRAL = {"bias": 0.0, "scale": 1.0, "input_scale": 1.0}
"""What the library asks for in vain: every tensor that some model of the architecture has, by the end of its name."""
_ROPE_FACTORS = "rope_freqs.weight"  # of a model that has none: 1


@dataclass(frozen=True, slots=True)
class MappedTensor:
    """A tensor of the new model, and where the file has its data. `shape` has the row length first."""

    name: str
    type: int
    shape: tuple[int, ...]
    offset: int
    nbytes: int


class LayersModel(NativeModel):
    """The layers of `path` that `tensors` name, as a model of `n_layers` layers.

    The whole model has been loaded before, for here the library asserts what it checks there; and the caller knows that
    the layers are alike. Raises UnusableInputError where the library wants what the file does not have, EdgeinferError
    where tensors are laid out in another way.
    """

    def __init__(self, path: Path, block_count_key: str, n_layers: int, tensors: Sequence[MappedTensor]) -> None:
        prove_layout()
        self._file = _map(path)
        filler = _Filler(self._file, tensors)
        metadata = _metadata(path, block_count_key, n_layers, tensors)
        library.forget_errors()
        params = llama.llama_model_default_params()
        params.n_gpu_layers = 0  # the data is in main memory
        try:
            handle = llama.llama_model_init_from_user(metadata, filler.callback, None, params)
        finally:
            _gguf().gguf_free(metadata)
        if not handle:
            raise UnusableInputError(f"{path}: its layers make no model: {library.last_error()}", "use another draft")
        self._handle = int(handle)
        self.vocabulary = NativeVocabulary(self._handle)
        if filler.problem or filler.pending:
            self.close()
            problem = filler.problem or f"{min(filler.pending)} is not used"
            raise UnusableInputError(f"{path}: its layers make no model: {problem}", "use another draft")


class _Filler:
    """Points tensors at their data, one by one, as the library asks. An error is noted: it must not pass through C."""

    def __init__(self, file: NDArray[np.uint8], tensors: Sequence[MappedTensor]) -> None:
        self._file = file
        self.pending = {tensor.name: tensor for tensor in tensors}
        self._tensors = dict(self.pending)
        self.problem = ""
        self.callback = llama.llama_model_set_tensor_data_t(self._fill)

    def _fill(self, address: int, _: Any) -> None:
        try:
            tensor = tensor_at(address)
            name = tensor.name.decode("utf-8", "replace")
            mapped = self._tensors.get(name)
            if mapped is not None:
                self._point(address, mapped)
            else:
                self._neutral(address, name)
        except Exception as error:
            self.problem = self.problem or f"{type(error).__name__}: {error}"

    def _point(self, address: int, mapped: MappedTensor) -> None:
        tensor, shape = tensor_at(address), (*mapped.shape, 1, 1, 1)[:4]
        found = (tensor.type, tuple(tensor.ne), _gguf().ggml_nbytes(address))
        if found != (mapped.type, shape, mapped.nbytes):
            self.problem = self.problem or f"{mapped.name} is {found}, not {(mapped.type, shape, mapped.nbytes)}"
            return
        tensor.data = self._file.ctypes.data + mapped.offset
        self.pending.pop(mapped.name, None)

    def _neutral(self, address: int, name: str) -> None:
        tensor = tensor_at(address)
        value = 1.0 if name == _ROPE_FACTORS else _NEUTRAL.get(name.rpartition(".")[2])
        if value is None or tensor.type != _F32:
            self.problem = self.problem or f"the file has no {name}"
            value = 0.0
        data = np.full(_gguf().ggml_nbytes(address) // 4, value, np.float32)
        _gguf().ggml_backend_tensor_set(address, data.ctypes.data, 0, data.nbytes)


def _map(path: Path) -> NDArray[np.uint8]:
    with open(path, "rb") as file:
        return np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), np.uint8)


def _metadata(path: Path, block_count_key: str, n_layers: int, tensors: Sequence[MappedTensor]) -> int:
    """The file's metadata with another number of layers, and the types of the tensors; to be freed."""
    gguf = _gguf()
    source = gguf.gguf_init_from_file(str(path).encode(), _InitParams(True, None))
    if not source:
        raise UnusableInputError(f"{path}: its header cannot be read", "use another draft")
    metadata = gguf.gguf_init_empty()
    gguf.gguf_set_kv(metadata, source)
    gguf.gguf_free(source)
    gguf.gguf_set_val_u32(metadata, block_count_key.encode(), n_layers)
    context = gguf.ggml_init(_ContextParams(len(tensors) * gguf.ggml_tensor_overhead(), None, True))
    try:
        for tensor in tensors:
            shape = (ctypes.c_int64 * 4)(*tensor.shape)
            made = gguf.ggml_new_tensor(context, tensor.type, len(tensor.shape), shape)
            gguf.ggml_set_name(made, tensor.name.encode())
            gguf.gguf_add_tensor(metadata, made)
    finally:
        gguf.ggml_free(context)
    return int(metadata)


class _InitParams(ctypes.Structure):
    _fields_ = (("no_alloc", ctypes.c_bool), ("ctx", ctypes.c_void_p))


class _ContextParams(ctypes.Structure):
    _fields_ = (("mem_size", ctypes.c_size_t), ("mem_buffer", ctypes.c_void_p), ("no_alloc", ctypes.c_bool))


@cache
def _gguf() -> ctypes.CDLL:
    ggml, pointer = load_ggml_base(), ctypes.c_void_p
    for name, result, arguments in (
        ("gguf_init_empty", pointer, []),
        ("gguf_init_from_file", pointer, [ctypes.c_char_p, _InitParams]),
        ("gguf_free", None, [pointer]),
        ("gguf_set_kv", None, [pointer, pointer]),
        ("gguf_set_val_u32", None, [pointer, ctypes.c_char_p, ctypes.c_uint32]),
        ("gguf_add_tensor", None, [pointer, pointer]),
        ("ggml_init", pointer, [_ContextParams]),
        ("ggml_free", None, [pointer]),
        ("ggml_tensor_overhead", ctypes.c_size_t, []),
        ("ggml_new_tensor", pointer, [pointer, ctypes.c_int, ctypes.c_int, ctypes.POINTER(ctypes.c_int64)]),
        ("ggml_set_name", pointer, [pointer, ctypes.c_char_p]),
        ("ggml_nbytes", ctypes.c_size_t, [pointer]),
        ("ggml_backend_tensor_set", None, [pointer, pointer, ctypes.c_size_t, ctypes.c_size_t]),
    ):
        function = getattr(ggml, name)
        function.restype, function.argtypes = result, arguments
    return ggml
