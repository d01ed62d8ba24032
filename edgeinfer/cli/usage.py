"""What the command library says about a command line that is wrong, and how its help begins, in this program's way."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from typer.core import TyperCommand

from edgeinfer.errors import UsageError

if TYPE_CHECKING:
    import typer.exceptions

_EXTRA_ARGUMENTS = "Got unexpected extra argument(s) ("
_NO_COMMAND = "Missing command."
_NUMBERS = {"a valid int range": "a whole number", "a valid int": "a whole number", "a valid float": "a number"}


class Command(TyperCommand):
    """A command whose usage line shows what must be given as it is, as manual pages do: no braces around it."""

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """The words after the command's name; `ctx` is of a class that the library keeps private."""
        return [piece.strip("{}") for piece in super().collect_usage_pieces(ctx)]

    def invoke(self, ctx: Any) -> Any:
        """Run the command; an error that names an option's field names its flags instead."""
        try:
            return super().invoke(ctx)
        except UsageError as error:
            flags = {option.name: "/".join(option.opts) for option in self.params}
            if error.field not in flags:
                raise
            raise UsageError(flags[error.field] + error.message.removeprefix(error.field), error.hint) from error


def usage_error(error: typer.exceptions.TyperException) -> UsageError:
    """The library's error as one of ours: what is wrong in the message, the way out in the hint."""
    ctx: Any = getattr(error, "ctx", None)
    see = f"see `{ctx.command_path if ctx else 'edgeinfer'} --help`"
    message = error.format_message()
    if message.startswith(_EXTRA_ARGUMENTS):
        extra = message.removeprefix(_EXTRA_ARGUMENTS).removesuffix(")")
        return UsageError(f"too many arguments: {extra}", f"put a text that has spaces into quotes; {see}")
    if message == _NO_COMMAND and ctx:
        return UsageError(f"`{ctx.command_path}` needs a command", f"{', '.join(ctx.command.commands)}: {see}")
    if similar := getattr(error, "possibilities", None):
        return UsageError(error.message, f"did you mean {' or '.join(sorted(similar))}? {see}")
    for theirs, plain in _NUMBERS.items():
        message = message.replace(theirs, plain)
    return UsageError(message, see)


def rows_that_failed(arguments: list[str], error: UsageError) -> list[str]:
    """What `bench -o FORMAT` prints where its command line is wrong already: the document that its readers expect."""
    if next((argument for argument in arguments if not argument.startswith("-")), "") != "bench":
        return []
    from edgeinfer.bench.report import FORMATS

    wanted = ""
    for argument, following in zip(arguments, [*arguments[1:], ""], strict=True):
        if argument in ("-o", "--output"):
            wanted = following
        elif argument.startswith("--output="):
            wanted = argument.partition("=")[2]
        elif argument.startswith("-o"):
            wanted = argument.removeprefix("-o")
    return list(FORMATS[wanted]().end(error)) if wanted in FORMATS else []
