"""The output's name: whatever happens before the end, nothing new stands under it, and nothing else is left."""

from __future__ import annotations

import os
import random
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import llama_config, random_tensors, write_checkpoint, write_safetensors
from processes import PATIENCE_S, watched

from edgeinfer.api.convert import convert
from edgeinfer.convert import output
from edgeinfer.convert.imatrix import save_imatrix
from edgeinfer.errors import EdgeinferError, ResourceError, UnusableInputError, UsageError
from edgeinfer.gguf_file.header import read_header
from edgeinfer.gguf_file.shards import read_shards
from edgeinfer.options import ConvertOptions
from edgeinfer.types import Importance

QUICK = ConvertOptions(type="Q8_0", verify=False)
OVER = ConvertOptions(type="Q8_0", verify=False, overwrite=True)


def _listed(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_the_name_is_the_directory_s_and_the_type_s(
    checkpoint: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(out)
    assert convert(checkpoint, options=QUICK).output == "model-Q8_0.gguf"
    assert _listed(out) == ["model-Q8_0.gguf"]


@pytest.mark.parametrize("source", ["../model/.", "../out/../model", "../link"])
def test_the_name_is_the_one_that_was_given(
    checkpoint: Path, out: Path, monkeypatch: pytest.MonkeyPatch, source: str
) -> None:
    (out.parent / "link").symlink_to(checkpoint)
    monkeypatch.chdir(out)
    name = "link" if source == "../link" else "model"
    assert convert(source, options=QUICK).output == f"{name}-Q8_0.gguf"


def test_an_odd_directory_name_makes_a_plain_file_name(
    tmp_path: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_checkpoint(tmp_path / "größe: a/b *?".replace("/", "∕"))
    monkeypatch.chdir(out)
    name = convert(folder, options=QUICK).output
    assert "/" not in name
    assert "*" not in name
    assert _listed(out) == [name]


def test_the_umask_holds(checkpoint: Path, out: Path) -> None:
    before = os.umask(0o027)
    try:
        convert(checkpoint, out / "a.gguf", QUICK)
    finally:
        os.umask(before)
    assert (out / "a.gguf").stat().st_mode & 0o777 == 0o640


def test_the_longest_name_that_a_file_may_have(checkpoint: Path, out: Path) -> None:
    name = "x" * 250 + ".gguf"
    convert(checkpoint, out / name, QUICK)
    assert _listed(out) == [name]


def test_an_existing_file_stays_unless_it_may_be_replaced(checkpoint: Path, out: Path) -> None:
    target = out / "a.gguf"
    target.write_text("old")
    with pytest.raises(UsageError, match=r"a\.gguf: exists"):
        convert(checkpoint, target, QUICK)
    assert target.read_text() == "old"
    convert(checkpoint, target, OVER)
    assert read_header(target).tensors
    assert _listed(out) == ["a.gguf"]


def test_a_failed_replacement_keeps_the_old_file(checkpoint: Path, out: Path) -> None:
    target = out / "a.gguf"
    target.write_text("old")
    tensors = random_tensors(llama_config())
    tensors["model.norm.weight"][1] = np.inf
    write_safetensors(checkpoint / "model.safetensors", tensors, "F32")
    with pytest.raises(UnusableInputError):
        convert(checkpoint, target, OVER)
    assert target.read_text() == "old"
    assert _listed(out) == ["a.gguf"]


def test_a_dangling_link_counts_as_existing_and_is_replaced_itself(checkpoint: Path, out: Path, tmp_path: Path) -> None:
    (out / "a.gguf").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UsageError, match="exists"):
        convert(checkpoint, out / "a.gguf", QUICK)
    convert(checkpoint, out / "a.gguf", OVER)
    assert not (out / "a.gguf").is_symlink()
    assert not (tmp_path / "elsewhere").exists()


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("", UsageError),
        ("missing/a.gguf", ResourceError),
        ("file/a.gguf", ResourceError),
        ("fifo", UsageError),
        ("x" * 300, ResourceError),
        ("loop", EdgeinferError),
    ],
)
def test_outputs_that_cannot_be(checkpoint: Path, out: Path, name: str, kind: type[EdgeinferError]) -> None:
    (out / "file").touch()
    os.mkfifo(out / "fifo")
    (out / "loop").symlink_to("loop")
    before = _listed(out)
    with pytest.raises(kind):
        convert(checkpoint, out / name, OVER if name == "fifo" else QUICK)
    assert _listed(out) == before


