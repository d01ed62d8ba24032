"""What this machine has free, and a run that is fitted to it before anything is loaded."""

from __future__ import annotations

from pathlib import Path

import pytest
from ggufs import write_gguf

from edgeinfer.api import memory
from edgeinfer.api.load import load
from edgeinfer.errors import ResourceError
from edgeinfer.gguf_file.header import read_header
from edgeinfer.options import RuntimeOptions


def test_a_run_is_fitted_to_what_is_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    header = read_header(write_gguf(tmp_path / "a.gguf"))
    usual = memory.plan_run(header, RuntimeOptions())
    assert (usual.settings.ctx_size, usual.notes) == (4096, ())
    half = memory.plan_run(header, RuntimeOptions(ctx_size=2048)).needs.total
    monkeypatch.setattr(memory, "available_nbytes", lambda: half)
    assert memory.plan_run(header, RuntimeOptions()).settings.ctx_size == 2048
    with pytest.raises(ResourceError, match="4096 tokens"):
        memory.plan_run(header, RuntimeOptions(ctx_size=4096))


def test_what_cannot_fit_is_refused_before_the_library_sees_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "available_nbytes", lambda: 1 << 20)
    with pytest.raises(ResourceError, match="1 MiB are available"):
        load(write_gguf(tmp_path / "a.gguf"))


def test_a_check_of_a_few_tokens_need_not_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "available_nbytes", lambda: 1 << 20)
    header = read_header(write_gguf(tmp_path / "a.gguf"))
    assert memory.plan_run(header, RuntimeOptions(ctx_size=64), must_fit=False).settings.ctx_size == 64


@pytest.mark.parametrize(
    ("draft", "draft_max", "max_sequences", "rows"),
    [("off", 8, 1, 2), ("off", 8, 32, 65), ("auto", 63, 1, 64), ("auto", 8, 1, 9), ("auto", 63, 32, 128)],
)
def test_many_requests_and_drafts_need_more_rows_of_logits(
    tmp_path: Path, draft: str, draft_max: int, max_sequences: int, rows: int
) -> None:
    header = read_header(write_gguf(tmp_path / "a.gguf"))
    one = memory.plan_run(header, RuntimeOptions(draft="off")).needs.buffers
    options = RuntimeOptions(draft=draft, draft_max=draft_max)
    more = memory.plan_run(header, options, max_sequences=max_sequences).needs.buffers
    assert more - one == (rows - 2) * 40 * 4


@pytest.mark.model
def test_the_model_runs_as_it_was_planned(smollm2_gguf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    header = read_header(smollm2_gguf)
    need = memory.plan_run(header, RuntimeOptions(ctx_size=768, prefix_cache=False)).needs.total
    monkeypatch.setattr(memory, "available_nbytes", lambda: need)
    with load(smollm2_gguf, RuntimeOptions(prefix_cache=False)) as model:
        assert model.backend.n_ctx == model.plan.settings.ctx_size == 768
        assert len(model.plan.notes) == 1
        assert model.generate("Hello", max_tokens=2).usage.completion_tokens == 2


def test_a_system_that_does_not_tell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_MEMINFO", tmp_path / "none")
    assert memory.available_nbytes() is None
    header = read_header(write_gguf(tmp_path / "a.gguf"))
    assert memory.plan_run(header, RuntimeOptions(ctx_size=2**31 - 1)).settings.ctx_size == 2**31 - 1


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


def test_every_group_that_the_process_is_in_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "meminfo").write_text("MemAvailable:  5000 kB\n")
    (tmp_path / "own").write_text("0::/user.slice/some.scope\n")
    scope = tmp_path / "groups" / "user.slice" / "some.scope"
    scope.mkdir(parents=True)
    for folder, limit in ((scope, "max"), (scope.parent, "4000")):
        (folder / "memory.max").write_text(limit)
        (folder / "memory.current").write_text("3000")
        (folder / "memory.stat").write_text("inactive_file 10\nactive_file 200\nworkingset_refault_file 9000")
    monkeypatch.setattr(memory, "_MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(memory, "_OWN_CGROUP", tmp_path / "own")
    monkeypatch.setattr(memory, "_CGROUP", tmp_path / "groups")
    assert memory.available_nbytes() == 1210


def test_the_first_version_of_control_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "meminfo").write_text("MemAvailable:  5000 kB\n")
    (tmp_path / "own").write_text("3:cpu:/x\n5:memory:/job\n")
    job = tmp_path / "memory" / "job"
    job.mkdir(parents=True)
    for folder, limit in ((job, "7000"), (job.parent, str(2**63 - 4096))):
        (folder / "memory.limit_in_bytes").write_text(limit)
        (folder / "memory.usage_in_bytes").write_text("6500")
        (folder / "memory.stat").write_text("inactive_file 1\ntotal_inactive_file 100\ntotal_active_file 20")
    monkeypatch.setattr(memory, "_MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(memory, "_OWN_CGROUP", tmp_path / "own")
    monkeypatch.setattr(memory, "_CGROUP", tmp_path)
    assert memory.available_nbytes() == 620
