"""The files that conversations outlive their process in."""

import json
import os
import random
import stat
import subprocess
import sys
import time
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st
from processes import watched

from edgeinfer.api.sessions import SavedSession, SessionFile, existing_session
from edgeinfer.errors import NotFoundError, ResourceError, UnusableInputError, UsageError
from edgeinfer.runtime.session import SessionState

SAVED = SavedSession(
    "m.gguf",
    {"temperature": 0.5},
    SessionState(
        "be brief",
        ({"role": "user", "content": "hä?"}, {"role": "assistant", "content": "ja", "reasoning": "hm"}),
        0,
        "text",
        (1, 2),
    ),
)


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("EDGEINFER_HOME", str(tmp_path))
    return tmp_path


def test_what_is_written_is_read(home):
    with SessionFile("ideas") as file:
        assert file.saved is None
        file.write(SAVED)
    with SessionFile("ideas") as file:
        assert file.saved == SAVED
    assert sorted(p.name for p in (home / "sessions").iterdir()) == ["ideas.json", "ideas.lock"]
    assert stat.S_IMODE(file.path.stat().st_mode) == 0o600
    assert stat.S_IMODE(file.path.parent.stat().st_mode) == 0o700


@pytest.mark.parametrize("name", ["", ".hidden", "../x", "a/b", "a b", "x" * 201, "a\n", "-x"])
def test_a_name_that_cannot_be_is_a_usage_error(name):
    with pytest.raises(UsageError):
        SessionFile(name)


def test_a_session_is_in_one_place_at_a_time():
    with SessionFile("ideas"), pytest.raises(ResourceError, match="in use"):
        SessionFile("ideas")
    SessionFile("ideas").close()


def test_a_session_that_is_not_there_names_those_that_are():
    with SessionFile("ideas") as file:
        file.write(SAVED)
    with pytest.raises(NotFoundError) as raised:
        existing_session("other")
    assert "ideas" in raised.value.hint


@pytest.mark.skipif(os.geteuid() == 0 and not os.path.exists("/dev/full"), reason="root may write anywhere")
def test_a_folder_that_is_in_the_way_is_one_error(home):
    (home / "sessions").write_text("no folder")
    with pytest.raises(ResourceError):
        SessionFile("ideas")


def document(**changes):
    with SessionFile("made") as file:
        file.write(SAVED)
    return {**json.loads(file.path.read_text()), **changes}


@pytest.mark.parametrize(
    "changes",
    [
        {"format": 99},
        {"messages": "no"},
        {"messages": [{"role": "root", "content": ""}]},
        {"messages": [{"role": "user"}]},
        {"messages": [{"role": "user", "content": "\ud800"}]},
        {"dropped_messages": 3},
        {"dropped_messages": -1},
        {"dropped_messages": True},
        {"tokens": ["1"]},
        {"tokens": [-1]},
        {"tokens": [2**31]},
        {"system": None},
        {"settings": []},
    ],
)
def test_a_file_with_something_wrong_in_it_is_refused(home, changes):
    (home / "sessions").mkdir(exist_ok=True)
    text = json.dumps(document(**changes))
    (home / "sessions" / "bad.json").write_text(text)
    with pytest.raises(UnusableInputError, match="not a session"):
        SessionFile("bad")


@given(st.binary(max_size=60), st.integers(0, 2000))
def test_a_damaged_file_is_refused_or_read(data, at):
    with SessionFile("made") as file:
        file.write(SAVED)
    whole = file.path.read_bytes()
    file.path.write_bytes(whole[: at % len(whole)] + data + whole[at % len(whole) + len(data) :])
    try:
        with suppress(UnusableInputError):
            SessionFile("made").close()
    finally:
        file.path.unlink()


WRITER = """
import itertools, sys
sys.path[:0] = sys.argv[1:]
from edgeinfer.api.sessions import SavedSession, SessionFile
from edgeinfer.runtime.session import SessionState
with SessionFile("ideas") as file:
    print("ready", flush=True)
    first = len(file.saved.state.messages) if file.saved else 0
    for n in itertools.count(first + 1):
        said = tuple({"role": "user", "content": str(i) * 100} for i in range(n))
        file.write(SavedSession("m.gguf", {}, SessionState("", said, 0, "", ())))
        print(n, flush=True)
"""


def test_kill_9_at_a_random_moment_of_saving_keeps_a_whole_conversation():
    rng = random.Random(1)
    n_before = 0
    for _ in range(4):
        command = [sys.executable, "-c", WRITER, *filter(None, map(os.path.abspath, sys.path))]
        with watched(subprocess.Popen(command, stdout=subprocess.PIPE, text=True)) as process:
            assert process.stdout.readline() == "ready\n", "the killed one's lock is gone with it"
            for _ in range(rng.randrange(1, 12)):
                written = process.stdout.readline()
            time.sleep(rng.uniform(0, 0.01))
            process.kill()
            rest = process.stdout.read().splitlines(keepends=True)
        told = [int(line) for line in (written, *rest) if line.endswith("\n")]
        with SessionFile("ideas") as file:
            messages = file.saved.state.messages
        assert messages == tuple({"role": "user", "content": str(i) * 100} for i in range(len(messages)))
        assert told[-1] <= len(messages) <= told[-1] + 1, "what was told to be saved is there"
        assert len(messages) > n_before
        n_before = len(messages)
