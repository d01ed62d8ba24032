"""The entry point: builds the command tree, runs it, turns exceptions into one line and an exit code."""

from __future__ import annotations

import errno
import os
import sys
import traceback
from contextlib import suppress
from typing import Annotated, NoReturn

import typer
import typer.exceptions

from edgeinfer import __version__
from edgeinfer.cli import console
from edgeinfer.cli.command_tree import Commands
from edgeinfer.cli.interrupt import Terminated, prepare_signals
from edgeinfer.cli.usage import rows_that_failed, usage_error
from edgeinfer.errors import EdgeinferError, InterruptedByUser, ResourceError, last_words

# The shell is named, not guessed from the processes above this one: --show-completion zsh works from a script too.
os.environ.setdefault("_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION", "1")

app = typer.Typer(
    name="edgeinfer",
    cls=Commands,
    help="Turn a Hugging Face checkpoint into one quantized GGUF file and run it fast on this machine.",
    epilog="""\b
    Examples:
      edgeinfer convert ./SmolLM2 -o model.gguf
      edgeinfer convert ./SmolLM2 --target-size 100M -o small.gguf
      edgeinfer run model.gguf "Why is the sky blue?"
      edgeinfer run model.gguf""",
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _show_version(wanted: bool) -> None:
    if wanted:
        console.result(f"edgeinfer {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and exit.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show a traceback when something fails.")] = False,
) -> None:
    """Options of every command; `main` reads --debug itself, wherever it stands."""


def main() -> NoReturn:
    """Run the command line and exit with the contract's code."""
    console.prepare_streams()
    prepare_signals()
    try:
        _run()
    except SystemExit as ending:
        console.leave(ending.code if isinstance(ending.code, int) else 0)


def _run() -> NoReturn:
    options, rest = _split(sys.argv[1:])
    debug = "--debug" in options
    as_json = "--json" in options
    last_words.append(lambda error: console.fail_at_once(error, as_json=as_json))
    try:
        arguments = [a for a in options if a != "--debug"] + rest
        code = app(args=arguments, prog_name="edgeinfer", standalone_mode=False)
        if code == InterruptedByUser.exit_code:
            raise KeyboardInterrupt  # the command library made a result of it
        raise SystemExit(code or 0)
    except EdgeinferError as error:
        if debug:
            console.note(traceback.format_exc().rstrip())
        console.fail(error, as_json=as_json)
    except typer.exceptions.TyperException as error:
        wrong = usage_error(error)
        with suppress(ResourceError):  # the error is told on stderr all the same
            for line in [] if as_json else rows_that_failed(options, wrong):
                console.result(line)
        console.fail(wrong, as_json=as_json)
    except (KeyboardInterrupt, typer.Abort):
        console.fail_at_once(InterruptedByUser("interrupted"), as_json=as_json)
    except Terminated as error:
        console.fail_at_once(InterruptedByUser("terminated"), as_json=as_json, code=error.code)
    except MemoryError:
        console.fail(ResourceError("not enough memory", "close something, or use a smaller model"), as_json=as_json)
    except BrokenPipeError:
        raise SystemExit(141) from None
    except Exception as error:
        if isinstance(error, OSError) and error.errno == errno.ENOSPC:
            console.fail(
                ResourceError("an output cannot be written (no space left)", "free some space"), as_json=as_json
            )
        if debug:
            console.note(traceback.format_exc().rstrip())
        bug = EdgeinferError(f"{type(error).__name__}: {error}", "this is a bug in edgeinfer; --debug shows where")
        console.fail(bug, as_json=as_json)


def _split(arguments: list[str]) -> tuple[list[str], list[str]]:
    """What stands before `--`, and the rest with it, where nothing is an option."""
    end = arguments.index("--") if "--" in arguments else len(arguments)
    return arguments[:end], arguments[end:]
