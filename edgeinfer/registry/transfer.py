"""Fetches one large file into the Hub's cache, so that a later run goes on where an earlier one was interrupted.

`huggingface_hub` resumes only within a process: it deletes what an ended one had fetched. It takes a file that lies in
its cache under the content's hash for downloaded, and that is where this puts it.
"""

from __future__ import annotations

import hashlib
import os
import re
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edgeinfer.errors import UnusableInputError

PARTIAL_SUFFIX = ".edgeinfer.incomplete"
_SHA256 = re.compile(r"[0-9a-f]{64}")


def blobs_folder(repository: str) -> Path:
    """Where the cache keeps a repository's files, by the hash of their content."""
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE).expanduser() / f"models--{repository.replace('/', '--')}" / "blobs"


def fetch(repository: str, name: str, commit: str) -> None:
    """Fetch a file if the cache lacks it; a file without a SHA-256 (a small one) is left to `huggingface_hub`.

    Raises what `huggingface_hub` raises, and UnusableInputError when the content is not what the Hub announced.
    """
    announced = announcement(repository, name, commit)
    if announced is None:
        return
    blob = blobs_folder(repository) / announced.sha256
    if not blob.exists():
        fetch_to(blob, blob.with_name(blob.name + PARTIAL_SUFFIX), repository, name, announced)


@dataclass(frozen=True, slots=True)
class Announcement:
    """What the Hub says of a large file before it sends it."""

    url: str
    sha256: str
    nbytes: int


def announcement(repository: str, name: str, commit: str) -> Announcement | None:
    """Ask for a file's size and hash; None for a file without. Raises what `huggingface_hub` raises."""
    from huggingface_hub import get_hf_file_metadata, hf_hub_url

    url = hf_hub_url(repository, name, revision=commit)
    announced = get_hf_file_metadata(url)
    if announced.etag is None or not _SHA256.fullmatch(announced.etag) or announced.size is None:
        return None
    return Announcement(url, announced.etag, announced.size)


def fetch_to(target: Path, partial: Path, repository: str, name: str, announced: Announcement) -> None:
    """Fetch a file into `partial`, going on where that ends, and give it its name when it is what was announced.

    Raises what `huggingface_hub` raises, and UnusableInputError when it is not.
    """
    from huggingface_hub.file_download import http_get
    from huggingface_hub.utils._fixes import WeakFileLock
    from huggingface_hub.utils._headers import build_hf_headers

    partial.parent.mkdir(parents=True, exist_ok=True)
    with WeakFileLock(partial.with_suffix(".lock")):
        if target.exists() and sha256_of(target) == announced.sha256:  # another process has fetched it meanwhile
            return
        with open(partial, "ab") as file:
            if file.tell() > announced.nbytes:
                file.truncate(0)
            http_get(
                announced.url,
                file,
                resume_size=file.tell(),
                headers=build_hf_headers(),
                expected_size=announced.nbytes,
                displayed_filename=name,
                tqdm_class=progress_bar(),
            )
            file.flush()
            os.fsync(file.fileno())
        if sha256_of(partial) != announced.sha256:
            partial.unlink()
            raise UnusableInputError(f"{repository}: the download of {name} is damaged", "try again")
        partial.replace(target)


def progress_bar() -> Any:
    """tqdm, on stderr, where that is a terminal."""
    from tqdm import tqdm

    class Bar(tqdm):  # type: ignore[type-arg]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            # How far it is comes first: a narrow terminal cuts the name's end.
            shape = "{percentage:3.0f} % |{bar}| {rate_fmt}, {remaining} left, {desc}"
            ours = {"disable": not sys.stderr.isatty(), "leave": False, "bar_format": shape}
            super().__init__(*args, **{**kwargs, **ours})

    Bar.set_lock(threading.RLock())  # its own is a semaphore of multiprocessing, which must be told of the end
    return Bar


def sha256_of(path: Path) -> str:
    """Of a file's content, in hexadecimal digits."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
