"""The fork's library: architectures that it computes as llama.cpp does, and what is wrong in it, so that it is known
when that changes. Tiny models of random weights.
"""

import dataclasses
import struct
import subprocess
import sys
import tomllib
from pathlib import Path

import numpy as np
import pytest
from random_checkpoint import PLAIN, make_checkpoint, prompt, read_model

from edgeinfer.api import kernel_trial
from edgeinfer.api.convert import plan_conversion, run_conversion
from edgeinfer.api.files import checked_header
from edgeinfer.api.fork_limits import ARCHITECTURES, n_vocab
from edgeinfer.errors import ResourceError
from edgeinfer.native import ik_package, library
from edgeinfer.native.context import NativeBackend
from edgeinfer.native.ik import IkModel, is_whole, kernels
from edgeinfer.native.ik_package import REQUIREMENT, identity
from edgeinfer.native.model import NativeModel
from edgeinfer.options import ConvertOptions, RuntimeOptions
from edgeinfer.types import KVOp, Refusal, Row

needs_fork = pytest.mark.skipif(not ik_package.is_installed(), reason="needs edgeinfer[fast]")
REPOSITORY = Path(__file__).resolve().parents[2]
FILES = {"glm4moe": "glm4-moe"}
"""Of tests/conformance/models, where they are named otherwise than the architecture."""
N_PROMPT, N_TOKENS = 64, 80
ROUNDING = 1e-3
"""Nats. F16 weights make 1e-5, experts 2e-4 with a library for AVX-512; a wrong operation makes 0.1 and more."""
GIVING_UP = """
from edgeinfer.cli import console
from edgeinfer.errors import last_words
from edgeinfer.native.ik import kernels
last_words.append(lambda error: console.fail_at_once(error, as_json=True))
kernels().lib._lib.ggml_abort(b"ops.c", 1, b"unlucky")
"""


@pytest.fixture(scope="module")
def make(tmp_path_factory):
    def make_gguf(name, variant=PLAIN, type_name="F16", **config):
        folder = tmp_path_factory.mktemp(name)
        described = read_model(name)
        described = dataclasses.replace(described, config={**described.config, **config})
        checkpoint = make_checkpoint(described, variant, folder)
        options = ConvertOptions(type=type_name, verify=False)
        planned = plan_conversion(checkpoint, folder / "model.gguf", options)
        run_conversion(planned, options)
        return planned.output

    return make_gguf


def both(path):
    header = checked_header(path)
    yield NativeModel(path)
    yield IkModel(path, header.architecture, n_vocab(header))


def logits(model, tokens, max_sequences):
    """Of a prompt in one pass and of single tokens; another sequence's cells come before those of two."""
    options = RuntimeOptions(ctx_size=256, threads=1)
    with model, NativeBackend(model, options, max_sequences=max_sequences) as backend:
        if max_sequences > 1:
            backend.forward([Row(1, tokens[:7], 0, 7)])
        rows = [backend.forward([Row(0, tokens[:N_PROMPT], 0, 0)]).copy()]
        rows += [backend.forward([Row(0, tokens[i : i + 1], i, 0)]).copy() for i in range(N_PROMPT, N_TOKENS)]
        return np.concatenate(rows)


def some_tokens(name):
    tokens = prompt(read_model(name))
    return np.resize(np.concatenate([tokens, tokens[::-1]]), N_TOKENS).astype(np.int32)


@needs_fork
@pytest.mark.parametrize("max_sequences", [1, 2])  # with flash attention, and without
@pytest.mark.parametrize("name", sorted(ARCHITECTURES))
def test_the_architectures_are_computed_as_llama_cpp_computes_them(make, name, max_sequences):
    path = make(FILES.get(name, name), **({"rope_scaling": None} if name == "llama" else {}))
    assert checked_header(path).architecture == name
    tokens = some_tokens(FILES.get(name, name))
    ours, theirs = (logits(model, tokens, max_sequences) for model in both(path))
    assert kernel_trial._divergence(ours, theirs) < ROUNDING


@needs_fork
def test_a_trial_finds_the_rows_that_are_wrong_and_avoids_them(make):
    """Q4_1 with rows of 320: from 32 tokens at a time on."""
    path = make("llama", "ragged", "Q4_1", rope_scaling=None)
    assert kernel_trial.main(path).ubatch_size == 24
    whole = kernel_trial.main(make("llama", PLAIN, "Q4_1", rope_scaling=None))
    assert (whole.ubatch_size, whole.is_sound) == (None, True)


