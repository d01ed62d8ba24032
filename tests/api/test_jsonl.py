"""Lines in, lines out, and going on where a run was cut off."""

import io
import json

import pytest

from edgeinfer.api.jsonl import Output, encode, read_lines
from edgeinfer.errors import ResourceError, UnusableInputError, UsageError


def test_a_line_that_is_too_long_is_cut_and_the_next_one_is_whole():
    lines = list(read_lines(io.BytesIO(b"short\n" + b"x" * 100 + b"\nnext\nlast"), 10))
    assert lines == [b"short\n", b"x" * 11, b"next\n", b"last"]


def test_what_utf8_cannot_hold_is_escaped():
    assert json.loads(encode({"id": "\ud800", "text": "é"})) == {"id": "\ud800", "text": "é"}
    assert encode("é") == '"é"\n'.encode()


def test_a_file_that_exists_is_only_continued(tmp_path):
    path = tmp_path / "out.jsonl"
    with Output(path, resume=True) as output:
        output.write({"id": "a"})
        output.write({"id": 7})
    with pytest.raises(UsageError, match="exists already"):
        Output(path, resume=False)
    with path.open("ab") as file:
        file.write(b'{"id": "cut o')
    with Output(path, resume=True) as output:
        assert output.n_rows == 2
        assert [output.has(row_id) for row_id in ("a", 7, "7", "cut o", None)] == [True, True, False, False, False]
        output.write({"id": "b"})
    assert [json.loads(line)["id"] for line in path.read_bytes().splitlines()] == ["a", 7, "b"]


@pytest.mark.parametrize("content", [b"not json\n", b"[1]\n", b'{"text": "no id"}\n', b"7\n"])
def test_a_file_that_is_no_output_is_left_alone(tmp_path, content):
    path = tmp_path / "out.jsonl"
    path.write_bytes(content)
    with pytest.raises(UnusableInputError, match="line 1"):
        Output(path, resume=True)
    assert path.read_bytes() == content


def test_a_place_that_cannot_be_written_is_a_resource_error(tmp_path):
    with pytest.raises(ResourceError, match="cannot be written"):
        Output(tmp_path / "missing" / "out.jsonl", resume=False)
