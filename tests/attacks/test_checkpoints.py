"""Broken checkpoints through `convert`: a sound file, or one line, the right exit code and nothing left behind."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from attacking import Attacker, attacker, spread
from broken_checkpoints import breaks
from checkpoints import write_checkpoint

NAMES = [name for name, _ in breaks()]


@pytest.fixture(scope="module")
def attack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Attacker]:
    with attacker(tmp_path_factory.mktemp("home")) as started:
        yield started


def _run(attack: Attacker, names: list[str], folder: Path) -> None:
    sound = write_checkpoint(folder / "sound")
    wanted = set(names)
    attack.faults.clear()
    attack.kinds.clear()
    for name, spoil in breaks():
        if name in wanted:
            work = folder / "work"
            shutil.rmtree(work, ignore_errors=True)
            shutil.copytree(sound, work / "checkpoint")
            spoil(work / "checkpoint")
            outcome = attack.attack(name, work, "convert", "checkpoint", "-t", "Q8_0", "-o", "out.gguf")
            left = {path.name for path in work.iterdir()} - {"checkpoint"}
            assert left == (set() if outcome.code else {"out.gguf"}), name
    print(f"checkpoints: {dict(attack.kinds)}")
    assert not attack.faults


def test_some(attack: Attacker, tmp_path: Path) -> None:
    _run(attack, spread(NAMES, 16), tmp_path)


@pytest.mark.slow
def test_all(attack: Attacker, tmp_path: Path) -> None:
    assert len(NAMES) >= 60
    _run(attack, NAMES, tmp_path)
