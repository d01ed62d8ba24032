"""Lines in, lines out, and going on where a run was cut off."""

import io
import json
import os
import threading
from pathlib import Path

import pytest
from processes import PATIENCE_S

from edgeinfer.api import jsonl
from edgeinfer.api.jsonl import Output, encode, read_lines
from edgeinfer.errors import ResourceError, UnusableInputError, UsageError


def row(row_id):
    return {"id": row_id, "text": "", "finish_reason": "stop", "usage": None, "error": None}


def test_a_line_that_is_too_long_is_cut_and_the_next_one_is_whole():
    lines = list(read_lines(io.BytesIO(b"short\n" + b"x" * 100 + b"\nnext\nlast"), 10))
    assert lines == [b"short\n", b"x" * 11, b"next\n", b"last"]


def test_what_utf8_cannot_hold_is_escaped():
    assert json.loads(encode({"id": "\ud800", "text": "é"})) == {"id": "\ud800", "text": "é"}
    assert encode("é") == '"é"\n'.encode()


def test_a_file_that_exists_is_only_continued(tmp_path):
    path = tmp_path / "out.jsonl"
    with Output(path, resume=True) as output:
        output.write(row("a"))
        output.write(row(7))
    with pytest.raises(UsageError, match="exists already"):
        Output(path, resume=False)
    with path.open("ab") as file:
        file.write(b'{"id": "cut o')
    with Output(path, resume=True) as output:
        assert output.n_rows == 2
        assert [output.take(row_id) for row_id in ("a", 7, "7", "cut o", None)] == [True, True, False, False, False]
        output.write(row("b"))
    assert [json.loads(line)["id"] for line in path.read_bytes().splitlines()] == ["a", 7, "b"]


def test_an_id_counts_as_often_as_it_is_there(tmp_path):
    path = tmp_path / "out.jsonl"
    with Output(path, resume=True) as output:
        for row_id in ("a", 1, "a"):
            output.write(row(row_id))
    with Output(path, resume=True) as output:
        assert [output.take(row_id) for row_id in ("a", "a", "a", 1, 1)] == [True, True, False, True, False]


@pytest.mark.parametrize("cut", [0, 1, 7, 20, 60])
def test_only_the_beginning_of_a_row_is_removed(tmp_path, cut):
    path = tmp_path / "out.jsonl"
    whole = encode(row("a"))
    path.write_bytes(whole + whole[:cut])
    with Output(path, resume=True) as output:
        assert output.n_rows == 1
    assert path.read_bytes() == whole


FOREIGN = [
    b"not json\n",
    b"[1]\n",
    b'{"text": "no id"}\n',
    b"7\n",
    b"\n",
    b'{"precious": "no line end"}',
    b"precious",
    b'{"id": 7, "prompt": "an input"}\n',
    b'{"id": ' + b"[" * 990 + b"]" * 990 + b"}\n",
]


@pytest.mark.parametrize("content", FOREIGN)
@pytest.mark.parametrize("before", [b"", encode(row(1))])
def test_a_file_that_is_no_output_is_left_alone(tmp_path, content, before):
    path = tmp_path / "out.jsonl"
    path.write_bytes(before + content)
    with pytest.raises(UnusableInputError, match=f"line {2 if before else 1}"):
        Output(path, resume=True)
    assert path.read_bytes() == before + content


def test_two_do_not_write_at_once(tmp_path, monkeypatch):
    monkeypatch.setattr(jsonl, "_LOCK_WAIT_S", 0.05)
    path = tmp_path / "out.jsonl"
    with Output(path, resume=False) as output:
        output.write(row(1))
        with pytest.raises(ResourceError, match="another process"):
            Output(path, resume=True)
    with Output(path, resume=True) as output:
        assert output.n_rows == 1


@pytest.mark.parametrize("resume", [True, False])
def test_what_is_no_file_is_just_written_to(tmp_path, resume):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    got = []
    reader = threading.Thread(target=lambda: got.append(pipe.read_bytes()))
    reader.start()
    with Output(pipe, resume=resume) as output:
        assert not output.take(1)
        output.write(row(1))
    reader.join(PATIENCE_S)
    assert got == [encode(row(1))]
    with pytest.raises(ResourceError, match="No space"), Output(Path("/dev/full"), resume=resume) as output:
        output.write(row(1))
    with pytest.raises(ResourceError, match="directory"):
        Output(tmp_path, resume=resume)


def test_what_cannot_be_read_any_more_is_said():
    with open("/proc/self/mem", "rb") as file, pytest.raises(UnusableInputError, match="/proc/self/mem"):
        list(read_lines(file, 10))


def test_a_place_that_cannot_be_written_is_a_resource_error(tmp_path):
    with pytest.raises(ResourceError, match="cannot be written"):
        Output(tmp_path / "missing" / "out.jsonl", resume=False)
