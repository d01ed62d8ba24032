"""Builds what edgeinfer is measured against, outside the repository: llama.cpp's own tools, from the very same source.

The source is that of the llama-cpp-python release that pyproject.toml pins. From it come TOOLS (cmake, Release, for
this CPU), and a virtual environment in which convert_hf_to_gguf.py runs.
Takes ten minutes on two cores and 2 GB of disk the first time; afterwards nothing. Prints the directory.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
from dataclasses import dataclass
from pathlib import Path

from toolbox import REPOSITORY, cache_dir, run

from edgeinfer.cli import console
from edgeinfer.errors import ResourceError, UnusableInputError

TOOLS = (
    "llama-bench",
    "llama-quantize",
    "llama-completion",
    "llama-imatrix",
    "llama-perplexity",
    "llama-server",
    "llama-batched-bench",
)
CMAKE_OPTIONS = (
    "-DCMAKE_BUILD_TYPE=Release",
    "-DGGML_NATIVE=ON",
    "-DBUILD_SHARED_LIBS=ON",
    "-DLLAMA_CURL=OFF",
    "-DLLAMA_OPENSSL=OFF",
    "-DLLAMA_BUILD_TESTS=OFF",
    "-DLLAMA_BUILD_EXAMPLES=OFF",
    "-DLLAMA_BUILD_UI=OFF",
)
# What convert_hf_to_gguf.py imports, at the version of transformers that its own requirements pin.
CONVERT_REQUIREMENTS = ("torch==2.13.0", "transformers==4.57.6", "sentencepiece", "protobuf", "safetensors")
# For the logits of models that came after that version. torch is shared, it is most of the size.
NEWER_REQUIREMENTS = ("transformers==5.24.0",)
# For the logits of adapters; everything else is shared.
PEFT_REQUIREMENTS = ("--no-deps", "peft==0.21.2", "accelerate==1.15.0", "psutil==7.2.2")


@dataclass(frozen=True, slots=True)
class Peers:
    """Where the peers lie."""

    folder: Path

    @property
    def source(self) -> Path:
        """llama.cpp's source."""
        return self.folder / "source" / "vendor" / "llama.cpp"

    @property
    def convert_script(self) -> Path:
        """convert_hf_to_gguf.py."""
        return self.source / "convert_hf_to_gguf.py"

    @property
    def python(self) -> Path:
        """The interpreter that runs `convert_script`."""
        return self.folder / "venv" / "bin" / "python"

    @property
    def newer_python(self) -> Path:
        """The interpreter with the newer transformers, for reference logits only."""
        return self.folder / "venv-newer" / "bin" / "python"

    @property
    def peft_python(self) -> Path:
        """The interpreter with PEFT, for reference logits only."""
        return self.folder / "venv-peft" / "bin" / "python"

    def tool(self, name: str) -> Path:
        """One of TOOLS."""
        return self.folder / "build" / "bin" / name


def build() -> Peers:
    """The peers, built now unless they are there already."""
    peers = reference()
    if not all(peers.tool(name).is_file() for name in TOOLS):
        _build_tools(peers)
    return peers


def reference() -> Peers:
    """The source and the environment of `convert_script`, but not the tools, which take longest."""
    version = pinned_version()
    peers = Peers(cache_dir("peers") / version)
    peers.folder.mkdir(parents=True, exist_ok=True)
    if not peers.source.is_dir():
        download(f"llama-cpp-python=={version}", peers.folder / "source")
    for python, make in (
        (peers.python, _make_venv),
        (peers.newer_python, _make_newer_venv),
        (peers.peft_python, _make_peft_venv),
    ):
        if not (installed := python.parent.parent / ".installed").exists():
            make(peers)
            installed.touch()
    return peers


def pinned_version() -> str:
    """The release of llama-cpp-python in pyproject.toml."""
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text("utf-8"))["project"]
    for requirement in project["dependencies"]:
        if match := re.fullmatch(r"llama-cpp-python==([\d.]+)", requirement):
            return match[1]
    raise UnusableInputError("pyproject.toml does not pin llama-cpp-python", "write llama-cpp-python==VERSION")


def download(requirement: str, folder: Path) -> None:
    """Make `folder`, the source of a package."""
    console.note(f"fetching the source of {requirement}")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".source-") as scratch:
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
        # Of this package alone: what it is built with would be built from source too, for minutes and for nothing.
        call([*pip, "--no-binary", requirement.partition("==")[0], "--dest", scratch, requirement])
        (archive,) = Path(scratch).glob("*.tar.gz")
        with tarfile.open(archive) as tar:
            # Python 3.11.4 brought the filter; what pip fetched is trusted without it.
            tar.extractall(scratch, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))
        (unpacked,) = (path for path in Path(scratch).iterdir() if path.is_dir())
        unpacked.rename(folder)


def _build_tools(peers: Peers) -> None:
    if shutil.which("cmake") is None:
        raise ResourceError("cmake is not installed", "install cmake and a C++ compiler, then try again")
    console.note(f"building {', '.join(TOOLS)}: about ten minutes on two cores")
    folder = peers.folder / "build"
    generator = ["-G", "Ninja"] if shutil.which("ninja") else []
    call(["cmake", "-S", str(peers.source), "-B", str(folder), *generator, *CMAKE_OPTIONS, "--log-level=WARNING"])
    call(["cmake", "--build", str(folder), "--parallel", str(os.cpu_count() or 1), "--target", *TOOLS])


def _make_venv(peers: Peers) -> None:
    console.note("making the environment of convert_hf_to_gguf.py (torch, transformers)")
    _install(peers.python, *CONVERT_REQUIREMENTS, str(peers.source / "gguf-py"))


def _make_newer_venv(peers: Peers) -> None:
    console.note("making the environment of the newer transformers")
    _install(peers.newer_python, *NEWER_REQUIREMENTS)
    _share(peers.python, peers.newer_python)


def _make_peft_venv(peers: Peers) -> None:
    console.note("making the environment of PEFT")
    _install(peers.peft_python, *PEFT_REQUIREMENTS)
    _share(peers.python, peers.peft_python)


def _share(python: Path, other: Path) -> None:
    """Let `other` import what `python` has and it has not."""
    where = "import sysconfig; print(sysconfig.get_path('purelib'))"
    theirs, ours = (
        Path(subprocess.run([each, "-c", where], capture_output=True, text=True, check=True).stdout.strip())
        for each in (python, other)
    )
    (ours / "of-the-other.pth").write_text(f"{theirs}\n", "utf-8")


def _install(python: Path, *requirements: str) -> None:
    """Make the virtual environment of `python` anew, with `requirements`."""
    call([sys.executable, "-m", "venv", "--clear", str(python.parent.parent)])
    call([str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *requirements])


def call(command: list[str]) -> None:
    """Run a command with its output on stderr, so that stdout keeps only the result."""
    if subprocess.run(command, stdout=sys.stderr, check=False).returncode:
        raise ResourceError(f"{Path(command[0]).name} failed", "its own message stands above")


def main() -> None:
    """Build, and print where."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    console.result(str(build().folder))


if __name__ == "__main__":
    run(main)
