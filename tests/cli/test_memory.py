"""What a shell script sees of how a run is fitted to the machine."""

import json
import os
import subprocess
import sys

import pytest

from edgeinfer.native.gpus import gpu_devices

COMMAND = [sys.executable, "-m", "edgeinfer"]


def run(*arguments):
    done = subprocess.run(
        [*COMMAND, *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=300,
    )
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("--gpu-layers", "many"),
        ("--gpu-layers", "-1"),
        ("--split-mode", "half"),
        ("--tensor-split", "1,x"),
        ("--tensor-split", "0,0"),
        ("--tensor-split", "nan"),
        ("--main-gpu", "99"),
    ],
)
def test_a_wrong_value_is_said_before_anything_is_loaded(flag, value):
    code, out, err = run("run", "nothing.gguf", "hi", flag, value, "--json")
    assert code == 2
    assert json.loads(out)["error"]["code"] == "usage"
    assert len(err.splitlines()) == 1


@pytest.mark.model
@pytest.mark.skipif(bool(gpu_devices()), reason="this machine has a GPU")
def test_without_a_gpu_that_is_said_once_and_only_when_it_was_asked_for(smollm2_gguf):
    flags = ["hi", "-n", 1, "-c", 64, "--json", "--no-prefix-cache"]
    assert run("run", smollm2_gguf, *flags)[2] == ""
    code, out, err = run("run", smollm2_gguf, *flags, "--gpu-layers", "all")
    assert code == 0
    assert json.loads(out)["usage"]["completion_tokens"] == 1
    assert err == "note: this build of the library finds no GPU: all layers run on the CPU\n"


@pytest.mark.model
def test_a_context_that_no_machine_has_is_refused_with_the_numbers(smollm2_gguf):
    code, out, err = run("run", smollm2_gguf, "hi", "-c", 2**31 - 1, "--json")
    assert code == 5
    message = json.loads(out)["error"]["message"]
    assert "2147483647 tokens" in message
    assert "MiB are available" in message
    assert len(err.splitlines()) == 1
