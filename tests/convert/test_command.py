"""`edgeinfer convert` as a user and a script see it: streams, exit codes, JSON, one line per error."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import change_json, llama_config, random_tensors, write_checkpoint, write_safetensors

Done = subprocess.CompletedProcess[str]


def _run(*arguments: str | Path, **options: Any) -> Done:
    command = [sys.executable, "-m", "edgeinfer", "convert", *map(os.fspath, arguments)]
    return subprocess.run(command, check=False, **{"capture_output": True, "text": True, "timeout": 120, **options})


def _error(done: Done, code: int, kind: str) -> str:
    """Check an error's form, told with --json, and return its line."""
    assert done.returncode == code, done
    assert len(done.stderr.splitlines()) == 1, done
    assert done.stderr.startswith("error: ")
    error = json.loads(done.stdout)["error"]
    assert set(error) == {"code", "message", "hint"}
    assert error["code"] == kind
    assert "Traceback" not in done.stderr
    return done.stderr


def test_the_result_is_the_path_alone(checkpoint: Path, tmp_path: Path) -> None:
    done = _run(checkpoint, "-o", tmp_path / "a.gguf", "-t", "q4_k_m")
    assert done.returncode == 0
    assert done.stdout == f"{tmp_path / 'a.gguf'}\n"
    assert "bits per weight" in done.stderr
    assert "verified" in done.stderr
    assert "instead of Q4_K" in done.stderr  # fallbacks are never silent
    assert "\x1b" not in done.stdout + done.stderr


def test_json_has_the_contract_s_keys(checkpoint: Path, tmp_path: Path) -> None:
    done = _run(checkpoint, "-o", tmp_path / "a.gguf", "-t", "Q8_0", "--json", "--threads", "1")
    document = json.loads(done.stdout)
    assert list(document) == [
        "output", "architecture", "type", "bytes", "bits_per_weight", "tensors", "parameters", "fallbacks", "seconds",
        "peak_rss_bytes", "verified", "tensor_types",
    ]  # fmt: skip
    assert document["output"] == str(tmp_path / "a.gguf")
    assert document["bytes"] == (tmp_path / "a.gguf").stat().st_size
    assert (document["type"], document["architecture"], document["verified"]) == ("Q8_0", "llama", True)
    assert document["tensors"] == 20
    assert document["fallbacks"] == []


def test_a_dry_run_writes_nothing_and_says_what_it_would(checkpoint: Path, tmp_path: Path) -> None:
    done = _run(checkpoint, "-o", tmp_path / "a.gguf", "-t", "q4_k_m", "--dry-run", "--json")
    plan = json.loads(done.stdout)
    assert not (tmp_path / "a.gguf").exists()
    assert plan["tensors"][0] == {
        "name": "output_norm.weight", "shape": [64], "type": "F32", "bytes": 256, "fallback_from": None,
    }  # fmt: skip
    text = _run(checkpoint, "-o", tmp_path / "a.gguf", "-t", "q4_k_m", "--dry-run").stdout
    assert "blk.1.ffn_down.weight" in text
    assert f"{plan['bytes']:,} bytes" in text
    written = json.loads(_run(checkpoint, "-o", tmp_path / "a.gguf", "-t", "q4_k_m", "--json", "--no-verify").stdout)
    assert (written["bytes"], written["verified"]) == (plan["bytes"], False)


def test_a_dry_run_does_not_mind_broken_weights_or_an_existing_output(checkpoint: Path, tmp_path: Path) -> None:
    tensors = {name: np.full_like(values, np.nan) for name, values in random_tensors(llama_config()).items()}
    write_safetensors(checkpoint / "model.safetensors", tensors, "F32")
    (tmp_path / "a.gguf").touch()
    assert _run(checkpoint, "-o", tmp_path / "a.gguf", "--dry-run").returncode == 0


@pytest.mark.parametrize(
    ("arguments", "subject"),
    [
        (["-t", "q9"], "q9"),
        (["-t", "q4km"], "did you mean Q4_K_M?"),
        (["--tensor-type", "ffn"], "REGEX=TYPE"),
        (["--tensor-type", "=q8_0"], "REGEX=TYPE"),
        (["--tensor-type", "((=q8_0"], "(("),
        (["--tensor-type", "ffn="], "''"),
        (["--threads", "0"], "threads"),
        (["--threads", "100000"], "threads"),
        (["--threads", "many"], "threads"),
        (["--no-such-flag"], "--no-such-flag"),
        (["-t", "iq1_s", "--tensor-type", "ffn=iq2_xxs"], "importance matrix"),
        (["extra"], "extra"),
    ],
    ids=str,
)
def test_wrong_usage_is_2(tmp_path: Path, arguments: list[str], subject: str) -> None:
    folder = write_checkpoint(tmp_path / "m", llama_config(hidden_size=256, intermediate_size=256))
    done = _run(folder, "-o", tmp_path / "a.gguf", "--json", *arguments)
    assert subject in _error(done, 2, "usage")


def test_an_empty_name_is_not_the_current_directory(checkpoint: Path, tmp_path: Path) -> None:
    assert "empty" in _error(_run("", "-o", tmp_path / "a.gguf", "--json", cwd=checkpoint), 2, "usage")


def test_what_is_not_there_is_3(checkpoint: Path, tmp_path: Path) -> None:
    assert "nowhere" in _error(_run(tmp_path / "nowhere", "--json"), 3, "not_found")
    assert "https://huggingface.co/a/b" in _error(_run("https://huggingface.co/a/b", "--json"), 3, "not_found")
    done = _run(checkpoint, "-o", tmp_path / "a.gguf", "-t", "q8_0", "--tensor-type", "fnn_up=q4_0", "--json")
    assert "fnn_up" in _error(done, 3, "not_found")


