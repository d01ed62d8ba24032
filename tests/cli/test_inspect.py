"""`edgeinfer inspect` as a user and a script see it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import gguf
import pytest
from processes import PATIENCE_S


def _run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "edgeinfer", *arguments], capture_output=True, text=True, check=False, timeout=PATIENCE_S
    )


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    writer = gguf.GGUFWriter(tmp_path / "tiny.gguf", "llama")
    writer.add_block_count(1)
    writer.add_string("test.evil", "\x1b[31mred\x9b0m\nsecond line")
    writer.add_float32("test.nan", float("nan"))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return tmp_path / "tiny.gguf"


def test_text_holds_no_control_characters_of_the_file(tiny: Path) -> None:
    done = _run("inspect", tiny)
    assert done.returncode == 0
    assert done.stderr == ""
    assert "test.evil" in done.stdout
    assert all(c.isprintable() or c == "\n" for c in done.stdout)


def test_json_is_valid_and_complete(tiny: Path) -> None:
    document = json.loads(_run("inspect", tiny, "--json").stdout, parse_constant=lambda name: pytest.fail(name))
    assert document["architecture"] == "llama"
    assert document["metadata"]["test.nan"] == "nan"
    assert "tensors" not in document


def test_a_damaged_file_is_one_line_and_exit_code_4(tmp_path: Path) -> None:
    (tmp_path / "bad.gguf").write_bytes(b"GGUF" + bytes(10))
    done = _run("inspect", tmp_path / "bad.gguf", "--json")
    assert done.returncode == 4
    assert json.loads(done.stdout)["error"]["code"] == "unusable_input"
    assert len(done.stderr.splitlines()) == 1


def test_a_missing_file_is_exit_code_3(tmp_path: Path) -> None:
    assert _run("inspect", tmp_path / "none.gguf").returncode == 3


@pytest.mark.model
def test_the_real_model_with_its_tensors(smollm2_gguf: Path) -> None:
    text = _run("inspect", smollm2_gguf, "--tensors").stdout
    assert "134,515,008" in text
    assert "blk.29.attn_output.weight" in text
    document = json.loads(_run("inspect", smollm2_gguf, "--tensors", "--json").stdout)
    assert len(document["tensors"]) == 272


def test_a_directory_with_one_model_will_do(tiny: Path) -> None:
    assert _run("inspect", tiny.parent).stdout == _run("inspect", tiny).stdout
