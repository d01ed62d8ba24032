"""Where a model's weights go. Without a GPU: what the library is told, and that it runs all the same."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgeinfer.native import gpus
from edgeinfer.native.context import NativeBackend
from edgeinfer.native.library import llama
from edgeinfer.native.model import NativeModel
from edgeinfer.options import RuntimeOptions
from edgeinfer.types import Placement, Refusal, Row


def test_the_devices_are_gpus_with_memory() -> None:
    for device in gpus.gpu_devices():
        assert device.name
        assert 0 <= device.free_nbytes <= device.total_nbytes


def test_a_placement_is_what_the_library_is_told() -> None:
    params: Any = llama.llama_model_default_params()
    placement = Placement(
        repack=False, gpu_layers=7, experts_on_cpu=(0, 12), split_mode="row", tensor_split=(3, 1), main_gpu=1
    )
    kept = gpus.place(params, placement)
    assert (params.use_extra_bufts, params.n_gpu_layers, params.split_mode, params.main_gpu) == (False, 7, 2, 1)
    assert params.tensor_split[:3] == [3, 1, 0]
    first, last = ctypes.cast(params.tensor_buft_overrides, ctypes.POINTER(gpus._Override))[:2]
    assert first.pattern == rb"^blk\.(0|12)\.ffn_.*_exps"
    assert first.buffer_type
    assert last.pattern is None
    assert kept


def test_nothing_is_told_of_what_is_not_chosen() -> None:
    params: Any = llama.llama_model_default_params()
    assert gpus.place(params, Placement()) == []
    assert not params.tensor_split
    assert not params.tensor_buft_overrides
    assert (params.use_extra_bufts, params.n_gpu_layers, params.split_mode) == (True, 0, 1)


@pytest.mark.model
def test_a_model_says_the_same_wherever_it_is(smollm2_gguf: Path) -> None:
    placement = Placement(repack=False, gpu_layers=99, experts_on_cpu=(0, 1), tensor_split=(1.0,))
    logits = []
    for given in (None, placement):
        with (
            NativeModel(smollm2_gguf, placement=given) as model,
            NativeBackend(model, RuntimeOptions(ctx_size=64)) as b,
        ):
            found = b.forward([Row(0, np.array([1, 2, 3], np.int32), 0, 2)])
            assert not isinstance(found, Refusal)
            logits.append(found.copy())
    assert np.argmax(logits[0]) == np.argmax(logits[1])
    assert np.allclose(*logits, atol=0.5)
