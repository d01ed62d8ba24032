"""Checkpoints of the Hugging Face Hub: from the local cache when they are there, else only the files needed.

`huggingface_hub` does the talking: it keeps the cache that other tools share, and honours HF_HOME, HF_TOKEN,
HF_ENDPOINT and HF_HUB_OFFLINE.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edgeinfer.errors import EdgeinferError, NotFoundError, ResourceError, UnusableInputError
from edgeinfer.registry.transfer import PARTIAL_SUFFIX, blobs_folder, fetch, progress_bar

INDEX_NAME = "model.safetensors.index.json"
MAX_ID_LENGTH = 96
MAX_INDEX_NBYTES = 256 << 20
_ID = re.compile(r"([A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:@([\w][\w./-]*))?")
# What convert reads of a checkpoint, besides the weights.
_SMALL_FILES = re.compile(
    r"(config|generation_config|tokenizer|tokenizer_config|special_tokens_map|added_tokens|vocab|tekken|chat_template"
    r"|modules|sentence_bert_config|config_sentence_transformers)\.json"
    r"|1_Pooling/config\.json|[\w.-]*\.jinja|[\w.-]*\.model|vocab\.txt|merges\.txt|README\.md"
)
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "tekken.json", "vocab.txt")
_HTTP_LIBRARIES = ("httpx", "httpx2", "httpcore", "httpcore2", "requests", "urllib3")


@dataclass(frozen=True, slots=True)
class HubId:
    """A repository and a branch, tag or commit of it."""

    repository: str
    revision: str = "main"

    def __str__(self) -> str:
        return self.repository if self.revision == "main" else f"{self.repository}@{self.revision}"


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What is to be fetched of a repository: sizes in bytes by file name."""

    id: HubId
    commit: str
    files: Mapping[str, int]
    missing_nbytes: int
    """Bytes that are not in the cache yet."""
    n_parameters: int | None
    """As the Hub counts them, where it does."""


def parse_id(text: str) -> HubId | None:
    """`ORG/NAME` or `ORG/NAME@REVISION`; None for anything else."""
    match = _ID.fullmatch(text)
    if match is None or len(text) > MAX_ID_LENGTH or ".." in text or "--" in text:  # the Hub allows none of these
        return None
    return HubId(match[1], match[2] or "main")


def cached(hub_id: HubId) -> Path | None:
    """The directory of a checkpoint that is in the cache with all that a conversion needs; asks nobody."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        folder = Path(snapshot_download(hub_id.repository, revision=hub_id.revision, local_files_only=True))
    except LocalEntryNotFoundError as error:  # or a snapshot that lacks files that nobody needs here
        folder = Path(getattr(error, "snapshot_path", None) or "/nowhere")
    return folder if _is_complete(folder) else None


def _is_complete(folder: Path) -> bool:
    has_config = (folder / "config.json").exists() and any((folder / name).exists() for name in _TOKENIZERS)
    if not has_config:
        return False
    if (folder / INDEX_NAME).exists():
        return all((folder / shard).exists() for shard in _shards(folder / INDEX_NAME))
    return any(folder.glob("*.safetensors"))


def look_up(hub_id: HubId) -> Snapshot:
    """Ask the Hub what a repository has and how large it is; fetches no more than the index of the weights.

    Raises NotFoundError when there is no such repository or revision, when it may not be read, and when the Hub cannot
    be reached; UnusableInputError when it has no safetensors checkpoint.
    """
    from huggingface_hub import HfApi, hf_hub_download, try_to_load_from_cache

    with _translated(hub_id):
        info = HfApi().model_info(hub_id.repository, revision=hub_id.revision, files_metadata=True)
        sizes = {file.rfilename: file.size or 0 for file in info.siblings or ()}
        _refuse_unusable(hub_id, sizes)
        shards = [name for name in sizes if name == "model.safetensors"] or [
            name for name in sizes if re.fullmatch(r"[\w.-]+\.safetensors", name)
        ]
        small = [name for name in sizes if _SMALL_FILES.fullmatch(name)]
        if INDEX_NAME in sizes:
            small.append(INDEX_NAME)
            shards = _shards(Path(hf_hub_download(hub_id.repository, INDEX_NAME, revision=info.sha)))
        absent = [name for name in shards if name not in sizes]
        if absent:
            raise UnusableInputError(
                f"{hub_id}: {len(absent)} of {len(shards)} shards are missing: {', '.join(absent)}",
                "the repository is incomplete: try another revision",
            )
        files = {name: sizes[name] for name in (*small, *shards)}
        missing = sum(
            size
            for name, size in files.items()
            if not isinstance(try_to_load_from_cache(hub_id.repository, name, revision=info.sha), str)
        )
    n_parameters = getattr(info.safetensors, "total", None)
    return Snapshot(
        hub_id, info.sha or hub_id.revision, files, missing, n_parameters if isinstance(n_parameters, int) else None
    )


def _refuse_unusable(hub_id: HubId, names: Mapping[str, Any]) -> None:
    if any(name.endswith(".safetensors") and "/" not in name for name in names):
        if "config.json" not in names:
            raise UnusableInputError(
                f"{hub_id}: not a Hugging Face checkpoint (no config.json)", "give another repository"
            )
        return
    pickles = [name for name in names if name.endswith((".bin", ".pt", ".pth"))]
    if pickles:
        raise UnusableInputError(
            f"{hub_id}: has only pickled weights ({pickles[0]}), which could run code when opened",
            "look for a revision with safetensors (often @refs/pr/N), or save it again with transformers",
        )
    ggufs = [name for name in names if name.endswith(".gguf")]
    if ggufs:
        raise UnusableInputError(
            f"{hub_id}: has only GGUF files ({ggufs[0]})", "download one and give its path, or use the original"
        )
    raise UnusableInputError(f"{hub_id}: has no .safetensors file", "give another repository")


def _shards(index: Path) -> list[str]:
    """The files that an index names; none when it is unreadable, which whoever opens the checkpoint says better."""
    try:
        if index.stat().st_size > MAX_INDEX_NBYTES:
            return []
        names = set(json.loads(index.read_bytes())["weight_map"].values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return []
    return sorted(name for name in names if isinstance(name, str))


def check_space(snapshot: Snapshot) -> Path:
    """The cache's folder. Raises ResourceError when the disk that it is on has no room for what is missing."""
    from huggingface_hub import constants

    folder = existing_parent(Path(constants.HF_HUB_CACHE).expanduser())
    begun = sum(path.stat().st_size for path in blobs_folder(snapshot.id.repository).glob(f"*{PARTIAL_SUFFIX}"))
    needed, free = max(snapshot.missing_nbytes - begun, 0), shutil.disk_usage(folder).free
    if needed > free:
        raise ResourceError(
            f"{snapshot.id}: needs {needed} bytes in {folder}, the disk has {free} free",
            "free some space, or move the cache with HF_HOME",
        )
    return folder


