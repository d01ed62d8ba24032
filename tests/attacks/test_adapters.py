"""Hostile adapters: GGUF files through `run --lora`, PEFT directories through `convert`. No signal, no hang, one line.

The ordinary run takes a few of every kind; `pytest -m slow tests/attacks` takes them all, on two models.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
from adapter_files import adapter_tensors, write_adapter
from attacking import Attacker, attacker, spread
from broken_adapters import breaks
from checkpoints import write_checkpoint
from gguf_parts import Parts, take_apart
from hostile_ggufs import FAMILIES, Mutant
from random_adapter import make_adapter, read_adapter_description
from random_checkpoint import PLAIN, make_checkpoint

from edgeinfer.api.convert import convert
from edgeinfer.options import ConvertOptions

# An embedding and a head among them; experts.
ADAPTERS = ("llama", "mixtral")
OF_FILES = ("truncations", "flips", "counts", "offsets", "metadata", "tensors")
FEW = 2
BREAKS = [name for name, _ in breaks()]


@pytest.fixture(scope="module")
def attack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Attacker]:
    with attacker(tmp_path_factory.mktemp("home")) as started:
        yield started


@pytest.fixture(scope="module", params=ADAPTERS)
def sound(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Parts]:
    """A model, and an adapter for it in parts."""
    folder = tmp_path_factory.mktemp(request.param)
    adapter = read_adapter_description(request.param)
    checkpoint = make_checkpoint(adapter.model, PLAIN, folder)
    convert(checkpoint, folder / "model.gguf", ConvertOptions(type="F16", verify=False))
    convert(make_adapter(adapter, checkpoint, folder), folder / "adapter.gguf", ConvertOptions(type="F16"))
    return folder / "model.gguf", take_apart(folder / "adapter.gguf")


def shapes(parts: Parts) -> Iterator[Mutant]:
    """Pairs of other shapes, types and ranks, with all the data that those ask for."""
    seen = set()
    for a in (tensor for tensor in parts.tensors if tensor.name.endswith(b".lora_a")):
        name = a.name.decode()
        kind = name.partition(".")[2].lstrip("0123456789.")
        if kind in seen:
            continue
        seen.add(kind)
        other = name.removesuffix("a") + "b"
        b = next(tensor for tensor in parts.tensors if tensor.name == other.encode())
        ranks = (0, 1, 3, a.shape[1] + 1, 4096)
        stacks: tuple[tuple[int, ...], ...] = ((), (1,), (2,), (8,), (1, 2), (2, 2))
        for rank, stack in product(ranks, stacks):
            changed = {name: (a.shape[0], rank, *stack), other: (rank, b.shape[1], *stack)}
            yield f"{name} of rank {rank} in {stack}", _reshaped(parts, changed)
        for label, changed in {
            "turned": {name: a.shape[::-1], other: b.shape[::-1]},
            "exchanged": {name: b.shape, other: a.shape},
            "flat": {name: (a.shape[0],), other: (b.shape[0],)},
            "wider": {name: (a.shape[0] * 2, *a.shape[1:])},
            "longer": {other: (b.shape[0], b.shape[1] * 2, *b.shape[2:])},
            "narrower": {name: (a.shape[0] // 2, *a.shape[1:])},
        }.items():
            yield f"{name} {label}", _reshaped(parts, changed)
    norm = replace(parts.tensors[0], name=b"blk.0.attn_norm.weight")
    yield "with a norm", replace(parts, tensors=(*parts.tensors, norm)).encoded
    vector = [
        replace(t, name=b"blk.0.attn_norm.weight." + t.name.rpartition(b".")[2])
        for t in parts.tensors
        if b"blk.0.attn_output.weight" in t.name or b"blk.0.ffn_gate_inp.weight" in t.name
    ]
    yield "for a norm", replace(parts, tensors=(*parts.tensors, *vector)).encoded


def _reshaped(parts: Parts, changes: dict[str, tuple[int, ...]]) -> Callable[[], bytes]:
    tensors = []
    for tensor in parts.tensors:
        shape = changes.get(tensor.name.decode(), tensor.shape)
        count = 2
        for length in shape:
            count *= length
        data = (tensor.data * (count // len(tensor.data) + 1))[:count]
        tensors.append(replace(tensor, shape=shape, data=data))
    return replace(parts, tensors=tuple(tensors)).encoded


ALL_FAMILIES = {**{name: FAMILIES[name] for name in OF_FILES}, "shapes": shapes}


def _run(attack: Attacker, family: str, sound: tuple[Path, Parts], folder: Path, count: int | None) -> None:
    model, parts = sound
    cases = list(ALL_FAMILIES[family](parts))
    wanted = set(spread([case for case, _ in cases], count or len(cases)))
    attack.faults.clear()
    attack.kinds.clear()
    for case, encoded in cases:
        if case in wanted:
            path = folder / "adapter.gguf"
            path.write_bytes(encoded())
            attack.attack(case, folder, "run", model, "hi", "--raw", "-n", "2", "--temp", "0", "--lora", path)
    print(f"{family}: {dict(attack.kinds)}")
    assert not attack.faults
    assert "caught assertion in C" not in attack.kinds


@pytest.mark.parametrize("family", ALL_FAMILIES)
def test_a_few_of_each_kind(family: str, attack: Attacker, sound: tuple[Path, Parts], tmp_path: Path) -> None:
    _run(attack, family, sound, tmp_path, FEW)


@pytest.mark.slow
@pytest.mark.parametrize("family", ALL_FAMILIES)
def test_all(family: str, attack: Attacker, sound: tuple[Path, Parts], tmp_path: Path) -> None:
    _run(attack, family, sound, tmp_path, None)


def _convert(attack: Attacker, names: list[str], folder: Path) -> None:
    base = write_checkpoint(folder / "base")
    attack.faults.clear()
    attack.kinds.clear()
    for name, spoil in breaks():
        if name not in names:
            continue
        for command in (("adapter", "-o", "out.gguf"), (base, "--lora", "adapter", "-t", "Q8_0", "-o", "out.gguf")):
            work = folder / "work"
            shutil.rmtree(work, ignore_errors=True)
            write_adapter(work / "adapter", base, adapter_tensors(r"model\.layers\.\d+\..*"))
            spoil(work / "adapter")
            outcome = attack.attack(name, work, "convert", *command)
            left = {path.name for path in work.iterdir()} - {"adapter"}
            assert left == (set() if outcome.code else {"out.gguf"}), name
    print(f"adapters: {dict(attack.kinds)}")
    assert not attack.faults


def test_some_directories(attack: Attacker, tmp_path: Path) -> None:
    _convert(attack, spread(BREAKS, 5), tmp_path)


@pytest.mark.slow
def test_all_directories(attack: Attacker, tmp_path: Path) -> None:
    assert len(BREAKS) > 60
    _convert(attack, BREAKS, tmp_path)
