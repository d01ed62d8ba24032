"""GGUF files of the Hugging Face Hub: from the store, from the cache that other programs share, else fetched."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from edgeinfer.errors import NotFoundError, ResourceError
from edgeinfer.registry.choice import candidates, choose
from edgeinfer.registry.complaints import check_endpoint, translated
from edgeinfer.registry.hub import existing_parent, model_sizes
from edgeinfer.registry.hub_id import HubId
from edgeinfer.registry.store import Store
from edgeinfer.registry.transfer import PARTIAL_SUFFIX, Announcement, announcement, fetch_to, sha256_of


@dataclass(frozen=True, slots=True)
class Pulled:
    """A model that is here now."""

    path: Path
    """The file, of several shards the first."""
    files: int
    nbytes: int
    fetched_nbytes: int
    """What was not here before."""


def in_shared_cache(hub_id: HubId, quant: str) -> Path | None:
    """A model in the cache of `huggingface_hub`, where other programs leave what they fetch; asks nobody."""
    check_endpoint()
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        folder = Path(snapshot_download(hub_id.repository, revision=hub_id.revision, local_files_only=True))
    except LocalEntryNotFoundError as error:  # or a snapshot that lacks files that nobody needs here
        folder = Path(getattr(error, "snapshot_path", None) or "/nowhere")
    names = (p.relative_to(folder).as_posix() for p in folder.rglob("*.gguf") if p.exists())
    found = [c for c in candidates(names) if not quant or c.is_called(quant)]
    return folder / choose(str(hub_id), found, quant).files[0] if found else None


def pull(store: Store, hub_id: HubId, quant: str) -> Pulled:
    """Fetch a model into the store, and go on where an earlier attempt stopped.

    Progress goes to stderr, on a terminal only. Raises NotFoundError when there is no such repository or file, when it
    may not be read and when the Hub cannot be reached; UnusableInputError for a damaged transfer; ResourceError when
    the disk has no room, or cannot be written.
    """
    check_endpoint()
    sizes, commit = model_sizes(hub_id)
    chosen = choose(str(hub_id), candidates(sizes), quant)
    folder, fetched = store.folder_of(hub_id), 0
    with translated(hub_id):
        wanted = {name: _announced(hub_id, name, commit) for name in chosen.files}
        missing = {name: a for name, a in wanted.items() if not _is_here(folder / name, a)}
        _check_space(hub_id, folder, missing)
        for name, announced in missing.items():
            target = folder / name
            fetch_to(target, _partial(target, announced), str(hub_id), name, announced)
            fetched += announced.nbytes
    nbytes = sum(a.nbytes for a in wanted.values())
    return Pulled(folder / chosen.files[0], len(wanted), nbytes, fetched)


def _announced(hub_id: HubId, name: str, commit: str) -> Announcement:
    announced = announcement(hub_id.repository, name, commit)
    if announced is None:
        raise NotFoundError(
            f"{hub_id}: the Hub gives no checksum of {name}", "download it by hand, if you trust it, and give its path"
        )
    return announced


def _is_here(path: Path, announced: Announcement) -> bool:
    """Whether it is this version: the same name and size can be another one's."""
    return path.is_file() and path.stat().st_size == announced.nbytes and sha256_of(path) == announced.sha256


def _partial(target: Path, announced: Announcement) -> Path:
    """Named for the content, so that no other version is continued; not a `.gguf`, so that nobody lists it."""
    return target.with_name(f".{announced.sha256[:16]}{PARTIAL_SUFFIX}")


def _check_space(hub_id: HubId, folder: Path, missing: dict[str, Announcement]) -> None:
    begun = sum(p.stat().st_size for n, a in missing.items() if (p := _partial(folder / n, a)).exists())
    needed = max(sum(a.nbytes for a in missing.values()) - begun, 0)
    free = shutil.disk_usage(existing_parent(folder)).free
    if needed > free:
        raise ResourceError(
            f"{hub_id}: needs {needed} bytes in {folder}, the disk has {free} free",
            "free some space, or move the store with EDGEINFER_HOME",
        )