@needs_fork
def test_room_in_pieces_is_room(make):
    """The fork wants cells side by side; what is in the way is moved, and nothing of it changes."""
    path = make("qwen2")
    header = checked_header(path)
    tokens = np.resize(some_tokens("qwen2"), 200)
    options = RuntimeOptions(ctx_size=512, threads=1)
    model = IkModel(path, header.architecture, n_vocab(header))
    with model, NativeBackend(model, options, max_sequences=3) as backend:
        for start in range(0, 200, 50):
            for seq in (0, 1):
                backend.forward([Row(seq, tokens[start : start + 50], start, 50)])
        expected = backend.forward([Row(0, tokens[:1], 200, 0)]).copy()
        backend.apply(KVOp("remove", 0, 0, 200, -1))
        backend.apply(KVOp("remove", 1, 1, 0, -1))
        assert not isinstance(backend.forward([Row(2, tokens, 0, 200)]), Refusal)
        assert backend.forward([Row(1, np.resize(tokens, 130), 0, 130)]) is Refusal.NO_ROOM
        assert not isinstance(backend.forward([Row(1, tokens[:100], 0, 100)]), Refusal)
        # In another order sums round otherwise.
        np.testing.assert_allclose(backend.forward([Row(0, tokens[:1], 200, 0)]), expected, atol=1e-4)


@needs_fork
def test_a_pass_in_several_parts_that_finds_no_room_leaves_nothing(make):
    path = make("qwen2")
    header = checked_header(path)
    options = RuntimeOptions(ctx_size=256, ubatch_size=32, threads=1)
    with IkModel(path, header.architecture, n_vocab(header)) as model, NativeBackend(model, options) as backend:
        tokens = np.resize(some_tokens("qwen2"), 256)
        backend.forward([Row(0, tokens[:100], 0, 100)])
        assert backend.forward([Row(0, np.resize(tokens, 200), 100, 200)]) is Refusal.NO_ROOM
        with pytest.raises(ValueError, match="holds 100 tokens"):
            backend.save_range(0, 0, 101)


