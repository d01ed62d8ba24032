"""What the end of a trial's process says, and what is remembered of it."""

import json
import math
import sys
import threading
import time
from dataclasses import asdict, replace

import pytest

from edgeinfer.api import kernel_trial
from edgeinfer.api import trials as trials_module
from edgeinfer.api.files import checked_header
from edgeinfer.api.trials import SAYS_NOTHING, Trial, _run_trial, trial_of  # as it is before conftest.py replaces it
from edgeinfer.errors import UnusableInputError
from edgeinfer.types import Placement

GOOD = Trial(0.003, 1.5, 2.0)
NOTHING = None
CANNOT = Trial(math.inf)


@pytest.fixture
def remembered(tiny_gguf, monkeypatch, tmp_path):
    monkeypatch.setenv("EDGEINFER_HOME", str(tmp_path))
    monkeypatch.setattr(trials_module, "cores_are_shared", lambda: False)
    header = checked_header(tiny_gguf)
    return lambda: trial_of(header, lambda: "these files", may_try=True, must_keep=True)


@pytest.mark.parametrize(
    ("script", "trial"),
    [
        # Not those that whatever runs the tests may have let be ignored: INT, QUIT, HUP.
        *((f"kill -{name} $$", NOTHING) for name in ("TERM", "KILL", "XCPU", "ALRM")),
        (f"exit {SAYS_NOTHING}", NOTHING),
        *((f"kill -{name} $$", CANNOT) for name in ("ABRT", "SEGV", "BUS", "ILL", "FPE")),
        *((script, CANNOT) for script in ("exit 1", "exit 0", "echo '{}'", "exec sleep 100")),
        (f"echo '{json.dumps(asdict(GOOD))}'", GOOD),
    ],
)
def test_only_what_the_fork_does_counts_against_it(tmp_path, monkeypatch, script, trial):
    program = tmp_path / "python"
    program.write_text(f"#!/bin/sh\nulimit -c 0\n{script}\n")
    program.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(program))
    if "sleep" in script:
        monkeypatch.setattr(trials_module, "_SILENT_S", 0.1)
        monkeypatch.setattr(trials_module, "_TRIAL_LIMIT_S", 0.1)
    found = _run_trial(tmp_path / "model.gguf")
    assert found == trial or (found is not None and replace(found, fault="") == trial)


@pytest.mark.parametrize(
    "data",
    [
        "",
        "[]",
        "{}",
        '{"divergence": "x", "decode": 1, "prefill": 1, "ubatch_size": 1, "was_disturbed": false}',
        '{"divergence": 0, "decode": 1, "prefill": 1, "ubatch_size": 1e999, "was_disturbed": false}',
        "[" * 4000,
    ],
)
def test_a_broken_memory_is_none(remembered, data, monkeypatch, tmp_path):
    said = [CANNOT, GOOD]
    monkeypatch.setattr(trials_module, "_run_trial", lambda path: said.pop(0))
    assert remembered() == CANNOT
    (path,) = tmp_path.glob("kernels/*.json")
    path.write_text(data)
    assert remembered() == remembered() == GOOD


def test_a_fault_that_is_told_at_length_is_remembered(remembered, tmp_path, monkeypatch):
    program = tmp_path / "python"
    program.write_text(f"#!/bin/sh\necho '{json.dumps(asdict(CANNOT) | {'fault': 'é' * 9000})}'\n")
    program.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(program))
    monkeypatch.setattr(trials_module, "_run_trial", _run_trial)
    assert remembered().fault == "é" * 500
    program.unlink()
    assert remembered().fault == "é" * 500


def test_times_that_other_programs_disturbed_are_taken_again_when_nothing_does(remembered, monkeypatch):
    said = [GOOD, NOTHING, CANNOT]
    is_shared = [True]
    monkeypatch.setattr(trials_module, "_run_trial", lambda path: said.pop(0))
    monkeypatch.setattr(trials_module, "cores_are_shared", lambda: is_shared[0])
    disturbed = replace(GOOD, was_disturbed=True)
    assert remembered() == remembered() == disturbed
    is_shared[0] = False
    assert remembered() == disturbed, "the second one was interrupted"
    assert remembered() == remembered() == CANNOT


def test_the_name_of_a_model_stays_in_its_line(monkeypatch, tmp_path, caplog):
    program = tmp_path / "python"
    program.write_text("#!/bin/sh\nexec sleep 100\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    monkeypatch.setattr(trials_module, "_SILENT_S", 0.1)
    monkeypatch.setattr(trials_module, "_TRIAL_LIMIT_S", 0.1)
    _run_trial(tmp_path / "a\nb\x1b[31m\udcff.gguf")
    assert "run a?b?[31m?.gguf faster" in caplog.text


def test_two_that_start_at_once_make_one_trial(remembered, monkeypatch, caplog):
    """They would take the cores from each other."""
    monkeypatch.setattr(trials_module, "_SILENT_S", 0.1)
    made = []

    def run_trial(path):
        time.sleep(0.2)
        made.append(path)
        return GOOD

    monkeypatch.setattr(trials_module, "_run_trial", run_trial)
    threads = [threading.Thread(target=remembered) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 1
    assert "waiting for another program" in caplog.text


def test_what_llama_cpp_cannot_run_either_says_nothing_of_the_fork(tiny_gguf, monkeypatch):
    """The reference is computed on the CPU, with a GPU too."""
    asked = []

    def model(path, placement):
        asked.append(placement)
        raise UnusableInputError("mmap failed: Cannot allocate memory", "")

    monkeypatch.setattr(kernel_trial, "NativeModel", model)
    assert kernel_trial.main(tiny_gguf) is None
    assert asked == [Placement(gpu_layers=0)]
