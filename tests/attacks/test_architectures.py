"""Configs of every architecture with each key spoilt: a sound file, or one line and the right exit code."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from attacking import Attacker, attacker
from checkpoints import write_json
from random_checkpoint import PLAIN, make_checkpoint, model_names, read_model

VALUES: tuple[Any, ...] = (0, -1, 3, 2**31 - 1, 10**400, 1e300, 0.5, float("nan"), "x", True, [], [1], {}, None)


@pytest.fixture(scope="module")
def attack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Attacker]:
    with attacker(tmp_path_factory.mktemp("home")) as started:
        yield started


@pytest.mark.slow
@pytest.mark.parametrize("name", model_names())
def test_every_key_of_a_config(name: str, attack: Attacker, tmp_path: Path) -> None:
    sound = make_checkpoint(read_model(name), PLAIN, tmp_path)
    work = tmp_path / "work"
    attack.faults.clear()
    attack.kinds.clear()
    for label, config in _spoilt(json.loads((sound / "config.json").read_text("utf-8"))):
        shutil.rmtree(work, ignore_errors=True)
        shutil.copytree(sound, work / "checkpoint", copy_function=os.link)
        (work / "checkpoint" / "config.json").unlink()
        write_json(work / "checkpoint" / "config.json", config)
        outcome = attack.attack(label, work, "convert", "checkpoint", "-t", "Q8_0", "-o", "out.gguf")
        if not outcome.code:
            is_encoder = "encoder" in outcome.err + outcome.out
            further = ("embed", "out.gguf") if is_encoder else ("run", "out.gguf", "a", "-n", "2", "--raw")
            attack.attack(f"{label}: {further[0]}", work, *further)
    print(f"{name}: {dict(attack.kinds)}")
    assert not attack.faults


def _spoilt(config: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The config with one value changed, one key left out, or one list made longer or shorter; sections likewise."""
    for key, value in config.items():
        if key in ("vision_config", "audio_config"):
            continue
        if isinstance(value, dict):
            for label, section in _spoilt(value):
                yield f"{key}.{label}", {**config, key: section}
        if isinstance(value, list):
            yield f"{key} is longer", {**config, key: [*value, *value[-1:]]}
            yield f"{key} is shorter", {**config, key: value[:-1]}
            yield f"{key} begins with a list", {**config, key: [value, *value[1:]]}
        yield f"without {key}", {other: kept for other, kept in config.items() if other != key}
        for other in VALUES:
            yield f"{key} = {str(other)[:20]}", {**config, key: other}
