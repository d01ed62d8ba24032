"""The commands that README and docs show, run as they stand: blocks marked `sh run` and `python run`."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import command_pages
import pytest
from adapter_files import pair, write_adapter
from processes import PATIENCE_S

import edgeinfer
from edgeinfer.options import ConvertOptions

REPOSITORY = Path(__file__).resolve().parent.parent
PAGES = [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```(sh|python) run\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def _blocks() -> list[tuple[str, str, str]]:
    return [(page.name, language, code) for page in PAGES for language, code in BLOCK.findall(page.read_text("utf-8"))]


def test_there_is_something_to_run() -> None:
    assert {language for _, language, _ in _blocks()} == {"sh", "python"}


def test_the_pages_of_commands_are_what_they_say() -> None:
    assert command_pages.PAGE.read_text("utf-8") == command_pages.page(), "run scripts/command_pages.py"
    assert command_pages.MAN_PAGE.read_text("utf-8") == command_pages.man_page(), "run scripts/command_pages.py"


def test_the_manual_page_is_installed_where_man_looks() -> None:
    settings = tomllib.loads((REPOSITORY / "pyproject.toml").read_text("utf-8"))
    (name,) = settings["tool"]["setuptools"]["data-files"]["share/man/man1"]
    assert REPOSITORY / name == command_pages.MAN_PAGE


@pytest.mark.skipif(not shutil.which("groff"), reason="needs groff")
def test_the_manual_page_is_roff_and_shows_every_line_of_the_help() -> None:
    def groff(*options: str) -> subprocess.CompletedProcess[str]:
        command = ["groff", "-man", "-k", "-ww", *options, str(command_pages.MAN_PAGE)]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=PATIENCE_S)

    shown = groff("-Tutf8", "-P-c", "-P-b", "-P-u", "-rLL=78n")
    assert shown.stderr == ""
    lines = {line.strip() for line in shown.stdout.splitlines()}
    helps = "\n".join(command_pages.help_of(*words, columns=72) for words in (["run"], ["models", "pull"]))
    assert {line.strip() for line in helps.splitlines()} <= lines
    assert {"MODELS PULL", "EXIT CODES", "ENVIRONMENT VARIABLES"} <= lines


@pytest.fixture(scope="module")
def smollm2_adapter(smollm2_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    tensors = pair("model.layers.12.self_attn.q_proj", 4, 576, 576)
    return write_adapter(tmp_path_factory.mktemp("adapter") / "adapter", smollm2_checkpoint, tensors, r=4)


@pytest.fixture(scope="module")
def readme_model(smollm2_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the README's first command makes, and the other pages go on with; in the type that runs fastest."""
    model = tmp_path_factory.mktemp("readme") / "model.gguf"
    edgeinfer.convert(smollm2_checkpoint, model, ConvertOptions(type="Q4_0", verify=False))
    return model


@pytest.mark.model
@pytest.mark.parametrize(("page", "language", "code"), _blocks())
def test_the_commands_work(
    page: str,
    language: str,
    code: str,
    smollm2_checkpoint: Path,
    smollm2_adapter: Path,
    readme_model: Path,
    tmp_path: Path,
) -> None:
    if "jq " in code and shutil.which("jq") is None:
        pytest.skip("needs jq")
    if "-o model.gguf" not in code:
        (tmp_path / "model.gguf").symlink_to(readme_model)
    tools = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    command = ["bash", "-euo", "pipefail", "-c", code] if language == "sh" else [sys.executable, "-c", code]
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env={**os.environ, "PATH": tools, "CHECKPOINT": str(smollm2_checkpoint), "ADAPTER": str(smollm2_adapter)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE_S,
    )
    assert done.returncode == 0, f"{page}: {done.stderr}"
    assert done.stdout
