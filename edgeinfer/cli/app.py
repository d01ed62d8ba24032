"""The entry point: builds the command tree, runs it, turns exceptions into one line and an exit code."""

from __future__ import annotations

import signal
import sys
from typing import Annotated, NoReturn

import typer
import typer.exceptions

from edgeinfer import __version__
from edgeinfer.cli import bench, cache, console, convert, eval, imatrix, inspect, run, tokenize
from edgeinfer.errors import EdgeinferError, InterruptedByUser, ResourceError, UsageError

app = typer.Typer(
    name="edgeinfer",
    help="Turn a Hugging Face checkpoint into one quantized GGUF file and run it fast on this machine.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
# One line per command, in the order of the help.
app.command("convert")(convert.command)
app.command("run")(run.command)
app.command("bench")(bench.command)
app.command("eval")(eval.command)
app.command("imatrix")(imatrix.command)
app.command("tokenize")(tokenize.command)
app.command("inspect")(inspect.command)
app.add_typer(cache.app, name="cache")


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


class _Terminated(SystemExit):
    """SIGTERM or SIGHUP: its code is what a shell would report."""


def _unwind_on_termination() -> None:
    """Let a termination take the way of an exception, so that nothing half-written stays behind."""

    def stop(number: int, frame: object) -> None:
        raise _Terminated(128 + number)

    for name in ("SIGTERM", "SIGHUP"):
        number = getattr(signal, name, None)
        if number is not None and signal.getsignal(number) == signal.SIG_DFL:  # nohup ignores SIGHUP
            signal.signal(number, stop)


def main() -> NoReturn:
    """Run the command line and exit with the contract's code."""
    console.prepare_streams()
    _unwind_on_termination()
    arguments = sys.argv[1:]
    debug = "--debug" in arguments
    as_json = "--json" in arguments
    try:
        code = app(args=[a for a in arguments if a != "--debug"], standalone_mode=False)
        if code == InterruptedByUser.exit_code:
            raise KeyboardInterrupt  # the command library made a result of it
        raise SystemExit(code or 0)
    except EdgeinferError as error:
        if debug:
            raise
        console.fail(error, as_json=as_json)
    except typer.exceptions.TyperException as error:
        console.fail(UsageError(error.format_message(), "see --help"), as_json=as_json)
    except (KeyboardInterrupt, typer.Abort):
        console.fail(InterruptedByUser("interrupted"), as_json=as_json)
    except _Terminated:
        console.note("error: terminated")
        raise
    except MemoryError:
        console.fail(ResourceError("not enough memory", "close something, or use a smaller model"), as_json=as_json)
    except Exception as error:
        if debug:
            raise
        bug = EdgeinferError(f"{type(error).__name__}: {error}", "this is a bug in edgeinfer; --debug shows where")
        console.fail(bug, as_json=as_json)
