"""The models on this machine, and their names."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from edgeinfer.errors import NotFoundError, UsageError
from edgeinfer.registry.hub_id import HubId
from edgeinfer.registry.store import ALIASES_NAME, MAX_ALIASES_NBYTES, Store, split_quant


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "models")


def put(store: Store, name: str, nbytes: int = 3) -> Path:
    path = store.folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(bytes(nbytes))
    return path


def test_an_empty_store_is_no_error_and_leaves_nothing_behind(store: Store) -> None:
    assert store.models() == []
    assert store.find("anything") is None
    assert store.find("org/name") is None
    with pytest.raises(NotFoundError, match="no model of this name"):
        store.remove("anything")
    assert not store.folder.exists()


def test_what_lies_there_has_a_name(store: Store) -> None:
    small, large = put(store, "org/tiny/tiny-Q4_K_M.gguf"), put(store, "org/tiny/tiny-Q8_0.gguf", 5)
    own = put(store, "mine.gguf")
    names = {model.name: model for model in store.models()}
    assert set(names) == {"org/tiny:Q4_K_M", "org/tiny:Q8_0", "mine"}
    assert names["org/tiny:Q8_0"].bytes == 5
    for name, path in {
        "org/tiny": small,
        "org/tiny:q8_0": large,
        "tiny-Q8_0": large,
        "mine": own,
    }.items():
        assert store.find(name) == path
    assert store.find("org/tiny:Q6_K") is None


def test_a_name_that_means_several_is_an_error(store: Store) -> None:
    first, _ = put(store, "a/x/same.gguf"), put(store, "b/x/same.gguf")
    with pytest.raises(NotFoundError, match="several"):
        store.find("same")
    assert store.find("a/x/same") == first
    assert {model.name for model in store.models()} == {"a/x/same", "b/x/same"}


def test_shards_are_one_model(store: Store) -> None:
    first, second = (put(store, f"org/big/big-Q4_0-0000{i}-of-00002.gguf") for i in (1, 2))
    (model,) = store.models()
    assert (model.path, model.files, model.bytes) == (str(first), 2, 6)
    assert store.remove("org/big") == (str(first), 6)
    assert not first.exists()
    assert not second.exists()


def test_an_alias_names_a_model_here_or_elsewhere(store: Store, tmp_path: Path) -> None:
    here = put(store, "org/tiny/tiny-Q4_0.gguf")
    elsewhere = tmp_path / "elsewhere.gguf"
    elsewhere.write_bytes(b"x")
    store.set_alias("default", here)
    store.set_alias("other", elsewhere)
    assert store.find("default") == here
    assert store.find("other") == elsewhere
    assert {m.name: m.aliases for m in store.models()} == {"org/tiny:Q4_0": ("default",), "other": ("other",)}
    assert json.loads((store.folder / ALIASES_NAME).read_text())["default"] == "org/tiny/tiny-Q4_0.gguf"
    assert store.remove("other") == (str(elsewhere), 0)
    assert elsewhere.exists()
    assert store.remove("default") == (str(here), 3)
    assert store.aliases() == {}
    assert not (store.folder / "org").exists()


def test_an_alias_whose_file_is_gone_says_so_and_can_be_forgotten(store: Store) -> None:
    path = put(store, "mine.gguf")
    store.set_alias("old", path)
    path.unlink()
    with pytest.raises(NotFoundError, match="is gone"):
        store.find("old")
    assert store.models() == []
    store.remove("old")
    assert store.find("old") is None


@pytest.mark.parametrize("alias", ["", "a/b", "a:b", "..", ".x", "-x", "a b", "ä", "x" * 65, "a\n"])
def test_what_cannot_be_an_alias(store: Store, alias: str) -> None:
    with pytest.raises(UsageError):
        store.set_alias(alias, put(store, "mine.gguf"))


@pytest.mark.parametrize(
    "text", ["", "nonsense", "[]", '{"a": 1, "b": null, "../c": "x", "d": ""}', '{"a": "' + "x" * MAX_ALIASES_NBYTES]
)
def test_a_damaged_list_of_aliases_is_an_empty_one(store: Store, text: str) -> None:
    store.folder.mkdir()
    (store.folder / ALIASES_NAME).write_text(text)
    assert store.aliases() == {}
    store.set_alias("a", put(store, "mine.gguf"))
    assert list(store.aliases()) == ["a"]


def test_revisions_are_apart(store: Store) -> None:
    put(store, "org/tiny@refs--pr--1/tiny-Q4_0.gguf")
    assert store.find("org/tiny") is None
    assert store.find("org/tiny@refs/pr/1") is not None
    assert [m.name for m in store.models()] == ["org/tiny@refs/pr/1:Q4_0"]


def test_names_of_the_hub() -> None:
    assert split_quant("org/tiny:Q4_K_M") == (HubId("org/tiny"), "Q4_K_M")
    assert split_quant("org/tiny@v1") == (HubId("org/tiny", "v1"), "")
    for wrong in ("tiny", "a/b/c", "../x", "org/tiny:../x", "org/tiny:a/b", "org/tiny:a b", "C:/x", ""):
        assert split_quant(wrong)[0] is None