def test_a_device_is_not_replaced_by_a_file(checkpoint: Path) -> None:
    with pytest.raises(UsageError, match="regular"):
        convert(checkpoint, "/dev/null", OVER)
    assert Path("/dev/null").is_char_device()


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.json", "link.gguf"])
def test_the_checkpoint_itself_is_never_overwritten(checkpoint: Path, name: str) -> None:
    (checkpoint / "link.gguf").hardlink_to(checkpoint / "model.safetensors")
    before = (checkpoint / name).read_bytes()
    with pytest.raises(UsageError, match="an input of this very command"):
        convert(checkpoint, checkpoint / name, OVER)
    assert (checkpoint / name).read_bytes() == before


@pytest.mark.parametrize("option", ["imatrix", "calibrate"])
def test_what_a_conversion_reads_besides_is_never_overwritten(checkpoint: Path, out: Path, option: str) -> None:
    matrix = out / "matrix.gguf"
    sums = np.ones(64, np.float32)
    save_imatrix(matrix, {"blk.0.attn_q.weight": Importance(sums, np.ones(1, np.float32))}, [], 1, 32)
    (out / "text.txt").write_text("a text")
    file = matrix if option == "imatrix" else out / "text.txt"
    before = file.read_bytes()
    with pytest.raises(UsageError, match="an input of this very command"):
        convert(checkpoint, file, ConvertOptions(type="Q4_0", overwrite=True, **{option: file}))
    assert file.read_bytes() == before


def test_what_was_there_before_stays_when_the_last_step_fails(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(source: Path, target: Path) -> None:
        raise PermissionError(1, "Operation not permitted")

    (out / "a").write_text("theirs")
    monkeypatch.setattr(output.os, "replace", fail)
    with pytest.raises(PermissionError), output.replaced_when_done(out / "a", overwrite=True) as partial:
        partial.write_text("ours")
    assert (out / "a").read_text() == "theirs"
    assert _listed(out) == ["a"]


def test_an_earlier_output_in_the_checkpoint_may_be_replaced(checkpoint: Path) -> None:
    convert(checkpoint, checkpoint / "a.gguf", QUICK)
    convert(checkpoint, checkpoint / "a.gguf", OVER)


def test_too_little_space_is_said_before_the_work_starts(
    checkpoint: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(output.shutil, "disk_usage", lambda path: type("Usage", (), {"free": 50_000}))
    with pytest.raises(ResourceError, match=r"needs \d+ bytes, the disk has 50000 free"):
        convert(checkpoint, out / "a.gguf", QUICK)
    assert _listed(out) == []


def test_a_file_that_appears_meanwhile_is_not_replaced(checkpoint: Path, out: Path) -> None:
    with pytest.raises(UsageError, match="exists"), output.replaced_when_done(out / "a", overwrite=False) as partial:  # noqa: PT012
        partial.write_text("ours")
        (out / "a").write_text("theirs")
    assert (out / "a").read_text() == "theirs"
    assert _listed(out) == ["a"]


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, MemoryError, OSError])
def test_whatever_ends_the_block_leaves_nothing(out: Path, error: type[BaseException]) -> None:
    with pytest.raises(error), output.replaced_when_done(out / "a", overwrite=False) as partial:  # noqa: PT012
        partial.write_text("half")
        raise error
    assert _listed(out) == []


ENDLESS = """
import itertools, sys
sys.path[:0] = sys.argv[3:]
from edgeinfer.api.convert import convert
from edgeinfer.options import ConvertOptions
for n in itertools.count(1):
    options = ConvertOptions(type="Q8_0", split_max_size=20_000, verify=False, threads=1)
    convert(sys.argv[1], f"{sys.argv[2]}/m{n}.gguf", options)
    print(n, flush=True)
"""

