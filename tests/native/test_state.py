"""Ranges of KV state on a real model: bit for bit what was computed, and nothing that is not whole reaches C."""

import struct

import numpy as np
import pytest

import edgeinfer
from edgeinfer.native.context import NativeBackend
from edgeinfer.options import RuntimeOptions
from edgeinfer.types import KVOp, Refusal, Row

pytestmark = pytest.mark.model
LENGTH, STEP = 160, 64
SEQUENCES = 4  # of a model for two requests, so that their beginnings can outlive them
TOKENS = np.random.default_rng(5).integers(100, 40_000, LENGTH + 24, np.int32)


@pytest.fixture(scope="module")
def model(smollm2_gguf, kernels):
    options = RuntimeOptions(ctx_size=512, prefix_cache=False, kernels=kernels)
    with edgeinfer.load(smollm2_gguf, options, max_sequences=2) as model:
        yield model


def forget(backend):
    for seq in range(2):
        backend.apply(KVOp("remove", seq, seq, 0, -1))


def prefill(backend, seq=0):
    for start in range(0, LENGTH, STEP):
        end = min(start + STEP, LENGTH)
        backend.forward([Row(seq, TOKENS[start:end], start, end - start)])


def answers(backend, seq=0):
    """Logits of a batch and of single tokens after the prompt, in the shapes that a run has."""
    many = backend.forward([Row(seq, TOKENS[LENGTH : LENGTH + 16], LENGTH, 0)]).copy()
    ones = [backend.forward([Row(seq, TOKENS[p : p + 1], p, 0)]).copy() for p in range(LENGTH + 16, LENGTH + 24)]
    return np.concatenate([many, *ones])


def holds(backend, blobs, step, seq=0):
    """Whether the sequence's state is the saved one, to the last bit, wherever its cells lie."""
    return all(backend.save_range(seq, *r) == blob for r, blob in zip(ranges(step), blobs[step], strict=True))


def ranges(step):
    return [(start, min(start + step, LENGTH)) for start in range(0, LENGTH, step)]


@pytest.fixture(scope="module")
def computed(model):
    """What the prompt leaves, by step, and the answers after it."""
    prefill(model.backend)
    blobs = {step: [model.backend.save_range(0, *r) for r in ranges(step)] for step in (STEP, LENGTH)}
    return blobs, answers(model.backend)


@pytest.fixture
def saved(model, computed):
    """The same, and a memory that is empty."""
    forget(model.backend)
    return computed


@pytest.mark.parametrize("step", [STEP, LENGTH])
def test_restored_state_gives_the_same_logits_bit_for_bit(model, saved, step):
    blobs, expected = saved
    for (p0, p1), blob in zip(ranges(step), blobs[step], strict=True):
        assert model.backend.load_range(0, p0, p1, blob)
    np.testing.assert_array_equal(answers(model.backend), expected)


@pytest.mark.parametrize(
    "options", [{"flash_attn": "off"}, {"cache_type_k": "q8_0", "cache_type_v": "q8_0"}], ids=["transposed V", "q8_0"]
)
def test_so_it_does_with_other_layouts_of_the_cache(model, kernels, options):
    if kernels == "ik" and "cache_type_v" in options:
        pytest.skip("the fork needs flash attention for that, which is wrong there")
    with NativeBackend(model.native, RuntimeOptions(ctx_size=512, **options), max_sequences=2) as backend:
        prefill(backend)
        blobs = [backend.save_range(0, *r) for r in ranges(STEP)]
        expected = answers(backend)
        forget(backend)
        for (p0, p1), blob in zip(ranges(STEP), blobs, strict=True):
            assert backend.load_range(0, p0, p1, blob)
        np.testing.assert_array_equal(answers(backend), expected)


def test_another_sequence_and_a_part_that_is_there_already(model, saved):
    blobs, _ = saved
    backend = model.backend
    prefill(backend, seq=1)
    backend.apply(KVOp("remove", 1, 1, STEP + 10, -1))
    for (p0, p1), blob in list(zip(ranges(STEP), blobs[STEP], strict=True))[1:]:
        assert backend.load_range(1, p0, p1, blob)
    assert holds(backend, blobs, STEP, seq=1)


def test_saving_leaves_the_sequence_and_the_spare_one_as_they_were(model, saved):
    _, expected = saved
    prefill(model.backend)
    model.backend.save_range(0, 10, 50)
    np.testing.assert_array_equal(answers(model.backend), expected)
    # All cells are free again: as many tokens fit as ever.
    forget(model.backend)
    assert not isinstance(model.backend.forward([Row(0, np.full(512, 7, np.int32), 0, 512)]), Refusal)