@needs_fork
@pytest.mark.parametrize("seed", range(3))
def test_one_sequence_lies_in_order_whatever_is_cut_off_and_restored(make, seed):
    """Its flash attention would compute something else if there were a gap at the beginning of a block of cells."""
    path = make("qwen2")
    header, random = checked_header(path), np.random.default_rng(seed)
    options = RuntimeOptions(ctx_size=512, threads=1)
    tokens = np.resize(some_tokens("qwen2"), 512)
    with NativeModel(path) as model, NativeBackend(model, options) as backend:
        expected = backend.forward([Row(0, tokens, 0, 0)]).copy()
    with IkModel(path, header.architecture, n_vocab(header)) as model, NativeBackend(model, options) as backend:
        length, kept = 0, []
        for _ in range(60):
            what = random.choice(["append", "cut", "save", "restore"], p=[0.6, 0.2, 0.1, 0.1])
            end = int(random.integers(length, min(length + 90, 512) + 1))
            if what == "append" and end > length:
                found = backend.forward([Row(0, tokens[length:end], length, 0)])
                assert kernel_trial._divergence(expected[length:end], found) < ROUNDING
                length = end
            elif what == "cut":
                length = int(random.integers(length // 2, length + 1))
                backend.apply(KVOp("remove", 0, 0, length, -1))
            elif what == "save" and length:
                start = int(random.integers(0, length))
                kept.append((start, length, backend.save_range(0, start, length)))
            elif what == "restore" and kept:
                start, end, blob = kept[int(random.integers(len(kept)))]
                if start <= length:  # a part: what the sequence has of it stays, and what it does not want goes
                    length = min(length, int(random.integers(start, end)))
                    backend.apply(KVOp("remove", 0, 0, length, -1))
                    length = backend.load_range(0, start, end, blob, int(random.integers(length + 1, end + 1)))


def with_a_gap(model, tokens):
    """A backend whose second sequence lies behind free cells, 60 to 63, the last of which the library looks at."""
    backend = NativeBackend(model, RuntimeOptions(ctx_size=256, threads=1), max_sequences=2)
    backend.forward([Row(0, tokens[:64], 0, 64)])
    backend.forward([Row(1, tokens[:17], 0, 17)])
    backend.apply(KVOp("remove", 0, 0, 60, -1))
    return backend


@needs_fork
def test_cells_behind_free_ones_are_seen(make):
    found = []
    for model in both(make("qwen2")):
        tokens = some_tokens("qwen2")
        with model, with_a_gap(model, tokens) as backend:
            found.append([backend.forward([Row(1, tokens[i : i + 1], i, 0)]).copy() for i in range(17, 23)])
    assert kernel_trial._divergence(*map(np.concatenate, found)) < ROUNDING


@needs_fork
def test_an_interrupt_leaves_no_cell_half_moved(make):
    found = []
    for model in both(make("qwen2")):
        tokens = some_tokens("qwen2")
        with model, with_a_gap(model, tokens) as backend:
            backend.abort()
            assert backend.forward([Row(0, tokens[:9], 60, 9)]) is Refusal.ABORTED
            backend.clear_abort()
            backend.apply(KVOp("remove", 0, 0, 60, -1))
            found.append(backend.forward([Row(1, tokens[17:20], 17, 0)]).copy())
            backend.abort()
            assert backend.forward([Row(0, tokens[:9], 60, 9)]) is Refusal.ABORTED
    assert kernel_trial._divergence(*found) < ROUNDING


@needs_fork
@pytest.mark.parametrize("seed", range(3))
def test_several_sequences_are_computed_alike_whatever_is_cut_off(make, seed):
    random, options = np.random.default_rng(seed), RuntimeOptions(ctx_size=1024, threads=1)
    ours, theirs = both(make("qwen2"))
    with (
        ours,
        theirs,
        NativeBackend(ours, options, max_sequences=3) as expected,
        NativeBackend(theirs, options, max_sequences=3) as found,
    ):
        lengths = [0, 0, 0]
        for _ in range(50):
            seq, cut = int(random.integers(3)), int(random.choice([0, 1, 4, 30, 200], p=[0.5, 0.2, 0.1, 0.1, 0.1]))
            lengths[seq] = max(lengths[seq] - cut, 0)
            sizes = random.choice([1, 2, 7, 25], 3, p=[0.6, 0.2, 0.1, 0.1])
            rows = [Row(i, random.integers(3, 300, n, np.int32), lengths[i], 0) for i, n in enumerate(sizes)]
            for backend in (expected, found):
                backend.apply(KVOp("remove", seq, seq, lengths[seq], -1))
            assert kernel_trial._divergence(expected.forward(rows), found.forward(rows)) < ROUNDING
            lengths = [length + int(n) for length, n in zip(lengths, sizes, strict=True)]


@needs_fork
def test_want_of_memory_is_no_fault_of_the_file(make, monkeypatch):
    path = make("qwen2")
    header = checked_header(path)

    def load(name, params):
        library._errors.append("llama_model_load: error loading model: Failed to allocate buffer type CPU")

    monkeypatch.setattr(kernels().lib, "llama_model_load_from_file", load)
    with pytest.raises(ResourceError, match="Failed to allocate"):
        IkModel(path, header.architecture, n_vocab(header))


def test_the_extra_installs_the_version_that_is_known():
    with (REPOSITORY / "pyproject.toml").open("rb") as file:
        assert tomllib.load(file)["project"]["optional-dependencies"]["fast"] == [REQUIREMENT]


@needs_fork
def test_it_names_its_files_and_the_machine():
    assert kernels().build().startswith("ik_llama.cpp 0.1.5 [(")
    assert "AVX2 = " in kernels().build()


def state(p0=3, p1=7, *, sequences=0, layers=2, transposed=1, states=0):
    """What the library writes of a range, K of 8 bytes a cell, V of 4 elements of 2 bytes."""
    n = p1 - p0
    cells = b"".join(struct.pack("=iI", position, sequences) for position in range(p0, p1))
    keys = (struct.pack("=iQ", 1, 8) + bytes(8 * n)) * layers
    values = struct.pack("=iII", 1, 2, 4) if transposed else struct.pack("=iQ", 1, 8)
    values = (values + bytes(8 * n)) * layers
    parts = (struct.pack("=I", n), cells, struct.pack("=II", transposed, layers), keys, values)
    return b"".join(parts) + struct.pack("=I", states)


@pytest.mark.parametrize("transposed", [0, 1])
def test_a_state_is_whole_or_refused(transposed):
    whole = state(transposed=transposed)
    assert is_whole(memoryview(whole), 3, 7)
    for n in range(len(whole)):
        assert not is_whole(memoryview(whole[:n]), 3, 7)
    assert not is_whole(memoryview(whole + b"\0"), 3, 7)
    for p0, p1 in ((3, 6), (2, 6), (3, 8)):
        assert not is_whole(memoryview(whole), p0, p1)


def test_a_library_that_is_chosen_by_the_environment_is_another_one(monkeypatch, tmp_path):
    """The package looks there first: what was measured and computed with its own does not hold for it."""
    monkeypatch.setattr("edgeinfer.native.ik_package.folder", lambda: tmp_path / "package")
    of_the_package = identity()
    monkeypatch.setenv("IK_LLAMA_CPP_LIB_PATH", str(tmp_path / "libllama.so"))
    (tmp_path / "libllama.so").write_bytes(b"1")
    (tmp_path / "libggml.so").write_bytes(b"1")
    one = identity()
    (tmp_path / "libggml.so").write_bytes(b"12")
    assert len({of_the_package, one, identity()}) == 3


@needs_fork
def test_an_assertion_that_fails_is_told_by_the_command_line():
    ended = subprocess.run([sys.executable, "-c", GIVING_UP], capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 4
    assert "ops.c:1: unlucky" in ended.stderr
    assert "ik_llama.cpp gave up" in ended.stdout


@pytest.mark.parametrize("change", [{"sequences": 1}, {"states": 1}])
def test_a_state_of_another_kind_is_refused(change):
    data = state(**change)
    assert not is_whole(memoryview(data), 3, 7)
