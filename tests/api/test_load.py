"""What `load` makes of a file before and after the C library sees it."""

import dataclasses

import pytest

from edgeinfer.api.files import resolve
from edgeinfer.api.model import _recommended_sampling
from edgeinfer.errors import NotFoundError, UsageError
from edgeinfer.options import SamplingParams


class Metadata(dict):
    def number(self, key, default=None):
        return self.get(key, default)


@dataclasses.dataclass
class FakeHeader:
    metadata: Metadata
    path: object = None


def test_the_files_recommendations_are_the_defaults_and_nonsense_is_ignored():
    header = FakeHeader(
        Metadata(
            {
                "general.sampling.temp": 0.6,
                "general.sampling.top_k": 20.0,
                "general.sampling.top_p": 7.0,
                "general.sampling.penalty_last_n": float("nan"),
                "general.sampling.seed": 5,
            }
        )
    )
    assert _recommended_sampling(header) == SamplingParams(temperature=0.6, top_k=20)


def test_a_directory_stands_for_the_one_model_in_it(tmp_path):
    for number in (1, 2):
        (tmp_path / f"m-0000{number}-of-00002.gguf").touch()
    assert resolve(tmp_path).name == "m-00001-of-00002.gguf"


@pytest.mark.parametrize(
    ("files", "message", "hint"),
    [
        ((), "no .gguf file in this directory", "directory with one"),
        (("config.json", "model.safetensors"), "a checkpoint, not a .gguf file", "`edgeinfer convert` makes one"),
        (("b.gguf", "a.gguf"), "more than one .gguf file in this directory (a.gguf, b.gguf)", "name the file"),
    ],
)
def test_a_directory_without_the_one_model_says_what_is_in_it(tmp_path, files, message, hint):
    for name in files:
        (tmp_path / name).touch()
    with pytest.raises(NotFoundError) as caught:
        resolve(tmp_path)
    assert message in caught.value.message
    assert hint in caught.value.hint


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("org/name", "`edgeinfer models pull org/name`"),
        ("org/name:Q4_K_M", "`edgeinfer models pull org/name:Q4_K_M`"),
        ("org/name.gguf", "`edgeinfer models list`"),
        ("name", "`edgeinfer models list`"),
    ],
)
def test_what_looks_like_a_name_on_the_hub_is_told_how_to_get_it(tmp_path, monkeypatch, name, hint):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(NotFoundError) as caught:
        resolve(name, fetch=False)
    assert hint in caught.value.hint


def test_an_empty_name_is_not_the_current_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.gguf").touch()
    with pytest.raises(UsageError, match="empty"):
        resolve("")