def existing_parent(path: Path) -> Path:
    """The first of a path and the directories above it that exists."""
    return next(folder for folder in (path.absolute(), *path.absolute().parents) if folder.exists())


def download(snapshot: Snapshot) -> Path:
    """Fetch what is missing, and go on where an earlier attempt stopped; the checkpoint's directory in the cache.

    Progress goes to stderr, on a terminal only. Raises the errors of `look_up`, and ResourceError when the cache cannot
    be written.
    """
    from huggingface_hub import snapshot_download

    repository = snapshot.id.repository
    with _translated(snapshot.id):
        for name in snapshot.files:
            if name.endswith(".safetensors"):
                fetch(repository, name, snapshot.commit)
        folder = snapshot_download(
            repository,
            revision=snapshot.id.revision,
            allow_patterns=list(snapshot.files),
            tqdm_class=progress_bar(),
        )
    return Path(folder)


@contextmanager
def _translated(hub_id: HubId) -> Iterator[None]:
    """The library's many exceptions as ours."""
    import logging

    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # its advice is not for the users of this program
    try:
        yield
    except EdgeinferError:
        raise
    except Exception as error:
        translated = _translate(hub_id, error)
        if translated is None:
            raise
        raise translated from error


def _translate(hub_id: HubId, error: BaseException) -> Exception | None:
    from huggingface_hub import constants, errors

    status = getattr(getattr(error, "response", None), "status_code", None)
    reach = f"{hub_id}: not in the local cache, and the Hub ({constants.ENDPOINT})"
    gated = NotFoundError(f"{hub_id}: the repository is gated", "ask for access on its page, then set HF_TOKEN")
    rules: tuple[tuple[Callable[[], bool], Exception], ...] = (
        (lambda: isinstance(error, errors.GatedRepoError), gated),
        (
            lambda: isinstance(error, errors.RevisionNotFoundError),
            NotFoundError(f"{hub_id}: no revision {hub_id.revision!r} in this repository", "see its page for branches"),
        ),
        (
            lambda: status in (401, 403) and _has_token(),
            NotFoundError(f"{hub_id}: the Hub does not accept the token", "check HF_TOKEN, or `hf auth login` again"),
        ),
        (
            lambda: isinstance(error, errors.RepositoryNotFoundError) or status in (401, 403, 404),
            NotFoundError(
                f"{hub_id}: neither a path here nor a repository on the Hub that may be read",
                "check the spelling; a private repository needs HF_TOKEN",
            ),
        ),
        (
            lambda: isinstance(error, errors.OfflineModeIsEnabled),
            NotFoundError(f"{reach} must not be asked", "unset HF_HUB_OFFLINE"),
        ),
        (lambda: status is not None, NotFoundError(f"{reach} answers with HTTP {status}", "try again later")),
        (
            lambda: type(error).__module__.partition(".")[0] in _HTTP_LIBRARIES,
            NotFoundError(f"{reach} cannot be reached ({_first_line(error)})", "check the network"),
        ),
    )
    for applies, ours in rules:
        if applies():
            return ours
    if error.__cause__ is not None:
        return _translate(hub_id, error.__cause__)
    if isinstance(error, OSError) and error.errno:
        return ResourceError(f"{hub_id}: cannot be stored ({error.strerror})", "free some space, or set HF_HOME")
    if isinstance(error, OSError):  # a transfer that does not have the announced size
        return NotFoundError(
            f"{hub_id}: the download failed ({_first_line(error)})", "try again: it goes on from there"
        )
    return None


def _has_token() -> bool:
    from huggingface_hub import get_token

    return get_token() is not None


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0] or type(error).__name__
