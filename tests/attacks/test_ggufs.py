"""Hostile GGUF files through the commands: one line and the right exit code, or an answer; no signal, no hang.

The ordinary run takes a few of every kind; `pytest -m slow tests/attacks` takes them all, from seven architectures.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from attacking import Attacker, attacker, spread
from gguf_parts import Parts, take_apart, text, u32
from hostile_ggufs import FAMILIES, mutants
from random_checkpoint import PLAIN, make_checkpoint, read_model

from edgeinfer.api.convert import convert
from edgeinfer.options import ConvertOptions

# Dense, biases, windows, experts, shared experts and latent attention, recurrent layers, an encoder.
MODELS = ("llama", "qwen2", "gemma3", "qwen2moe", "deepseek-v3", "lfm2", "bert")
# What doesn't depend on the architecture is tried on one.
OF_ONE = (
    "truncations",
    "flips",
    "counts",
    "offsets",
    "templates",
    "carried_tokenizers",
    "recommendations",
    "architectures",
)
STEPS = {"llama": 1}
"""Of the larger families every third is tried, with the whole of them on one model."""


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Parts]:
    return {}


@pytest.fixture(scope="module")
def attack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Attacker]:
    with attacker(tmp_path_factory.mktemp("home")) as started:
        yield started


def _parts(name: str, folder: Path, known: dict[str, Parts]) -> Parts:
    if name not in known:
        checkpoint = make_checkpoint(read_model(name), PLAIN, folder / "checkpoint")
        convert(checkpoint, folder / "sound.gguf", ConvertOptions(type="F16", verify=False))
        known[name] = take_apart(folder / "sound.gguf")
    return known[name]


def _arguments(name: str, path: Path) -> tuple[object, ...]:
    return ("embed", path) if name == "bert" else ("run", path, "hi", "-n", "2", "--temp", "0")


def _cases(name: str, family: str, parts: Parts, count: int | None) -> list[str]:
    names = [case for case, _ in mutants(parts, family)]
    return spread(names, len(names) // 3 if count is None and name not in STEPS else count or len(names))


def _run(attack: Attacker, name: str, family: str, parts: Parts, folder: Path, count: int | None) -> None:
    wanted = set(_cases(name, family, parts, count))
    for case, encoded in mutants(parts, family):
        if case in wanted:
            path = folder / "model.gguf"
            path.write_bytes(encoded())
            attack.attack(f"{name}: {case}", folder, *_arguments(name, path))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_few_of_each_kind(family: str, attack: Attacker, sound: dict[str, Parts], tmp_path: Path) -> None:
    attack.faults.clear()
    _run(attack, "llama", family, _parts("llama", tmp_path, sound), tmp_path, 3)
    assert not attack.faults


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", MODELS)
def test_all(name: str, family: str, attack: Attacker, sound: dict[str, Parts], tmp_path: Path) -> None:
    if family in OF_ONE and name != "llama":
        pytest.skip("does not depend on the architecture")
    attack.faults.clear()
    attack.kinds.clear()
    _run(attack, name, family, _parts(name, tmp_path, sound), tmp_path, None)
    print(f"{name} {family}: {dict(attack.kinds)}")
    assert not attack.faults


@pytest.mark.parametrize(
    ("name", "changes", "expected"),
    [
        ("llama", {"llama.rope.freq_base": u32(0)}, 4),
        ("lfm2", {"lfm2.rope.dimension_count": u32(0)}, 4),
        ("llama", {"tokenizer.ggml.model": text("rwkv")}, (0, 4)),
        ("llama", {"tokenizer.chat_template": text("{{ '\\ud800' }}")}, 4),
        ("llama", {"llama.context_length": u32(1)}, 6),
    ],
    ids=str,
)
def test_what_was_found(
    name: str,
    changes: dict[str, bytes | None],
    expected: object,
    attack: Attacker,
    sound: dict[str, Parts],
    tmp_path: Path,
) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(_parts(name, tmp_path, sound).changed(changes).encoded())
    outcome = attack.run(tmp_path, *_arguments(name, path))
    assert not outcome.fault
    assert outcome.code in (expected if isinstance(expected, tuple) else (expected,)), outcome.err


def test_a_split_file_that_lies_about_its_parts(attack: Attacker, sound: dict[str, Parts], tmp_path: Path) -> None:
    parts = _parts("llama", tmp_path, sound)
    for count, number, stated in ((2, 0, 99), (2, 1, 1), (3, 0, 5), (65535, 0, 1), (2, 0, 0)):
        path = tmp_path / f"model-00001-of-{count:05}.gguf"
        lies = {"split.count": u32(count), "split.no": u32(number), "split.tensors.count": u32(stated)}
        path.write_bytes(parts.changed(lies).encoded())
        if count == 2:
            shutil.copyfile(path, tmp_path / "model-00002-of-00002.gguf")
        outcome = attack.run(tmp_path, *_arguments("llama", path))
        assert not outcome.fault
        assert outcome.code in (3, 4), outcome.err
