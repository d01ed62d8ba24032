"""A context that does not fit is refused before the system has to end something."""

from __future__ import annotations

from pathlib import Path

import pytest
from ggufs import write_gguf

from edgeinfer.api import memory
from edgeinfer.errors import ResourceError
from edgeinfer.gguf_file.header import read_header
from edgeinfer.options import RuntimeOptions

PER_TOKEN = 2 * 2 * (16 + 16) * 2 + memory.CELL_NBYTES  # layers, KV heads, key and value lengths, bytes of F16


def test_the_cache_decides_and_its_types_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    header = read_header(write_gguf(tmp_path / "a.gguf"))
    monkeypatch.setattr(memory, "available_nbytes", lambda: 1000 * PER_TOKEN / memory.MOST_OF_IT)
    memory.check_context(header, RuntimeOptions(ctx_size=1000))
    with pytest.raises(ResourceError, match=f"1001 tokens needs {1001 * PER_TOKEN} bytes"):
        memory.check_context(header, RuntimeOptions(ctx_size=1001))
    memory.check_context(header, RuntimeOptions(ctx_size=1300, cache_type_k="q8_0", cache_type_v="q8_0"))
    with pytest.raises(ResourceError):
        memory.check_context(header, RuntimeOptions())


def test_nothing_is_refused_where_the_system_does_not_tell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_MEMINFO", tmp_path / "none")
    assert memory.available_nbytes() is None
    memory.check_context(read_header(write_gguf(tmp_path / "a.gguf")), RuntimeOptions(ctx_size=2**31 - 1))


def test_a_limit_of_the_control_group_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "meminfo").write_text("MemTotal: 9 kB\nMemAvailable:  5000 kB\n")
    for name, text in {
        "memory.max": "3000",
        "memory.current": "2500",
        "memory.stat": "anon 7\ninactive_file 100",
    }.items():
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(memory, "_MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(memory, "_CGROUP", tmp_path)
    assert memory.available_nbytes() == 600
    (tmp_path / "memory.max").write_text("max")
    assert memory.available_nbytes() == 5000 * 1024
