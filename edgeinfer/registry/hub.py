"""Checkpoints of the Hugging Face Hub: from the local cache when they are there, else only the files needed.

`huggingface_hub` does the talking: it keeps the cache that other tools share, and honours HF_HOME, HF_TOKEN,
HF_ENDPOINT and HF_HUB_OFFLINE.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgeinfer.errors import ResourceError, UnusableInputError, listed
from edgeinfer.registry.complaints import check_endpoint, nonsense, translated
from edgeinfer.registry.hub_id import HubId
from edgeinfer.registry.transfer import PARTIAL_SUFFIX, blobs_folder, fetch, progress_bar

if TYPE_CHECKING:
    from huggingface_hub import ModelInfo

INDEX_NAME = "model.safetensors.index.json"
MAX_INDEX_NBYTES = 256 << 20
# What convert reads of a checkpoint, besides the weights.
_SMALL_FILES = re.compile(
    r"(config|adapter_config|generation_config|tokenizer|tokenizer_config|special_tokens_map|added_tokens|vocab|tekken"
    r"|chat_template|modules|sentence_bert_config|config_sentence_transformers|hf_quant_config)\.json"
    r"|\d{1,2}_(Pooling|LogitScore)/config\.json|\d{1,2}_Dense/(config\.json|model\.safetensors)"
    r"|additional_chat_templates/[\w.-]+\.jinja|[\w.-]*\.jinja|[\w.-]*\.model|(rwkv_)?vocab\w*\.txt|merges\.txt|README\.md"
)
_COMMIT = re.compile(r"[0-9a-f]{40}")
_ADAPTER = ("adapter_config.json", "adapter_model.safetensors")
_TOKENIZERS = (
    "tokenizer.json",
    "tokenizer.model",
    "tekken.json",
    "tiktoken.model",
    "vocab.txt",
    "rwkv_vocab_v20230424.txt",
)


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


def cached(hub_id: HubId) -> Path | None:
    """The directory of a checkpoint that is in the cache with all that a conversion needs; asks nobody.

    Raises UsageError when the environment names a Hub that has no address.
    """
    check_endpoint()
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        folder = Path(snapshot_download(hub_id.repository, revision=hub_id.revision, local_files_only=True))
    except LocalEntryNotFoundError as error:  # or a snapshot that lacks files that nobody needs here
        folder = Path(getattr(error, "snapshot_path", None) or "/nowhere")
    return folder if _is_complete(folder) else None


def _is_complete(folder: Path) -> bool:
    if (folder / _ADAPTER[0]).exists() and not (folder / "config.json").exists():
        return (folder / _ADAPTER[1]).exists()
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
    from huggingface_hub import hf_hub_download, try_to_load_from_cache

    info = _model_info(hub_id)
    sizes, commit = _sizes(hub_id, info), str(info.sha)
    _refuse_unusable(hub_id, sizes)
    shards = [name for name in sizes if name == "model.safetensors"] or [
        name for name in sizes if re.fullmatch(r"[\w.-]+\.safetensors", name)
    ]
    small = [name for name in sizes if _SMALL_FILES.fullmatch(name)]
    with translated(hub_id):
        if INDEX_NAME in sizes:
            small.append(INDEX_NAME)
            shards = _shards(Path(hf_hub_download(hub_id.repository, INDEX_NAME, revision=commit)))
        absent = [name for name in shards if name not in sizes]
        if absent:
            raise UnusableInputError(
                f"{hub_id}: {len(absent)} of {len(shards)} shards are missing: {listed(absent)}",
                "the repository is incomplete: try another revision",
            )
        files = {name: sizes[name] for name in (*small, *shards)}
        missing = sum(
            size
            for name, size in files.items()
            if not isinstance(try_to_load_from_cache(hub_id.repository, name, revision=commit), str)
        )
    n_parameters = getattr(info.safetensors, "total", None)
    return Snapshot(hub_id, commit, files, missing, n_parameters if isinstance(n_parameters, int) else None)


def model_sizes(hub_id: HubId) -> tuple[dict[str, int], str]:
    """Ask the Hub what a repository has: bytes by file name, and the commit. Raises NotFoundError as `look_up` does."""
    info = _model_info(hub_id)
    return _sizes(hub_id, info), str(info.sha)


def fetch_config(hub_id: HubId) -> Path:
    """The directory in the cache with a checkpoint's config.json, and perhaps nothing else.

    Raises NotFoundError as `look_up` does, and where the repository has no such file.
    """
    check_endpoint()
    from huggingface_hub import hf_hub_download

    with translated(hub_id):
        return Path(hf_hub_download(hub_id.repository, "config.json", revision=hub_id.revision)).parent


def _model_info(hub_id: HubId) -> ModelInfo:
    from huggingface_hub import HfApi

    with translated(hub_id):
        return HfApi().model_info(hub_id.repository, revision=hub_id.revision, files_metadata=True)


def _sizes(hub_id: HubId, info: ModelInfo) -> dict[str, int]:
    """Bytes by file name; NotFoundError for an answer that no Hub gives."""
    sizes = {file.rfilename: file.size or 0 for file in info.siblings or ()}
    is_sound = all(isinstance(name, str) and type(size) is int and size >= 0 for name, size in sizes.items())
    if not is_sound or not isinstance(info.sha, str) or not _COMMIT.fullmatch(info.sha):
        raise nonsense(hub_id, "files or a commit that cannot be")
    return sizes


def _refuse_unusable(hub_id: HubId, names: Mapping[str, Any]) -> None:
    if any(name.endswith(".safetensors") and "/" not in name for name in names):
        if "config.json" not in names and _ADAPTER[0] not in names:
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
            f"{hub_id}: has only GGUF files ({ggufs[0]})", f"`edgeinfer run {hub_id}` runs one, or use the original"
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
    with translated(snapshot.id):
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