def corruptions(blob, kernels):
    yield b""
    yield blob[:-1]
    yield blob + b"\0"
    yield blob[: len(blob) // 2]
    if kernels == "ik":  # the size, cells, a position, its sequences
        fields, layers = (0, 8, 12, 16), 8 + 4 + STEP * 8
    else:  # the size, magic, streams, cells, a position, its sequences
        fields, layers = (0, 8, 16, 20, 24, 28), 8 + 8 + 8 + STEP * 12
    for offset in fields:
        yield blob[:offset] + struct.pack("=I", 77) + blob[offset + 4 :]
    for offset in range(layers, layers + 16, 4):  # V transposed, layers, type of K, size of its rows
        yield blob[:offset] + struct.pack("=I", 7) + blob[offset + 4 :]


def test_a_blob_that_is_not_whole_is_refused_and_changes_nothing(model, saved, kernels):
    blobs, _ = saved
    backend = model.backend
    for blob in corruptions(blobs[STEP][0], kernels):
        assert not backend.load_range(0, 0, STEP, blob)
    assert not backend.load_range(0, 0, STEP, blobs[STEP][1]), "the state of other positions"
    prefill(backend)
    assert holds(backend, blobs, STEP)


def test_a_blob_of_a_cache_of_another_type_is_refused(model, saved):
    blobs, _ = saved
    with NativeBackend(model.native, RuntimeOptions(ctx_size=512, cache_type_k="q8_0"), max_sequences=1) as backend:
        assert not backend.load_range(0, 0, STEP, blobs[STEP][0])
        assert not isinstance(backend.forward([Row(0, TOKENS[:512], 0, 0)]), Refusal)


def test_no_room_is_an_answer_and_changes_nothing(model, saved):
    blobs, _ = saved
    backend = model.backend
    backend.forward([Row(1, np.full(400, 7, np.int32), 0, 400)])
    assert backend.load_range(0, 0, STEP, blobs[STEP][0])
    assert backend.load_range(0, STEP, 2 * STEP, blobs[STEP][1]) == STEP
    backend.apply(KVOp("remove", 1, 1, 0, -1))
    for (p0, p1), blob in list(zip(ranges(STEP), blobs[STEP], strict=True))[1:]:
        assert backend.load_range(0, p0, p1, blob)
    assert holds(backend, blobs, STEP)


def test_ranges_that_are_not_there_are_errors(model, saved):
    prefill(model.backend)
    for bad in [(0, 0, 0), (0, 10, 5), (0, -1, 5), (0, 0, LENGTH + 1), (SEQUENCES, 0, 5), (-1, 0, 5)]:
        with pytest.raises(ValueError):  # noqa: PT011
            model.backend.save_range(*bad)


def test_of_a_blob_that_goes_on_longer_only_the_beginning_is_taken(model, saved):
    blobs, _ = saved
    backend = model.backend
    prefill(backend)
    parts = [(0, 30), (30, STEP), (STEP, STEP + 20)]
    kept = [backend.save_range(0, *part) for part in parts]
    forget(backend)
    assert backend.load_range(0, 0, STEP, blobs[STEP][0], 30) == 30
    assert backend.load_range(0, 0, STEP, blobs[STEP][0], STEP) == STEP
    assert backend.load_range(0, STEP, 2 * STEP, blobs[STEP][1], STEP + 20) == STEP + 20
    assert [backend.save_range(0, *part) for part in parts] == kept
    forget(backend)
    assert not isinstance(backend.forward([Row(0, np.full(512, 7, np.int32), 0, 512)]), Refusal), "cells are left"


@pytest.mark.parametrize("bad", [(0, STEP, 2 * STEP), (0, 5, 5), (SEQUENCES, 0, STEP)])
@pytest.mark.parametrize("until", [None, 0, STEP + 1])
def test_a_blob_goes_only_where_the_sequence_ends(model, saved, bad, until):
    blobs, _ = saved
    with pytest.raises(ValueError):  # noqa: PT011
        model.backend.load_range(*bad, blobs[STEP][0], until)


def test_the_spare_sequence_is_nobody_elses(model):
    assert model.backend.capabilities.max_sequences == SEQUENCES
    with pytest.raises(ValueError, match=f"sequence {SEQUENCES}"):
        model.backend.forward([Row(SEQUENCES, TOKENS[:5], 0, 4)])
