"""`edgeinfer models`: what the store has, and how it gets there."""

from __future__ import annotations

import os
from dataclasses import dataclass

from edgeinfer.api.files import checked_header, resolve
from edgeinfer.errors import NotFoundError
from edgeinfer.gguf_file.shards import read_shards
from edgeinfer.registry.store import DEFAULT_ALIAS, Store, StoredModel, check_alias, split_quant

HINT = "`edgeinfer models pull ORG/NAME --as default` fetches one, for example Qwen/Qwen2.5-0.5B-Instruct-GGUF"


@dataclass(frozen=True, slots=True)
class PulledModel:
    """What `models pull --json` prints."""

    name: str
    alias: str | None
    path: str
    files: int
    bytes: int
    fetched_bytes: int
    """What was not here before."""


@dataclass(frozen=True, slots=True)
class RemovedModel:
    """What `models rm --json` prints."""

    path: str
    freed_bytes: int
    """0 for a file outside the store, of which only the alias is forgotten."""


def list_models() -> list[StoredModel]:
    """The models of the store, and the aliases of others."""
    return Store().models()


def pull_model(model: str, alias: str | None = None) -> PulledModel:
    """Fetch `ORG/NAME[:QUANT]` from the Hub into the store, and check it; a path only gets the alias.

    Raises what `registry.pull.pull` raises; UnusableInputError for a file that cannot be run; UsageError for an alias
    that cannot be one.
    """
    if alias is not None:
        check_alias(alias)
    store = Store()
    hub_id, quant = split_quant(model)
    fetched = 0
    if hub_id is None or os.path.lexists(model):
        path = resolve(model)
    else:
        from edgeinfer.registry.pull import pull

        pulled = pull(store, hub_id, quant)
        path, fetched = pulled.path, pulled.fetched_nbytes
    shards = read_shards(checked_header(path))
    if alias is not None:
        store.set_alias(alias, path)
    nbytes = sum(shard.file_nbytes for shard in shards)
    return PulledModel(model, alias, str(path), len(shards), nbytes, fetched)


def remove_model(name: str) -> RemovedModel:
    """Delete a model of the store, or forget an alias. Raises NotFoundError, ResourceError."""
    return RemovedModel(*Store().remove(name))


def default_model() -> str:
    """What `run` takes when no model is named. Raises NotFoundError when nothing has that alias."""
    if DEFAULT_ALIAS not in Store().aliases():
        raise NotFoundError(f"no model is named, and none has the alias {DEFAULT_ALIAS!r}", HINT)
    return DEFAULT_ALIAS
