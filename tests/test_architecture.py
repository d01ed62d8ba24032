"""The layer table: who may import whom, who may touch the C library, how long a file may be."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from processes import PATIENCE_S

REPOSITORY = Path(__file__).resolve().parent.parent
PACKAGE = REPOSITORY / "edgeinfer"
MAX_LINES = 400  # a comfortable read is 300

# From the bottom up. Imports go down; within a layer only the first one's members know each other.
LAYERS: list[set[str]] = [
    {
        "types",
        "constraint",
        "errors",
        "options",
        "ggml_types",
        "finite",
        "home",
        "file_lock",
        "atomic_file",
        "temporary",
        "tokenizer_json",
        "charsmap",
    },
    {"scheduling", "speculation", "cache", "native", "gguf_file", "registry", "grammar"},
    {"runtime", "convert"},
    {"api"},
    {"bench", "quality"},
    {"cli"},
    {"__main__"},
]
RANK = {part: rank for rank, parts in enumerate(LAYERS) for part in parts}
# Given their native parts by `api`, so that both run without the C library.
WITHOUT_NATIVE = ("runtime", "convert.stream")
C_LIBRARY = {"llama_cpp", "ik_llama_cpp", "ctypes", "_ctypes", "cffi"}
HEAVY = {
    "numpy",
    "llama_cpp",
    "ik_llama_cpp",
    "ctypes",
    "tokenizers",
    "jinja2",
    "rich",
    "prompt_toolkit",
    "tqdm",
    "gguf",
    "safetensors",
    "mmap",
}


def _module(path: Path) -> str:
    """`convert.stream` for edgeinfer/convert/stream.py; the package itself is the empty string."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {_module(path): path for path in sorted(PACKAGE.rglob("*.py"))}


def _imports(path: Path) -> Iterator[tuple[int, str]]:
    """Every imported module of a file, lazy and typing-only imports too, with its line."""
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}:{node.lineno}: relative import"
            assert node.module
            yield node.lineno, node.module
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)


def _own_parts(path: Path) -> Iterator[tuple[int, str]]:
    """The parts of this package that a file imports, as they stand in the layer table."""
    for line, name in _imports(path):
        top, _, rest = name.partition(".")
        part = rest.partition(".")[0]
        if top == "edgeinfer" and part in RANK:
            yield line, part


def test_every_part_has_a_layer() -> None:
    parts = {name.partition(".")[0] for name in MODULES} - {""}
    assert parts <= RANK.keys(), "new part of the package: give it a place in LAYERS"


@pytest.mark.parametrize("module", [name for name in MODULES if name])
def test_imports_go_down(module: str) -> None:
    part = module.partition(".")[0]
    wrong = [
        f"{MODULES[module]}:{line}: {part} imports {other}"
        for line, other in _own_parts(MODULES[module])
        if other != part and not (RANK[other] < RANK[part] or RANK[other] == RANK[part] == 0)
    ]
    assert not wrong


def test_the_package_itself_imports_only_the_api() -> None:
    assert {part for _, part in _own_parts(MODULES[""])} <= {"api", *LAYERS[0]}


@pytest.mark.parametrize("module", [m for m in MODULES if m.startswith(WITHOUT_NATIVE)])
def test_runs_without_the_native_parts(module: str) -> None:
    assert "native" not in {part for _, part in _own_parts(MODULES[module])}


@pytest.mark.parametrize("module", [m for m in MODULES if m.partition(".")[0] != "native"])
def test_only_native_touches_the_c_library(module: str) -> None:
    assert not {name.partition(".")[0] for _, name in _imports(MODULES[module])} & C_LIBRARY


@pytest.mark.parametrize("path", [*MODULES.values(), *sorted((REPOSITORY / "scripts").glob("*.py"))], ids=str)
def test_files_stay_readable(path: Path) -> None:
    assert len(path.read_text("utf-8").splitlines()) <= MAX_LINES


@pytest.mark.parametrize("arguments", [["--help"], ["--version"]])
def test_help_loads_nothing_heavy(arguments: list[str]) -> None:
    code = (
        "import os, sys\nfrom edgeinfer.cli.app import main\n"
        f"sys.argv = ['edgeinfer', *{arguments}]\n"
        "os._exit = lambda code: print(*sys.modules, file=sys.stderr)\nmain()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=REPOSITORY, check=True, timeout=PATIENCE_S
    )
    loaded = {name.partition(".")[0] for name in done.stderr.split()}
    assert "typer" in loaded
    assert not loaded & HEAVY
