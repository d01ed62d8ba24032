"""Shards: laid out as llama-gguf-split does it, all or none of them under their names, and everybody can read them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest
from checkpoints import llama_config, random_tensors, write_safetensors
from processes import PATIENCE_S

from edgeinfer.api.convert import convert
from edgeinfer.api.inspect import inspect
from edgeinfer.api.load import load
from edgeinfer.convert import output
from edgeinfer.convert.resolve import TensorPlan
from edgeinfer.convert.split import share_out
from edgeinfer.errors import ResourceError, UnusableInputError, UsageError
from edgeinfer.ggml_types import GGMLType
from edgeinfer.gguf_file.header import read_header
from edgeinfer.options import ConvertOptions, RuntimeOptions

SPLIT = ConvertOptions(type="F32", split_max_size=100_000)


def _listed(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_shards_together_are_the_whole(checkpoint: Path, out: Path) -> None:
    whole = read_header(Path(convert(checkpoint, out / "whole.gguf", ConvertOptions(type="F32")).output))
    converted = convert(checkpoint, out / "m.gguf", SPLIT)
    assert converted.verified
    names = [name for name in _listed(out) if name.startswith("m-")]
    assert len(names) >= 3
    assert names == [f"m-{i:05}-of-{len(names):05}.gguf" for i in range(1, len(names) + 1)]
    assert converted.output == str(out / names[0])
    assert converted.bytes == sum((out / name).stat().st_size for name in names)
    shards = [read_header(out / name) for name in names]
    placed = [(h, t) for h in shards for t in h.tensors]
    assert [t.name for _, t in placed] == [t.name for t in whole.tensors]
    for (header, ours), theirs in zip(placed, whole.tensors, strict=True):
        a, b = header.path.read_bytes(), whole.path.read_bytes()
        assert a[ours.offset :][: ours.nbytes] == b[theirs.offset :][: theirs.nbytes]


def test_the_headers_are_llama_gguf_split_s(checkpoint: Path, out: Path) -> None:
    """tools/gguf-split: all metadata in the first file, then no, tensors.count, count, which it sets last."""
    convert(checkpoint, out / "m.gguf", SPLIT)
    convert(checkpoint, out / "whole.gguf", ConvertOptions(type="F32"))
    whole = gguf.GGUFReader(out / "whole.gguf")
    files = [gguf.GGUFReader(out / name) for name in _listed(out) if name.startswith("m-")]
    ours = ["split.no", "split.tensors.count", "split.count"]
    assert list(files[0].fields) == [*whole.fields, *ours]
    for number, file in enumerate(files):
        own = [key for key in file.fields if not key.startswith("GGUF.")]
        assert own[-3:] == ours
        assert number == 0 or own == ours
        values = {key: file.fields[key] for key in ours}
        assert [values[key].types[0].name for key in ours] == ["UINT16", "INT32", "UINT16"]
        assert [int(values[key].parts[-1][0]) for key in ours] == [number, len(whole.tensors), len(files)]


def _plan(*nbytes: int) -> list[TensorPlan]:
    return [TensorPlan(f"t{i}", (n // 4,), GGMLType.F32, ()) for i, n in enumerate(nbytes)]


@pytest.mark.parametrize(
    ("nbytes", "limit", "expected"),
    [
        ((64, 64, 64), 128, [2, 1]),
        ((64, 64, 64), 127, [1, 1, 1]),
        ((68, 64), 160, [2]),  # with its padding: 96
        ((68, 64), 159, [1, 1]),
        ((640, 64, 64), 128, [1, 2]),  # one that is too large is alone
        ((64, 640, 64), 128, [1, 1, 1]),
        ((64,), 1, [1]),
    ],
)
def test_who_goes_where(nbytes: tuple[int, ...], limit: int, expected: list[int]) -> None:
    assert [len(file.tensors) for file in share_out({}, _plan(*nbytes), limit)] == expected


def test_more_shards_than_can_be_numbered() -> None:
    with pytest.raises(UsageError, match="65536 files"):
        share_out({}, _plan(*[64] * 65536), 1)


def test_a_model_that_fits_is_one_shard(checkpoint: Path, out: Path) -> None:
    convert(checkpoint, out / "m.gguf", ConvertOptions(type="Q8_0", split_max_size=10**9))
    assert _listed(out) == ["m-00001-of-00001.gguf"]
    with load(out / "m-00001-of-00001.gguf", RuntimeOptions(ctx_size=64)) as model:
        assert model.native.n_parameters


def test_the_shards_run_and_are_described(checkpoint: Path, out: Path) -> None:
    first = Path(convert(checkpoint, out / "m.gguf", SPLIT).output)
    with load(first, RuntimeOptions(ctx_size=64)) as model:
        answer = model.generate("Hello", max_tokens=4)
    assert answer.usage.completion_tokens
    assert inspect(first).shards == len(_listed(out))


def test_one_existing_shard_stops_it_all(checkpoint: Path, out: Path) -> None:
    convert(checkpoint, out / "m.gguf", SPLIT)
    second = next(out.glob("m-00002-*"))
    for path in out.iterdir():
        if path != second:
            path.unlink()
    with pytest.raises(UsageError, match=r"m-00002.*exists"):
        convert(checkpoint, out / "m.gguf", SPLIT)
    assert _listed(out) == [second.name]
    second.write_text("old")
    convert(checkpoint, out / "m.gguf", ConvertOptions(type="F32", split_max_size=100_000, overwrite=True))
    assert read_header(second).tensors


def test_a_failure_in_the_last_shard_leaves_nothing(checkpoint: Path, out: Path) -> None:
    tensors = random_tensors(llama_config())
    tensors["model.layers.1.mlp.up_proj.weight"][-1, -1] = np.inf
    write_safetensors(checkpoint / "model.safetensors", tensors, "F32")
    with pytest.raises(UnusableInputError):
        convert(checkpoint, out / "m.gguf", SPLIT)
    assert _listed(out) == []


def test_an_interruption_among_the_renames_leaves_nothing(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    outputs = [out / f"m-0000{i}-of-00003.gguf" for i in (1, 2, 3)]
    renamed: list[Path] = []

    def replace(source: Path, target: Path) -> None:
        if len(renamed) == 2:
            raise KeyboardInterrupt
        renamed.append(target)
        Path(source).rename(target)

    monkeypatch.setattr(output.os, "replace", replace)
    with (  # noqa: PT012
        pytest.raises(KeyboardInterrupt),
        output.replaced_when_done(*outputs, overwrite=False) as first,
    ):
        for path in outputs:
            first.with_name(path.name).write_text("x")
    assert renamed == [outputs[2], outputs[1]]  # the first, which stands for all, comes last
    assert _listed(out) == []


def test_too_little_space_counts_all_shards(checkpoint: Path, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    free = convert(checkpoint, out / "m.gguf", SPLIT).bytes - 1
    monkeypatch.setattr(output.shutil, "disk_usage", lambda path: type("Usage", (), {"free": free}))
    with pytest.raises(ResourceError, match=rf"needs {free + 1} bytes"):
        convert(checkpoint, out / "n.gguf", SPLIT)


def _run(*arguments: str) -> subprocess.CompletedProcess[str]:
    paths = os.pathsep.join(filter(None, map(os.path.abspath, sys.path)))
    return subprocess.run(
        [sys.executable, "-m", "edgeinfer", "convert", *arguments],
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE_S,
    )


def test_the_command_names_the_first_shard(checkpoint: Path, out: Path) -> None:
    done = _run(str(checkpoint), "-o", str(out / "m.gguf"), "-t", "q8_0", "--split-max-size", "1m", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["output"] == str(out / "m-00001-of-00001.gguf")


@pytest.mark.parametrize("size", ["2", "0G", "-1G", "1.5G", "G", "2GB", "1K", ""])
def test_sizes_that_are_none(checkpoint: Path, size: str) -> None:
    done = _run(str(checkpoint), "--split-max-size", size)
    assert done.returncode == 2
    assert "500M or 2G" in done.stderr
    assert len(done.stderr.splitlines()) == 1
