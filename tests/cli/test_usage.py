"""What a person reads who mistypes a command, or asks what there is."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

COMMANDS = ("convert", "run", "batch", "bench", "eval", "imatrix", "tokenize", "inspect", "doctor", "models", "cache")


def _run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "edgeinfer", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], f"`edgeinfer` needs a command ({', '.join(COMMANDS)}: see"),
        (["cache"], "`edgeinfer cache` needs a command (info, clear: see `edgeinfer cache --help`)"),
        (["models"], "`edgeinfer models` needs a command (list, pull, rm: see `edgeinfer models --help`)"),
        (["covnert"], "Did you mean 'convert'? (see `edgeinfer --help`)"),
        (["tokenize"], "Missing argument 'MODEL'. (see `edgeinfer tokenize --help`)"),
        (
            ["run", "a.gguf", "why", "is", "it"],
            "too many arguments: is it (put a text that has spaces into quotes; see",
        ),
        (["run", "a.gguf", "--temprature", "0"], "--temprature (did you mean --temp? see `edgeinfer run --help`)"),
        (["run", "a.gguf", "--temp", "hot"], "'hot' is not a number"),
        (["run", "a.gguf", "hi", "-c", "0"], "error: -c/--ctx-size is 0 (give a number from 1 to"),
        (["run", "a.gguf", "hi", "--temp", "-1"], "error: --temp is -1.0 (give a number"),
        (["batch", "a.gguf", "-", "-ctk", "q9"], "error: -ctk/--cache-type-k is 'q9' (one of"),
        (["eval", "a.gguf", "-f", "x", "--threads", "0"], "error: --threads is 0"),
        (["run", "a.gguf", "-n", "few"], "'few' is not a whole number"),
        (["eval", "a.gguf", "-f", "x", "--chunks", "few"], "'few' is not a whole number"),
        (
            ["convert", "gone", "--target-size", "90MiB"],
            "'90MiB' is not a size (for example 380M or 1.5G, powers of ten)",
        ),
        (["convert", "gone", "--target-size", "90MB", "-t", "q4_0"], "--target-size and -t are both given"),
    ],
    ids=" ".join,
)
def test_a_mistake_is_one_line_with_the_way_out(arguments: list[str], says: str) -> None:
    done = _run(*arguments)
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: ")
    assert says in line


def test_the_help_has_a_whole_line_for_every_command() -> None:
    listed = _run("--help").stdout.partition("Commands:\n")[2].partition("\n\n")[0].splitlines()
    assert [line.split()[0] for line in listed] == list(COMMANDS)
    assert all(line.endswith(".") and not line.endswith("...") for line in listed)


@pytest.mark.parametrize("command", [*COMMANDS, "models list", "models pull", "models rm", "cache info", "cache clear"])
def test_a_commands_help_says_what_to_give(command: str) -> None:
    text = _run(*command.split(), "--help").stdout
    assert "{" not in text.splitlines()[0]
    assert not [line for line in text.splitlines() if "<int" in line or "<str>" in line or "<path>" in line]


def test_a_traceback_is_for_whoever_asks_and_changes_no_exit_code() -> None:
    done = _run("inspect", "missing.gguf", "--debug", "--json")
    assert done.returncode == 3
    assert json.loads(done.stdout)["error"]["code"] == "not_found"
    assert done.stderr.startswith("Traceback")
    assert done.stderr.splitlines()[-1].startswith("error: missing.gguf")
