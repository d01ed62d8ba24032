"""Completion in the shells: the script, and what it gets when a person presses Tab."""

import os
import subprocess
import sys

import pytest
from processes import PATIENCE_S

COMMAND = [sys.executable, "-m", "edgeinfer"]


def run(*arguments, **environment):
    return subprocess.run(
        [*COMMAND, *arguments],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **environment},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
    )


@pytest.mark.parametrize(
    ("shell", "sign"),
    [
        ("bash", "complete -o default -F"),
        ("zsh", "#compdef edgeinfer"),
        ("fish", "complete --command edgeinfer"),
        ("powershell", "Register-ArgumentCompleter"),
        ("pwsh", "Register-ArgumentCompleter"),
    ],
)
def test_every_shell_has_its_script(shell, sign):
    done = run("--show-completion", shell)
    assert (done.returncode, done.stderr) == (0, "")
    assert sign in done.stdout
    assert "_EDGEINFER_COMPLETE" in done.stdout


@pytest.mark.parametrize("arguments", [["--show-completion", "tcsh"], ["--show-completion"]])
def test_a_shell_that_is_none_is_a_wrong_usage(arguments):
    done = run(*arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("typed", "offered"), [("edgeinfer mod", {"models"}), ("edgeinfer models ", {"list", "pull", "rm"})]
)
def test_commands_are_completed(typed, offered):
    words = typed.split(" ")
    done = run(_EDGEINFER_COMPLETE="complete_bash", COMP_WORDS=typed, COMP_CWORD=str(len(words) - 1))
    assert done.returncode == 0, done.stderr
    assert set(done.stdout.split()) == offered


def test_options_are_completed():
    done = run(_EDGEINFER_COMPLETE="complete_bash", COMP_WORDS="edgeinfer run --gpu", COMP_CWORD="2")
    assert done.stdout.split() == ["--gpu-layers"]


def test_the_script_is_one_that_bash_reads(tmp_path):
    script = tmp_path / "edgeinfer.sh"
    script.write_text(run("--show-completion", "bash").stdout)
    shown = "complete -p edgeinfer"
    done = subprocess.run(
        ["bash", "-c", f". {script}; {shown}"], capture_output=True, text=True, check=True, timeout=PATIENCE_S
    )
    assert "_edgeinfer_completion" in done.stdout


def test_installing_puts_it_where_the_shell_looks(tmp_path):
    done = run("--install-completion", "bash", HOME=str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert (tmp_path / ".bash_completions" / "edgeinfer.sh").exists()
    assert "edgeinfer.sh" in (tmp_path / ".bashrc").read_text()
