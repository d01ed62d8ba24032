"""Two texts of prose, code and chat without a document in common: one to calibrate with, one to measure on.

Prose is Python's own reference (pydoc's topics) and the docstrings of its library, code is that library's source, chat
the English conversations of the package chatterbot-corpus (BSD licence). Every second document goes to each text, and
passages of the three kinds take turns, so that a part of a text is a fair sample of all of it. Other versions of Python
have other documents; the figures in the docs say which it was.
"""

from __future__ import annotations

import argparse
import ast
import itertools
import sysconfig
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from pydoc_data.topics import topics

import yaml
from fetch_model import Part, download_wheel
from toolbox import cache_dir, run

from edgeinfer.cli import console

CHAT = Part("chatterbot-corpus", "1.3.3", "")
PASSAGE_CHARACTERS = 1500
"""Of one kind before the next kind's turn: less than a context of 512 tokens."""
MAX_DOCUMENT_CHARACTERS = 6000


def sample_texts(n_characters: int) -> tuple[str, str]:
    """A text to calibrate with and one to measure on, of about so many characters each."""
    kinds = [_prose(), _code(), _chat()]
    both = ([kind[half::2] for kind in kinds] for half in (0, 1))
    calibration, evaluation = (_mixed(halves, n_characters) for halves in both)
    return calibration, evaluation


def _mixed(kinds: Sequence[Sequence[str]], n_characters: int) -> str:
    turns = zip(*(itertools.cycle(_passages(documents)) for documents in kinds), strict=True)
    return "\n\n".join(itertools.islice(itertools.chain.from_iterable(turns), n_characters // PASSAGE_CHARACTERS))


def _passages(documents: Sequence[str]) -> Iterator[str]:
    """Each document's passages, all documents' first ones before any second."""
    for start in range(0, MAX_DOCUMENT_CHARACTERS, PASSAGE_CHARACTERS):
        for document in documents:
            if passage := document[start : start + PASSAGE_CHARACTERS].strip():
                yield passage


def _prose() -> list[str]:
    modules = (ast.get_docstring(ast.parse(path.read_bytes())) or "" for path in _library())
    return [text for text in (*(topics[name] for name in sorted(topics)), *modules) if len(text) > 800]


def _code() -> list[str]:
    """The middle of the larger modules: past the docstring and the imports."""
    sources = (path.read_text("utf-8", "replace") for path in _library())
    return [text[len(text) // 3 :][:MAX_DOCUMENT_CHARACTERS] for text in sources if len(text) > 12000]


def _library() -> list[Path]:
    return sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))


def _chat() -> list[str]:
    found = []
    for topic in _conversations():
        lines = (f"{'Assistant' if i % 2 else 'User'}: {turn}" for talk in topic for i, turn in enumerate(talk))
        text = "\n".join(lines)
        found += [text[i : i + MAX_DOCUMENT_CHARACTERS] for i in range(0, len(text), MAX_DOCUMENT_CHARACTERS)]
    return [text for text in found if len(text) > 800]


def _conversations() -> Iterator[list[list[str]]]:
    folder = cache_dir("texts")
    wheel = next(folder.glob("chatterbot_corpus-*.whl"), None)
    if wheel is None:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            fetched = download_wheel(CHAT, Path(scratch))
            wheel = fetched.rename(folder / fetched.name)
    with zipfile.ZipFile(wheel) as archive:
        for name in sorted(archive.namelist()):
            if "/english/" in name and name.endswith(".yml"):
                yield yaml.safe_load(archive.read(name))["conversations"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("calibration", type=Path, help="file to write")
    parser.add_argument("evaluation", type=Path, help="file to write")
    parser.add_argument("--characters", type=int, default=150_000, help="of each text (default %(default)s)")
    arguments = parser.parse_args()
    for path, text in zip(
        (arguments.calibration, arguments.evaluation), sample_texts(arguments.characters), strict=True
    ):
        path.write_text(text, "utf-8")
        console.result(str(path))


if __name__ == "__main__":
    run(main)
