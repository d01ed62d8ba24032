"""What a terminal of 20 columns shows: it breaks lines where it must, nothing is lost, and no line piles up."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import command_pages
import pytest
from checkpoints import write_checkpoint
from processes import PATIENCE_S
from terminals import Terminal

from edgeinfer.bench.batching import BATCH
from edgeinfer.cli import table

COLUMNS = 20
COMMAND = [sys.executable, "-m", "edgeinfer"]


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("EDGEINFER_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def _shown(*command: object) -> list[str]:
    """The lines on the screen, what has scrolled away too."""
    with Terminal([*map(str, command)], columns=COLUMNS) as terminal:
        assert terminal.end() == 0, terminal.text
        return terminal.lines


def _characters(text: str) -> str:
    return "".join(text.split())


@pytest.mark.parametrize(
    "command",
    [
        "inspect {model} --tensors",
        "models list",
        "cache info",
        "convert {checkpoint} -t q8_0 --dry-run",
        "tokenize {model} hello --pieces",
    ],
)
def test_every_character_of_a_table_is_there(
    command: str, tiny_gguf: Path, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = write_checkpoint(tmp_path / "checkpoint")
    pulled = subprocess.run(
        [*COMMAND, "models", "pull", str(tiny_gguf), "--as", "mine"], capture_output=True, timeout=PATIENCE_S
    )
    assert pulled.returncode == 0
    monkeypatch.setenv("EDGEINFER_PREFIX_CACHE_SIZE", "1GiB")  # by default a share of what the disk has free just now
    words = [word.format(model=tiny_gguf, checkpoint=checkpoint) for word in command.split()]
    whole = subprocess.run([*COMMAND, *words], capture_output=True, text=True, timeout=PATIENCE_S, check=True).stdout
    shown = _shown(*COMMAND, *words)
    assert max(map(len, shown)) <= COLUMNS
    assert _characters(whole) in _characters("".join(shown))


def test_what_doctor_says_is_never_cut(home: Path) -> None:
    shown = "".join(_shown(*COMMAND, "doctor"))
    assert "…" not in shown
    assert _characters(str(home / "models")) in _characters(shown)
    assert "logicalCPUs" in _characters(shown)


def test_a_long_line_goes_on_below_its_beginning_where_there_is_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    words = "AVX AVX2 AVX512 AVX512_BF16 F16C FMA /a/path/that/is/longer/than/the/whole/terminal/is/wide"
    monkeypatch.setenv("COLUMNS", "50")
    first, *others = table.hanging(words, 11).splitlines()
    assert len(first) <= 50 - 11
    assert all(line[:11].isspace() and not line[11].isspace() for line in others)
    assert " ".join(table.hanging(words, 11).split()) == words
    monkeypatch.setenv("COLUMNS", str(COLUMNS))
    assert table.hanging(words, 11) == table.one_line(words, 11) == words


def test_measured_tables_and_their_progress(tiny_gguf: Path, home: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox " * 400)
    lines = _shown(*COMMAND, "eval", tiny_gguf, "-f", text, "-c", 64)
    assert any(line.startswith("perplexity") for line in lines)
    assert not [line for line in lines if "%" in line], "a bar was left"
    lines = _shown(*COMMAND, "bench", tiny_gguf, "--suite", "batch", "-p", 4, "-n", 2, "--parallel", 1)
    assert "".join(lines).count("|") == 3 * (1 + len(BATCH.columns))


def test_a_batch_counts_in_one_line_and_ends_with_the_sum(tiny_gguf: Path, home: Path, tmp_path: Path) -> None:
    rows = tmp_path / "in.jsonl"
    rows.write_text("".join(json.dumps({"prompt": "hello", "max_tokens": 4}) + "\n" for _ in range(8)))
    lines = [line for line in _shown(*COMMAND, "batch", tiny_gguf, rows, "-o", tmp_path / "out.jsonl") if line]
    assert lines[0].startswith("8 rows")
    assert len(lines) <= 3, "the sum alone"


BAR = """
import time
from edgeinfer.cli import progress
from edgeinfer.registry.transfer import progress_bar
with progress.weights() as advance:
    for _ in range(20):
        advance(10**8, 2 * 10**9)
        time.sleep(0.05)
with progress.steps() as advance:
    for done in range(20):
        advance(done, 1000)
        time.sleep(0.05)
with progress_bar()(total=10**9, unit="B", unit_scale=True, desc="a-name-that-is-much-longer.gguf", delay=0) as bar:
    for _ in range(10):
        bar.update(10**8)
        time.sleep(0.05)
"""


def test_bars_stay_in_their_line_begin_with_how_far_it_is_and_go_away() -> None:
    with Terminal([sys.executable, "-c", BAR], columns=COLUMNS) as terminal:
        assert terminal.end() == 0, terminal.text
        assert terminal.text.strip() == ""
        frames = [frame for frame in terminal.output.decode().split("\r") if frame.strip()]
    assert len(frames) > 6
    for frame in frames:
        assert len(frame.rstrip("\n")) <= COLUMNS
        assert "%" in frame[:6]


def test_a_chat_and_what_its_commands_tell(home: Path, tmp_path: Path) -> None:
    script = tmp_path / "script.json"
    script.write_text(json.dumps({"answers": ["A short answer to it."]}))
    program = Path(__file__).with_name("chat_program.py")
    with Terminal([sys.executable, str(program), str(script)], columns=COLUMNS) as terminal:
        terminal.say("hello")
        terminal.expect("A short answer to it")
        terminal.say("/tokens")
        terminal.expect("context")
        terminal.expect_prompt()
        terminal.wait(lambda: terminal.lines[-1].endswith("left"), "the status line")
        assert len(terminal.lines[-1]) <= COLUMNS
        terminal.say("/show settings")
        terminal.say("/help")
        terminal.expect("/regen")
        terminal.say("/bye")
        assert terminal.end() == 0


def test_every_commands_help() -> None:
    for (*command,), whole in command_pages.helps(100):
        narrow = command_pages.help_of(*command, columns=COLUMNS)
        flags = {word.strip(",") for word in whole.split() if word.startswith("--")}
        assert flags <= {word.strip(",") for word in narrow.split()}, command