# The command on a machine that needs a minute for the smallest checkpoint.
SLOW = """
import time
from edgeinfer.__main__ import main
from edgeinfer.convert import stream
from edgeinfer.native.quantize import GGMLQuantizer
def quantize(*arguments, quantize=GGMLQuantizer.quantize):
    time.sleep(0.2)
    quantize(*arguments)
GGMLQuantizer.quantize, stream.SLAB_ELEMENTS = quantize, 256
main()
"""


# The command, in which the library ends the process over an assertion of its own: at the check of the file, or before.
ABORTING = """
from edgeinfer.__main__ import main
from edgeinfer.api import convert
from edgeinfer.convert import verify
from edgeinfer.native.library import llama
def abort(*arguments, **options):
    llama._lib.ggml_abort(b"ops.c", 1, b"unlucky")
verify._check_outputs = convert.imatrix = abort
main()
"""


class TestProcesses:
    """What only a process of its own can show."""

    def _start(self, source: Path, out: Path, *code: str, **options: Any) -> subprocess.Popen[str]:
        command = [sys.executable, *(code or ("-m", "edgeinfer")), "convert", str(source), "-o", str(out / "a.gguf")]
        return subprocess.Popen(
            [*command, "-t", "iq4_xs", "--threads", "1", "--no-verify"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            **options,
        )

    def _start_and_wait_for_half_a_file(self, source: Path, out: Path) -> subprocess.Popen[str]:
        process = self._start(source, out, "-c", SLOW)
        deadline = time.monotonic() + PATIENCE_S
        while not any(path.stat().st_size for path in out.glob(".edgeinfer-*/*")):
            assert process.poll() is None, process.communicate(timeout=PATIENCE_S)
            assert time.monotonic() < deadline
            time.sleep(0.01)
        return process

    @pytest.mark.parametrize("more", [(), ("--calibrate", "text.txt")], ids=["verifying", "calibrating"])
    def test_an_assertion_of_the_library_leaves_nothing(self, checkpoint: Path, out: Path, more: list[str]) -> None:
        (out.parent / "text.txt").write_text("text")
        temporary = out.parent / "temporary"
        temporary.mkdir()
        ended = subprocess.run(
            [
                sys.executable,
                "-c",
                ABORTING,
                "convert",
                str(checkpoint),
                "-t",
                "q8_0",
                "-o",
                str(out / "a.gguf"),
                *more,
            ],
            capture_output=True,
            text=True,
            check=False,
            timeout=PATIENCE_S,
            cwd=out.parent,
            env={**os.environ, "TMPDIR": str(temporary)},
        )
        assert ended.returncode == 4, ended
        assert "llama.cpp gave up: ops.c:1: unlucky" in ended.stderr
        assert _listed(out) == _listed(temporary) == []

    @pytest.mark.parametrize(
        ("number", "code", "word"),
        [(signal.SIGINT, 130, "interrupted"), (signal.SIGTERM, 143, "terminated"), (signal.SIGHUP, 129, "terminated")],
    )
    def test_a_signal_in_the_middle_leaves_nothing(
        self, checkpoint: Path, out: Path, number: signal.Signals, code: int, word: str
    ) -> None:
        process = self._start_and_wait_for_half_a_file(checkpoint, out)
        process.send_signal(number)
        stdout, stderr = process.communicate(timeout=PATIENCE_S)
        assert process.returncode == code
        assert (stdout, stderr) == ("", f"error: {word}\n")
        assert _listed(out) == []

    def test_a_kill_leaves_nothing_under_the_name_and_does_not_disturb_the_next(
        self, checkpoint: Path, out: Path
    ) -> None:
        process = self._start_and_wait_for_half_a_file(checkpoint, out)
        process.kill()
        process.communicate(timeout=PATIENCE_S)
        (left,) = _listed(out)
        assert left.startswith(".edgeinfer-")
        assert left.endswith(".partial")
        process = self._start(checkpoint, out)
        assert process.wait(PATIENCE_S) == 0, process.communicate(timeout=PATIENCE_S)
        process.communicate(timeout=PATIENCE_S)
        assert _listed(out) == [left, "a.gguf"]

    def test_a_kill_at_a_random_moment_leaves_whole_models_or_none(self, checkpoint: Path, out: Path) -> None:
        """Converts without end into shards, of which the first one gets its name last."""
        rng = random.Random(1)
        for number in range(4):
            folder = out / str(number)
            folder.mkdir()
            paths = filter(None, map(os.path.abspath, sys.path))
            command = [sys.executable, "-c", ENDLESS, str(checkpoint), str(folder), *paths]
            with watched(subprocess.Popen(command, stdout=subprocess.PIPE, text=True)) as process:
                assert process.stdout
                n_done = int(process.stdout.readline())
                time.sleep(rng.uniform(0, 0.1))
                process.kill()
                n_done = max([n_done, *(int(line) for line in process.stdout.read().split("\n")[:-1])])
            firsts = sorted(folder.glob("*-00001-of-*.gguf"))
            assert n_done <= len(firsts) <= n_done + 1
            for first in firsts:
                header, *others = read_shards(read_header(first))
                assert others
                assert all(shard.path.stat().st_size >= shard.tensor_nbytes for shard in (header, *others))

    def test_two_at_once_give_one_whole_file(self, checkpoint: Path, out: Path) -> None:
        processes = [self._start(checkpoint, out) for _ in range(3)]
        results = [(process.communicate(timeout=PATIENCE_S)[1], process.returncode) for process in processes]
        codes = sorted(code for _, code in results)
        assert codes[0] == 0
        assert set(codes) <= {0, 2}, results
        assert _listed(out) == ["a.gguf"]
        assert read_header(out / "a.gguf").tensors

    @pytest.mark.parametrize(("limit", "place"), [(1000, tempfile.gettempdir()), (50_000, "a.gguf")])
    def test_no_space_in_the_middle(self, checkpoint: Path, out: Path, limit: int, place: str) -> None:
        def cap() -> None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

        process = self._start(checkpoint, out, preexec_fn=cap)
        _, stderr = process.communicate(timeout=PATIENCE_S)
        assert process.returncode == 5
        assert f"{place}: cannot be written" in stderr
        assert len(stderr.splitlines()) == 1
        assert _listed(out) == []

    def test_a_deleted_working_directory(self, checkpoint: Path, tmp_path: Path) -> None:
        def vanish() -> None:
            os.mkdir(tmp_path / "gone")
            os.chdir(tmp_path / "gone")
            os.rmdir(tmp_path / "gone")

        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, map(os.path.abspath, sys.path)))}
        command = [sys.executable, "-m", "edgeinfer", "convert", str(checkpoint), "-t", "q8_0"]
        done = subprocess.run(
            command, preexec_fn=vanish, env=environment, capture_output=True, text=True, check=False, timeout=PATIENCE_S
        )
        assert done.returncode == 5, done
        assert len(done.stderr.splitlines()) == 1


