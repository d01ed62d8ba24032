"""What `load` makes of a file before and after the C library sees it."""

import dataclasses

import pytest

from edgeinfer.api.files import check_shards, resolve
from edgeinfer.api.model import _recommended_sampling
from edgeinfer.errors import NotFoundError, UnusableInputError
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
    with pytest.raises(NotFoundError, match="none"):
        resolve(tmp_path)
    for number in (1, 2):
        (tmp_path / f"m-0000{number}-of-00002.gguf").touch()
    assert resolve(tmp_path).name == "m-00001-of-00002.gguf"


def test_a_later_shard_is_refused_and_the_first_named(tmp_path):
    header = FakeHeader(Metadata({"split.count": 3}), tmp_path / "m-00002-of-00003.gguf")
    with pytest.raises(UnusableInputError) as error:
        check_shards(header)
    assert "m-00001-of-00003.gguf" in error.value.hint


def test_every_shard_must_be_there(tmp_path):
    header = FakeHeader(Metadata({"split.count": 2}), tmp_path / "m-00001-of-00002.gguf")
    with pytest.raises(NotFoundError, match="m-00002-of-00002"):
        check_shards(header)
