"""The models of this program's own: `$EDGEINFER_HOME/models/ORG/NAME/FILE.gguf`, and other names for models.

What is on the disk is the truth: a file that somebody puts there is a model too, one that is deleted is gone.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from edgeinfer.atomic_file import replace_file
from edgeinfer.errors import NotFoundError, ResourceError, UsageError, listed
from edgeinfer.home import home
from edgeinfer.registry.choice import Candidate, candidates, choose
from edgeinfer.registry.hub_id import HubId, parse_id

DEFAULT_ALIAS = "default"
ALIASES_NAME = "aliases.json"
MAX_ALIASES_NBYTES = 1 << 20
_ALIAS = re.compile(r"[A-Za-z0-9][\w.-]{0,63}", re.ASCII)


@dataclass(frozen=True, slots=True)
class StoredModel:
    """A model that has a name here."""

    name: str
    """`ORG/NAME:QUANT`, or the file's path in the store without the suffix where that does not say it."""
    aliases: tuple[str, ...]
    path: str
    """The file, of several shards the first."""
    files: int
    bytes: int


def split_quant(model: str) -> tuple[HubId | None, str]:
    """`ORG/NAME[@REVISION][:QUANT]` as an id and a type; None for what is no such name."""
    name, _, quant = model.partition(":")
    if quant and not re.fullmatch(r"[\w.-]{1,64}", quant, re.ASCII):
        return None, ""
    return parse_id(name), quant


