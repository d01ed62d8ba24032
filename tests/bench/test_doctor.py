"""What doctor finds, on machines that are made up."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from ggufs import write_gguf
from processes import PATIENCE_S

from edgeinfer.api import memory
from edgeinfer.api.models import pull_model
from edgeinfer.bench import doctor, roofline
from edgeinfer.errors import NotFoundError
from edgeinfer.gguf_file.header import read_header
from edgeinfer.native import gpus, ik_package, library
from edgeinfer.types import Device


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("EDGEINFER_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(roofline, "memory_bandwidth_gbps", lambda threads: 12.5)
    monkeypatch.setattr(library, "features", lambda: frozenset({"NEON", "DOTPROD", "MATMUL_INT8", "REPACK"}))
    monkeypatch.setattr(memory, "available_nbytes", lambda: 4 << 30)


def test_the_machine(tmp_path: Path) -> None:
    report = doctor.examine()
    assert report.cpu.simd == "MATMUL_INT8"
    assert "Q4_0" in report.cpu.repacked_types
    assert 1 <= report.cpu.threads <= report.cpu.logical_cpus
    assert (report.memory.bandwidth_gbps, report.memory.available_bytes) == (12.5, 4 << 30)
    assert report.store.path == str(tmp_path / "home" / "models")
    assert report.store.models == 0
    assert report.model is None


def test_a_model_that_fits(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "a.gguf")
    pull_model(str(path), "mine")
    verdict = doctor.examine("mine").model
    assert verdict is not None
    assert (verdict.fits, verdict.reason, verdict.model) == (True, "", str(path))
    assert verdict.ctx_size == verdict.max_ctx_size == 4096
    per_token = roofline.weight_nbytes_per_token(read_header(path))
    assert verdict.decode_tps_limit == pytest.approx(12.5e9 / per_token, abs=0.1)


def test_the_longest_context_is_the_one_that_fits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_gguf(tmp_path / "a.gguf", extra={"llama.context_length": 1 << 20})
    need = {}
    for ctx_size in (9 * 256, 10 * 256):
        need[ctx_size] = memory.plan_run(read_header(path), memory.RuntimeOptions(ctx_size=ctx_size)).needs.total
    monkeypatch.setattr(memory, "available_nbytes", lambda: need[10 * 256] - 1)
    verdict = doctor.examine(str(path)).model
    assert verdict is not None
    assert verdict.ctx_size == verdict.max_ctx_size == 9 * 256
    assert "not 4096" in verdict.reason
    monkeypatch.setattr(memory, "available_nbytes", lambda: 1 << 30)
    verdict = doctor.examine(str(path)).model
    assert verdict is not None
    assert verdict.max_ctx_size is not None
    assert 4096 < verdict.max_ctx_size < 1 << 20
    longest, more = (
        memory.plan_run(
            read_header(path), memory.RuntimeOptions(ctx_size=verdict.max_ctx_size + i), must_fit=False
        ).needs.total
        for i in (0, 512)
    )
    assert longest <= 1 << 30 < more


def test_a_model_that_does_not_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "available_nbytes", lambda: 1 << 20)
    verdict = doctor.examine(str(write_gguf(tmp_path / "a.gguf"))).model
    assert verdict is not None
    assert not verdict.fits
    assert "1 MiB are available" in verdict.reason
    assert verdict.ctx_size is None


@pytest.mark.parametrize(
    ("version", "problem"),
    [(None, "not installed"), ("0.1.4", "ik-llama-cpp-python is version 0.1.4, not"), (ik_package.VERSION, "")],
)
def test_the_second_library_and_what_would_run_a_model(
    tiny_gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str | None, problem: str
) -> None:
    monkeypatch.setenv("EDGEINFER_HOME", str(tmp_path))
    monkeypatch.setattr(ik_package, "is_installed", lambda: version is not None)
    monkeypatch.setattr(ik_package, "version", lambda: version)
    report = doctor.examine(str(tiny_gguf))
    assert report.fork.installed == (version is not None)
    assert report.fork.problem.startswith(problem)
    assert bool(report.fork.problem) == bool(problem)
    assert report.model is not None
    assert report.model.kernels == "llama.cpp"
    assert ("measured when the model first runs" in report.model.kernels_note) == (version == ik_package.VERSION)
    assert not list(tmp_path.glob("kernels/*")), "doctor makes no trial"


def test_with_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device("CUDA0", "NVIDIA GeForce RTX 3060", 12 << 30, 12 << 30)
    monkeypatch.setattr(gpus, "gpu_devices", lambda: (device,))
    report = doctor.examine(str(write_gguf(tmp_path / "a.gguf")))
    assert report.gpus == (device,)
    assert report.model is not None
    assert report.model.gpu_layers == 3
    assert report.model.decode_tps_limit is None


def test_nothing_is_fetched() -> None:
    with pytest.raises(NotFoundError, match="not on this machine"):
        doctor.examine("org/never-heard-of")


def test_from_the_command_line(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "a.gguf")

    def run(*options: str) -> subprocess.CompletedProcess[str]:
        paths = os.pathsep.join(filter(None, map(os.path.abspath, sys.path)))
        return subprocess.run(
            [sys.executable, "-m", "edgeinfer", "doctor", *options],
            env={**os.environ, "PYTHONPATH": paths, "HF_HOME": str(tmp_path)},
            capture_output=True,
            text=True,
            check=False,
            timeout=PATIENCE_S,
        )

    done = run(str(path), "--json")
    assert (done.returncode, done.stderr) == (0, "")
    document = json.loads(done.stdout)
    assert list(document) == ["cpu", "memory", "gpus", "library", "fork", "store", "model"]
    assert document["model"]["fits"] is True
    assert document["memory"]["bandwidth_gbps"] > 0
    text = run(str(path)).stdout
    assert "fits       yes, needs" in text
    absent = run("nonsense", "--json")
    assert absent.returncode == 3
    assert json.loads(absent.stdout)["error"]["code"] == "not_found"
