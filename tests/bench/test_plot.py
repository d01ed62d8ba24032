"""What `bench --plot` draws, and what it says before it measures anything."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from processes import PATIENCE_S

from edgeinfer.bench import plot
from edgeinfer.errors import ResourceError, UsageError

ABOUT = {"model_filename": "a.gguf", "n_threads": 2}
ROWS: dict[str, list[dict[str, Any]]] = {
    "throughput": [{"n_prompt": 512, "n_gen": 0, "n_depth": 0, "avg_ts": 300.0, "stddev_ts": 4.0}],
    "latency": [
        {"workload": "chat", "ttft_ms": 90.0, "ttft_min_ms": 80.0, "ttft_max_ms": 95.0}
        | {"itl_p50_ms": 9.0, "itl_p95_ms": 12.0},
        {"workload": "nothing said"}
        | dict.fromkeys(("ttft_ms", "ttft_min_ms", "ttft_max_ms"))
        | dict.fromkeys(("itl_p50_ms", "itl_p95_ms")),
    ],
    "speculation": [
        {"workload": "code edit", "speed_up": 3.0, "speed_up_min": 2.5, "speed_up_max": 3.2, "predicted_speed_up": 3.1}
        | {"acceptance_by_position": "[0.9, 0.8, null]"},
    ],
    "batch": [{"pl": 8, "pp": 128, "tg": 32, "speed_pp": 250.0, "speed_tg": 140.0}],
    "prefix": [{"n_prefix": 512, "state": "warm", "ttft_p50_ms": 40.0, "answer_speed": 100.0}],
    "kv": [
        {"type_k": "q8_0", "type_v": "q8_0", "n_depth": 512, "prompt_ts": 200.0, "prompt_ts_min": 190.0}
        | {"prompt_ts_max": 205.0, "gen_ts": 60.0, "gen_ts_min": 59.0, "gen_ts_max": 61.0},
    ],
}
for rows in ROWS.values():
    rows[:] = [row | ABOUT for row in rows]


def test_every_suite_has_charts() -> None:
    assert plot.CHARTS.keys() == ROWS.keys()


@pytest.mark.parametrize("suffix", plot.SUFFIXES)
def test_all_suites_go_into_one_picture(tmp_path: Path, suffix: str) -> None:
    pytest.importorskip("matplotlib", reason="the extra plot")
    path = tmp_path / f"all{suffix}"
    path.write_text("of yesterday")
    plot.check(path)
    plot.draw(ROWS, path)
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name]
    data = path.read_bytes()
    if suffix == ".png":
        assert data.startswith(b"\x89PNG")
        assert int.from_bytes(data[16:20]) > 1000  # pixels
    else:
        comments = data.decode()  # matplotlib leaves the text of a label in a comment beside its outlines
        assert ElementTree.fromstring(data).tag.endswith("svg")
        for label in ("pp512", "code edit", "8 requests of 128+32", "512 tokens in common: warm", "q8_0 @ d512"):
            assert f"<!-- {label} -->" in comments


def test_models_and_threads_are_named_where_there_are_several(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="the extra plot")
    one = ROWS["batch"][0]
    plot.draw({"batch": [one, one | {"model_filename": "b$x$.gguf", "n_threads": 4}]}, tmp_path / "x.svg")
    text = (tmp_path / "x.svg").read_text("utf-8")
    assert "8 requests of 128+32, a, 2 threads" in text
    assert "b$x$, 4 threads" in text  # a formula would have lost its dollar signs


def test_what_cannot_become_a_picture_is_said_before_the_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plot, "find_spec", lambda name: name)
    with pytest.raises(UsageError, match=r"x\.jpg: not a name of a picture"):
        plot.check(tmp_path / "x.jpg")
    with pytest.raises(ResourceError, match="not a directory that can be written to"):
        plot.check(tmp_path / "missing" / "x.svg")
    (tmp_path / "dir.svg").mkdir()
    with pytest.raises(UsageError, match="not a regular file"):
        plot.check(tmp_path / "dir.svg")
    monkeypatch.setattr(plot, "find_spec", lambda name: None)
    with pytest.raises(UsageError) as raised:
        plot.check(tmp_path / "x.svg")
    assert raised.value.hint == "pip install 'edgeinfer[plot]'"


def test_a_name_that_is_no_picture_is_exit_code_2_and_a_valid_document(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "edgeinfer", "bench", "any.gguf", "--plot", str(tmp_path / "x"), "-o", "jsonl"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=PATIENCE_S)
    assert done.returncode == 2
    assert "--plot" in done.stdout
    assert len(done.stdout.splitlines()) == len(done.stderr.splitlines()) == 1
