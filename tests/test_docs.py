"""The commands that README and docs show, run as they stand: blocks marked `sh run` and `python run`."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import command_pages
import pytest
from processes import PATIENCE_S

REPOSITORY = Path(__file__).resolve().parent.parent
PAGES = [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```(sh|python) run\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def _blocks() -> list[tuple[str, str, str]]:
    return [(page.name, language, code) for page in PAGES for language, code in BLOCK.findall(page.read_text("utf-8"))]


def test_there_is_something_to_run() -> None:
    assert {language for _, language, _ in _blocks()} == {"sh", "python"}


def test_the_page_of_commands_is_what_they_say() -> None:
    assert command_pages.PAGE.read_text("utf-8") == command_pages.page(), "run scripts/command_pages.py"


@pytest.mark.model
@pytest.mark.parametrize(("page", "language", "code"), _blocks())
def test_the_commands_work(page: str, language: str, code: str, smollm2_checkpoint: Path, tmp_path: Path) -> None:
    tools = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    command = ["bash", "-euo", "pipefail", "-c", code] if language == "sh" else [sys.executable, "-c", code]
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env={**os.environ, "PATH": tools, "CHECKPOINT": str(smollm2_checkpoint)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE_S,
    )
    assert done.returncode == 0, f"{page}: {done.stderr}"
    assert done.stdout
