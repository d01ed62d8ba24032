"""Earlier answers on disk: read as they were written, or not at all."""

import os
import stat

import pytest

from edgeinfer.api.answers import AnswerFile, Answers
from edgeinfer.speculation.memory import Memory

ANSWERS = [[1, 2, 3], [9] * 20, [0]]


@pytest.fixture
def file(tmp_path):
    file = AnswerFile(tmp_path / "model" / "answers")
    file.write(ANSWERS)
    return file


def test_answers_are_read_as_they_were_written(file):
    assert file.read(10) == ANSWERS
    file.write(ANSWERS[:1])
    assert file.read(10) == ANSWERS[:1]
    assert [path.name for path in file.path.parent.iterdir()] == ["answers"]


@pytest.mark.skipif(os.name != "posix", reason="modes of POSIX")
def test_only_the_owner_may_read_them(file):
    assert stat.S_IMODE(file.path.stat().st_mode) == 0o600
    assert stat.S_IMODE(file.path.parent.stat().st_mode) == 0o700


def test_tokens_of_another_vocabulary_are_none(file):
    assert file.read(9) == []


@pytest.mark.parametrize("at", range(0, 140, 7))
def test_a_damaged_file_is_none(file, at):
    raw = bytearray(file.path.read_bytes())
    raw[at] ^= 1
    file.path.write_bytes(raw)
    assert file.read(10) == []
    file.path.write_bytes(raw[:at])
    assert file.read(10) == []


@pytest.mark.parametrize("raw", [b"", b"\0" * 100, b"x" * 10**6])
def test_what_is_no_such_file_is_none(file, raw):
    file.path.write_bytes(raw)
    assert file.read(10) == []


def test_a_folder_and_a_link_in_its_place_are_none_and_harm_nothing(file, tmp_path):
    file.path.unlink()
    file.path.mkdir()
    assert file.read(10) == []
    file.write(ANSWERS)
    assert [path.name for path in file.path.parent.iterdir()] == ["answers"]
    if hasattr(os, "O_NOFOLLOW"):
        other = AnswerFile(tmp_path / "other")
        other.write(ANSWERS)
        link = AnswerFile(tmp_path / "link")
        link.path.symlink_to(other.path)
        assert link.read(10) == []


@pytest.mark.parametrize("is_cleared", [False, True])
def test_answers_that_were_cleared_meanwhile_do_not_come_back(file, is_cleared):
    answers = Answers(Memory(file.read(10)), file, was_there=True)
    answers.memory.add([4] * 20)
    if is_cleared:
        file.path.unlink()
    answers.write()
    assert file.path.exists() is not is_cleared


def test_what_an_earlier_process_left_half_written_is_written_over(file):
    file.path.with_suffix(f".{os.getpid()}.part").write_bytes(b"x" * 10**4)
    file.write(ANSWERS[:1])
    assert file.read(10) == ANSWERS[:1]
    assert [path.name for path in file.path.parent.iterdir()] == ["answers"]