def test_an_unusable_checkpoint_is_4(checkpoint: Path, tmp_path: Path) -> None:
    change_json(checkpoint / "config.json", {"num_hidden_layers": 3})
    line = _error(_run(checkpoint, "-o", tmp_path / "a.gguf", "--json"), 4, "unusable_input")
    assert line.count("model.layers.2.") == 9


def test_nan_is_4_and_leaves_nothing(checkpoint: Path, tmp_path: Path) -> None:
    tensors = random_tensors(llama_config())
    tensors["model.layers.0.mlp.up_proj.weight"][11, 3] = np.nan
    write_safetensors(checkpoint / "model.safetensors", tensors, "F32")
    (tmp_path / "out").mkdir()
    line = _error(_run(checkpoint, "-o", tmp_path / "out/a.gguf", "--json"), 4, "unusable_input")
    assert "model.layers.0.mlp.up_proj.weight has NaN in row 11" in line
    assert not any((tmp_path / "out").iterdir())


def test_an_output_that_cannot_be_written_is_5(checkpoint: Path, tmp_path: Path) -> None:
    done = _run(checkpoint, "-o", tmp_path / "missing/a.gguf", "--json")
    assert "missing" in _error(done, 5, "resources")


def test_a_failed_check_is_7_and_leaves_nothing(tmp_path: Path) -> None:
    tensors = random_tensors(llama_config())
    tensors["model.norm.weight"][:] = 3e38  # finite, but what it makes is not
    folder = write_checkpoint(tmp_path / "overflowing", llama_config(), tensors)
    done = _run(folder, "-t", "f32", "-o", tmp_path / "a.gguf", "--json")
    assert "not finite" in _error(done, 7, "check_failed")
    assert not (tmp_path / "a.gguf").exists()


def test_names_of_any_script_and_of_no_script_at_all(tmp_path: Path) -> None:
    for name in ("größe 模型", os.fsdecode(b"no \xff text")):
        folder = write_checkpoint(tmp_path / name)
        out = tmp_path / f"{name}.gguf"
        for locale in ({"LC_ALL": "C.UTF-8"}, {"PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"}):
            done = _run(folder, "-o", out, "--json", "--overwrite", text=False, env={**os.environ, **locale})
            assert done.returncode == 0, done
            assert json.loads(done.stdout)["output"] == str(out)
        done = _run(folder, "-o", out, "--overwrite", text=False, env={**os.environ, "LC_ALL": "C.UTF-8"})
        assert done.stdout == os.fsencode(out) + b"\n"


def test_names_in_files_cannot_steer_the_terminal(checkpoint: Path) -> None:
    tensors = random_tensors(llama_config())
    tensors["evil\x1b[31m\r\nname"] = np.zeros(1, np.float32)
    write_safetensors(checkpoint / "model.safetensors", tensors)
    line = _error(_run(checkpoint, "--json"), 4, "unusable_input")
    assert re.search(r"evil\S*\s*name", line)
    assert all(c.isprintable() for c in line.rstrip("\n"))


class TestStreams:
    """A caller may have closed its streams, or filled their disk."""

    def test_all_closed(self, checkpoint: Path, tmp_path: Path) -> None:
        def close() -> None:
            for descriptor in (0, 1, 2):
                os.close(descriptor)

        out = tmp_path / "a.gguf"
        done = _run(checkpoint, "-o", out, capture_output=False, preexec_fn=close)
        assert done.returncode == 0
        assert out.read_bytes().startswith(b"GGUF")
        assert _run(checkpoint, "-o", out, capture_output=False, preexec_fn=close).returncode == 2

    def test_stdout_on_a_full_disk(self, checkpoint: Path, tmp_path: Path) -> None:
        with open("/dev/full", "w") as full:
            for arguments in (["--json"], ["--json", "-t", "q9"]):
                done = _run(
                    checkpoint, "-o", tmp_path / "a.gguf", *arguments,
                    capture_output=False, stdout=full, stderr=subprocess.PIPE,
                )  # fmt: skip
                assert done.returncode == (5 if len(arguments) == 1 else 2)
                errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
                assert len(errors) == 1, done
                assert "Exception" not in done.stderr

    def test_stderr_on_a_full_disk(self, checkpoint: Path) -> None:
        with open("/dev/full", "w") as full:
            done = _run(checkpoint, "-t", "q9", "--json", capture_output=False, stdout=subprocess.PIPE, stderr=full)
        assert done.returncode == 2
        assert json.loads(done.stdout)["error"]["code"] == "usage"

    def test_a_reader_that_has_gone(self, checkpoint: Path) -> None:
        reader, writer = os.pipe()
        os.close(reader)
        done = _run(
            checkpoint, "--dry-run", capture_output=False, stdout=writer, stderr=subprocess.PIPE,
            preexec_fn=lambda: signal.signal(signal.SIGPIPE, signal.SIG_DFL),
        )  # fmt: skip
        os.close(writer)
        assert done.returncode == 141
        assert done.stderr == ""


@pytest.mark.model
def test_the_real_model(smollm2_checkpoint: Path, tmp_path: Path) -> None:
    document = json.loads(_run(smollm2_checkpoint, "-o", tmp_path / "a.gguf", "--json").stdout)
    assert document["verified"]
    assert document["type"] == "Q4_K_M"
    assert document["parameters"] == 134_515_008
    assert len(document["fallbacks"]) > 100  # rows of 576 do not divide into blocks of 256
    assert document["peak_rss_bytes"] < 600e6
