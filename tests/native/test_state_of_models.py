"""Ranges of KV state of models whose memory is not plain: windows, latent K and V, recurrent layers. Tiny, random."""

import numpy as np
import pytest
from random_checkpoint import PLAIN, make_checkpoint, prompt, read_model

from edgeinfer.api.convert import plan_conversion, run_conversion
from edgeinfer.api.load import load
from edgeinfer.options import ConvertOptions, RuntimeOptions
from edgeinfer.types import KVOp, Row

STEP = 20  # more than the windows


@pytest.fixture(scope="module")
def make(tmp_path_factory):
    def make_model(name):
        folder = tmp_path_factory.mktemp(name)
        checkpoint = make_checkpoint(read_model(name), PLAIN, folder)
        options = ConvertOptions(type="BF16", verify=False)
        planned = plan_conversion(checkpoint, folder / "model.gguf", options)
        run_conversion(planned, options)
        return load(planned.output, RuntimeOptions(ctx_size=256, prefix_cache=False), max_sequences=2)

    return make_model


def compute(backend, tokens, p0=0):
    for start in range(p0, len(tokens), STEP):
        part = tokens[start : start + STEP]
        logits = backend.forward([Row(0, part, start, len(part) - 1)]).copy()
    return logits


@pytest.mark.parametrize("name", ["gemma3", "gpt-oss", "deepseek-v2", "qwen3vl"])
@pytest.mark.parametrize("step", [STEP, 48])
def test_windows_and_latent_caches_come_back_bit_for_bit(make, name, step):
    tokens = prompt(read_model(name))
    with make(name) as model:
        backend = model.backend
        compute(backend, tokens)
        ranges = [(p0, min(p0 + step, 40)) for p0 in range(0, 40, step)]
        blobs = [backend.save_range(0, *r) for r in ranges]
        backend.apply(KVOp("remove", 0, 0, 40, -1))
        expected = backend.forward([Row(0, tokens[40:], 40, 0)]).copy()
        backend.apply(KVOp("remove", 0, 0, 0, -1))
        assert all(backend.load_range(0, *r, blob) for r, blob in zip(ranges, blobs, strict=True))
        np.testing.assert_array_equal(backend.forward([Row(0, tokens[40:], 40, 0)]), expected)
        # A tail can be taken off again, further back than the window.
        backend.apply(KVOp("remove", 0, 0, 10, -1))
        trimmed = compute(backend, tokens, 10)
        backend.apply(KVOp("remove", 0, 0, 0, -1))
        compute(backend, tokens[:10])
        np.testing.assert_array_equal(trimmed, compute(backend, tokens, 10))


@pytest.mark.parametrize("name", ["gemma3", "gpt-oss", "deepseek-v2", "qwen3vl"])
def test_the_beginning_of_a_range_is_what_it_was_when_the_range_went_no_further(make, name):
    tokens = prompt(read_model(name))
    with make(name) as model:
        backend = model.backend
        compute(backend, tokens[:40])
        blob = backend.save_range(0, 0, 40)
        for until in (39, 33, 32, 17, 16, 1):
            backend.apply(KVOp("remove", 0, 0, until, -1))
            expected = backend.forward([Row(0, tokens[40:], until, 0)]).copy()
            backend.apply(KVOp("remove", 0, 0, 0, -1))
            assert backend.load_range(0, 0, 40, blob, until) == until
            np.testing.assert_array_equal(backend.forward([Row(0, tokens[40:], until, 0)]), expected)


def test_where_the_room_ends_a_range_with_windows_ends_too_and_is_true(make):
    """What had left the window by then can be lost: the sequence cannot be made shorter again."""
    tokens = prompt(read_model("gemma3"))
    with make("gemma3") as model:
        backend = model.backend
        compute(backend, tokens[:47])
        blob, cells = backend.save_range(0, 0, 47), seen(backend)
        backend.apply(KVOp("remove", 0, 0, 20, -1))
        backend.forward([Row(1, np.full(215, 7, np.int32), 0, 215)])
        assert backend.load_range(0, 0, 47, blob) == 32
        backend.apply(KVOp("remove", 1, 1, 0, -1))
        assert backend.load_range(0, 0, 47, blob) == 47
        assert seen(backend) == cells


def seen(backend):
    """The state of what the next token sees of 47 in every layer, wherever its cells lie."""
    return [backend.save_range(0, position, position + 1) for position in range(47 - 15, 47)]


@pytest.mark.parametrize("name", ["lfm2", "qwen35"])
def test_a_hybrid_models_state_cannot_be_cut_and_it_says_so(make, name):
    with make(name) as model:
        compute(model.backend, np.arange(40, dtype=np.int32))
        assert model.backend.save_range(0, 0, 40) is None
        assert not model.backend.load_range(1, 0, 40, b"x" * 1000)
        assert model.backend.capabilities.max_sequences == 2
