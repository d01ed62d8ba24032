"""Which files SOURCE names: a path, or a repository on the Hugging Face Hub."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from os import PathLike
from pathlib import Path

from edgeinfer.convert.adapters.peft import PeftAdapter
from edgeinfer.convert.checkpoint import SOURCE_HINT
from edgeinfer.convert.file_types import file_type
from edgeinfer.errors import NotFoundError, ResourceError, UnusableInputError, UsageError
from edgeinfer.options import ConvertOptions
from edgeinfer.registry import hub
from edgeinfer.registry.hub_id import parse_id


@dataclass(frozen=True, slots=True)
class Located:
    """Where a source lies, and the repository that it comes from, if so."""

    path: Path
    repository: str | None = None


def locate(source: str | Path, output: Path | None, options: ConvertOptions) -> Located:
    """Find a source, and fetch it when it is on the Hub and not in the local cache.

    A path that exists always wins. Raises the errors of `hub.look_up`, UsageError for an empty name, NotFoundError for
    an address, and ResourceError when the disk has no room for the download or for what it will be converted to.
    """
    if source == "":  # `Path` would take it for the current directory
        raise UsageError("the name of the source is empty", SOURCE_HINT)
    path = Path(source)
    hub_id = None if os.path.lexists(path) else parse_id(str(source))
    if hub_id is None:
        if "://" in str(source):
            raise NotFoundError(f"{source}: not a path", "of a checkpoint on the Hugging Face Hub, give ORG/NAME")
        return Located(path)
    folder = hub.cached(hub_id)
    if folder is None:
        file_type(options.file_type)  # a wrong name is said before anything is fetched
        snapshot = hub.look_up(hub_id)
        _check_space(snapshot, hub.check_space(snapshot), output, options)
        folder = hub.download(snapshot)
    return Located(folder, hub_id.repository)


def locate_base(adapter: PeftAdapter, base: str | PathLike[str] | None) -> Path:
    """The directory with the config of the model that an adapter was trained on: `base`, or what the adapter states.

    Of a model on the Hub that is nowhere here, only the config is fetched. Raises UnusableInputError where nothing is
    stated, NotFoundError, and the errors of `hub.look_up`.
    """
    name = str(adapter.base if base is None else base)
    if not name:
        raise UnusableInputError(
            f"{adapter.path}: the adapter does not say what it was trained on", "give it with --base"
        )
    if os.path.lexists(name):
        if not os.path.isdir(name):
            raise UnusableInputError(
                f"{name}: not a directory", "--base is the checkpoint, or a directory with its config"
            )
        return Path(name)
    revision = f"@{adapter.revision}" if base is None and adapter.revision and "@" not in name else ""
    hub_id = parse_id(f"{name}{revision}")
    if hub_id is None:
        raise NotFoundError(f"{name}: the base model of the adapter is not here", "give its directory with --base")
    try:
        return hub.cached(hub_id) or hub.fetch_config(hub_id)
    except NotFoundError as error:
        hint = f"{error.hint}, or give the base model's directory with --base"
        raise NotFoundError(f"the adapter's base model: {error.message}", hint) from error


def _check_space(snapshot: hub.Snapshot, cache: Path, output: Path | None, options: ConvertOptions) -> None:
    """Whether the output fits too, as far as the Hub's count of parameters tells."""
    if snapshot.n_parameters is None:
        return
    expected = _expected_nbytes(snapshot.n_parameters, options)
    target = hub.existing_parent(output.parent if output else Path())
    shared = snapshot.missing_nbytes if target.stat().st_dev == cache.stat().st_dev else 0
    free = shutil.disk_usage(target).free
    if expected + shared > free:
        raise ResourceError(
            f"{snapshot.id}: needs about {expected + shared} bytes in {target}, the disk has {free} free",
            "free some space, or choose a smaller type",
        )


def _expected_nbytes(n_parameters: int, options: ConvertOptions) -> int:
    if options.target_size is not None:
        return options.target_size
    default = file_type(options.file_type).default
    bits = options.target_bpw or 8 * default.block_nbytes / default.block_length
    return int(n_parameters * bits / 8)
