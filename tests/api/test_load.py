"""What `load` makes of a file before and after the C library sees it."""

import dataclasses

import pytest

from edgeinfer.api.files import resolve
from edgeinfer.api.model import _recommended_sampling
from edgeinfer.errors import NotFoundError
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