class Store:
    """The models in a folder; nothing is there before something is put there."""

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder or home() / "models"

    def folder_of(self, hub_id: HubId) -> Path:
        """Where a repository's files go."""
        revision = "" if hub_id.revision == "main" else "@" + hub_id.revision.replace("/", "--")
        organization, _, name = hub_id.repository.partition("/")
        return self.folder / organization / (name + revision)

    def aliases(self) -> dict[str, Path]:
        """The file that each alias stands for, whether or not it is still there."""
        try:
            with open(self.folder / ALIASES_NAME, "rb") as file:
                document = json.loads(file.read(MAX_ALIASES_NBYTES))
        except (OSError, ValueError, RecursionError):
            return {}
        if not isinstance(document, dict):
            return {}
        return {k: self.folder / v for k, v in document.items() if isinstance(v, str) and v and _ALIAS.fullmatch(k)}

    def set_alias(self, alias: str, path: Path) -> None:
        """Give a file another name, or take that name from the file that had it."""
        check_alias(alias)
        self._write_aliases({**self.aliases(), alias: path.absolute()})

    def models(self) -> list[StoredModel]:
        """All of them, in the order of their names."""
        by_path: dict[Path, list[str]] = {}
        for alias, path in self.aliases().items():
            by_path.setdefault(path, []).append(alias)
        found = [self._model(name, c, by_path) for name, c in self._stored()]
        elsewhere = [
            StoredModel(sorted(names)[0], tuple(sorted(names)), str(path), 1, _size(path))
            for path, names in by_path.items()
            if not path.is_relative_to(self.folder) and path.is_file()
        ]
        return sorted(found + elsewhere, key=lambda model: model.name)

    def find(self, name: str) -> Path | None:
        """The file of a model by alias, by `ORG/NAME[:QUANT]` or by the name of its file; None for none.

        Raises NotFoundError for a name that means several, and for an alias whose file is gone.
        """
        if (path := self.aliases().get(name)) is not None:
            if not path.is_file():
                raise NotFoundError(f"{name}: {path} is gone", f"`edgeinfer models rm {name}` forgets it")
            return path
        hub_id, quant = split_quant(name)
        if hub_id is not None:
            return self.find_pulled(hub_id, quant)
        found = {
            self.folder / c.files[0]
            for _, c in self._stored()
            if name in (Path(c.files[0]).name, Path(c.files[0]).stem, c.files[0], c.files[0].removesuffix(".gguf"))
        }
        if len(found) > 1:
            names = listed([str(path.relative_to(self.folder)) for path in sorted(found)])
            raise NotFoundError(f"{name}: several models have this name ({names})", "give more of it")
        return found.pop() if found else None

    def find_pulled(self, hub_id: HubId, quant: str) -> Path | None:
        """What was fetched of a repository, if the type that is asked for is among it."""
        folder = self.folder_of(hub_id)
        there = candidates(str(path.relative_to(folder).as_posix()) for path in folder.rglob("*.gguf"))
        wanted = [c for c in there if not quant or c.is_called(quant)]
        return folder / choose(str(hub_id), wanted, quant).files[0] if wanted else None

    def remove(self, name: str) -> tuple[str, int]:
        """Delete a model's files and forget its aliases; of a file elsewhere only the alias. Its path, and bytes freed.

        Raises NotFoundError, ResourceError when a file cannot be deleted.
        """
        aliases = self.aliases()
        path = aliases.get(name) or self.find(name)
        if path is None:
            known = listed([model.name for model in self.models()]) or "none"
            raise NotFoundError(f"{name}: no model of this name in the store", f"there are: {known}")
        freed = 0
        if path.is_relative_to(self.folder):
            freed = self._delete(path)
            aliases = {alias: target for alias, target in aliases.items() if target != path}
        else:
            aliases.pop(name, None)
        self._write_aliases(aliases)
        return str(path), freed

    def _delete(self, path: Path) -> int:
        mine = next((c for _, c in self._stored() if self.folder / c.files[0] == path), Candidate((path.name,)))
        freed = 0
        try:
            for name in mine.files:
                file = self.folder / name
                nbytes = _size(file)
                file.unlink(missing_ok=True)
                freed += nbytes
        except OSError as error:
            raise ResourceError(f"{path}: cannot be deleted ({error.strerror})", "check the permissions") from None
        if not any(path.parent.glob("*.gguf")):
            for left in path.parent.glob(".*.edgeinfer.*"):  # of downloads: what was begun, and their locks
                with suppress(OSError):
                    left.unlink()
        for folder in path.parents:
            if folder == self.folder or not folder.is_relative_to(self.folder):
                break
            with suppress(OSError):  # not empty
                folder.rmdir()
        return freed

    def _stored(self) -> Iterator[tuple[str, Candidate]]:
        """Every model in the folder, its files relative to it."""
        names = (path.relative_to(self.folder).as_posix() for path in self.folder.rglob("*.gguf") if path.is_file())
        found = candidates(names)
        ids = [_id_of(c) for c in found]
        for candidate, name in zip(found, ids, strict=True):
            yield name if ids.count(name) == 1 else candidate.files[0].removesuffix(".gguf"), candidate

    def _model(self, name: str, candidate: Candidate, aliases: dict[Path, list[str]]) -> StoredModel:
        path = self.folder / candidate.files[0]
        nbytes = sum(_size(self.folder / file) for file in candidate.files)
        return StoredModel(name, tuple(sorted(aliases.get(path, []))), str(path), len(candidate.files), nbytes)

    def _write_aliases(self, aliases: dict[str, Path]) -> None:
        """What lies in the store is noted relative to it, so that the store can be moved."""
        inside = (
            (alias, path.relative_to(self.folder).as_posix() if path.is_relative_to(self.folder) else str(path))
            for alias, path in sorted(aliases.items())
        )
        if not aliases and not (self.folder / ALIASES_NAME).exists():
            return
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            replace_file(self.folder / ALIASES_NAME, json.dumps(dict(inside), indent=1).encode())
        except OSError as error:
            raise ResourceError(
                f"{self.folder}: cannot be written ({error.strerror})", "check the permissions, or set EDGEINFER_HOME"
            ) from None


def check_alias(alias: str) -> None:
    """Raise UsageError for a name that cannot be an alias."""
    if not _ALIAS.fullmatch(alias):
        raise UsageError(f"{alias!r} cannot be an alias", "use letters, digits, dots, hyphens and underscores")


def _id_of(candidate: Candidate) -> str:
    """`ORG/NAME:QUANT` of a file that lies where `folder_of` says."""
    parts = candidate.files[0].split("/")
    if len(parts) < 3 or not candidate.quant:
        return candidate.files[0].removesuffix(".gguf")
    return f"{parts[0]}/{parts[1].replace('--', '/')}:{candidate.quant}"


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