@contextmanager
def _unprivileged() -> Iterator[None]:
    """Root may read and write everything, so it becomes somebody else for a while."""
    os.seteuid(65534 if os.getuid() == 0 else os.getuid())
    try:
        yield
    finally:
        os.seteuid(os.getuid())


@pytest.mark.parametrize(
    ("path", "mode", "kind"),
    [
        ("model/config.json", 0, UnusableInputError),
        ("model/model.safetensors", 0, UnusableInputError),
        ("model/tokenizer.json", 0, UnusableInputError),
        ("model/tokenizer_config.json", 0, UnusableInputError),
        ("model", 0, UnusableInputError),
        (".", 0, UnusableInputError),
        ("out", 0o555, ResourceError),
    ],
)
def test_permissions(checkpoint: Path, out: Path, tmp_path: Path, path: str, mode: int, kind: Any) -> None:
    convert(checkpoint, out / "first.gguf", QUICK)  # loads all modules, which somebody else may not read
    for folder in (out, tmp_path, *(p for p in tmp_path.parents if p.name.startswith(("pytest-", "popen-")))):
        folder.chmod(0o777 if folder == out else 0o755)
    (tmp_path / path).chmod(mode)
    try:
        with _unprivileged(), pytest.raises(kind) as caught:
            convert(checkpoint, out / "a.gguf", QUICK)
    finally:
        (tmp_path / path).chmod(0o777)
    assert (tmp_path / path).name in caught.value.message
    assert _listed(out) == ["first.gguf"]
