"""`edgeinfer run`: one answer, or a chat on a terminal."""

from __future__ import annotations

import dataclasses
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from edgeinfer.cli import console, inputs, sampling_options
from edgeinfer.cli.ending import leave
from edgeinfer.cli.interrupt import ending_at_once, on_interrupt
from edgeinfer.cli.option_groups import with_groups
from edgeinfer.cli.runtime_options import DEFAULTS, MODEL_HELP, Verbose, answering, tell_plan
from edgeinfer.errors import UsageError
from edgeinfer.options import DEFAULT_CTX_SIZE, ON_OVERFLOW, RuntimeOptions

if TYPE_CHECKING:  # the heavy parts are imported when there is something to run
    from edgeinfer.api.model import Model
    from edgeinfer.api.sessions import SessionFile
    from edgeinfer.grammar.nodes import Grammar
    from edgeinfer.runtime.answer import AnswerStream
    from edgeinfer.runtime.session import OnOverflow
    from edgeinfer.types import Answer


@with_groups(sampling=sampling_options.sampling, options=answering)
def command(
    model: Annotated[
        str | None,
        typer.Argument(metavar="[MODEL]", help=f"{MODEL_HELP} [default: the model with the alias default]."),
    ] = None,
    prompt: Annotated[
        str | None, typer.Argument(metavar="[PROMPT]", help="What to say. Piped input follows it after a blank line.")
    ] = None,
    file: Annotated[
        Path | None, typer.Option("-f", "--file", metavar="FILE", help="Read the prompt from a file.")
    ] = None,
    system: Annotated[str | None, typer.Option("-s", "--system", metavar="TEXT", help="System prompt.")] = None,
    system_file: Annotated[
        Path | None, typer.Option("--system-file", metavar="FILE", help="Read the system prompt from a file.")
    ] = None,
    raw: Annotated[
        bool, typer.Option("--raw", help="Continue the prompt as it stands, without the chat template.")
    ] = False,
    max_tokens: Annotated[
        int | None,
        typer.Option("-n", "--max-tokens", metavar="N", help="Most tokens of the answer [default: until it ends]."),
    ] = None,
    *,
    sampling: Callable[[], dict[str, Any]],
    stop: Annotated[
        list[str] | None, typer.Option("--stop", metavar="TEXT", help="End at this text (repeatable).")
    ] = None,
    json_schema: Annotated[
        str | None,
        typer.Option("--json-schema", metavar="FILE|TEXT", help="Answer with JSON that is valid for this schema."),
    ] = None,
    grammar: Annotated[
        Path | None,
        typer.Option("--grammar", metavar="FILE", help="Answer with a text that matches this grammar (GBNF)."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document instead of the text.")] = False,
    logprobs: Annotated[
        int | None,
        typer.Option(
            "--logprobs", metavar="N", help="With --json: the probability of every token, and of the N likeliest."
        ),
    ] = None,
    ctx_size: Annotated[
        int | None,
        typer.Option(
            "-c", "--ctx-size", metavar="N", help=f"Context in tokens [default: the model's, up to {DEFAULT_CTX_SIZE}]."
        ),
    ] = DEFAULTS.ctx_size,
    options: Callable[[], RuntimeOptions],
    on_overflow: Annotated[
        str,
        typer.Option(
            "--on-overflow", metavar="|".join(ON_OVERFLOW), help="Refuse, or drop a conversation's oldest turns."
        ),
    ] = "error",
    session: Annotated[
        str | None, typer.Option("--session", metavar="NAME", help="Go on with a conversation, and keep it.")
    ] = None,
    verbose: Verbose = False,
) -> None:
    """Answer a prompt, or chat when there is none and this is a terminal."""
    model = _default_model() if model is None else model
    run_options, given = dataclasses.replace(options(), ctx_size=ctx_size), sampling()
    if max_tokens is not None and max_tokens < 1:
        raise UsageError(f"-n is {max_tokens}", "give at least 1; without -n the answer goes on until it ends")
    if raw and (system or system_file):
        raise UsageError("--raw has no place for a system prompt", "drop one of them")
    if raw and session:
        raise UsageError("--raw is no conversation, --session is one", "drop one of them")
    if on_overflow not in ON_OVERFLOW:
        raise UsageError(f"--on-overflow is {on_overflow!r}", f"one of {', '.join(ON_OVERFLOW)}")
    if logprobs is not None and not as_json:
        raise UsageError("--logprobs without --json", "the probabilities are a key of the envelope: add --json")
    system = _system(system, system_file)
    structure = _structure(json_schema, grammar)
    text = _prompt(prompt, file)
    has_terminal = sys.stdin.isatty() and sys.stdout.isatty()
    if text is None and (raw or as_json or structure is not None or not has_terminal):
        raise UsageError("there is no prompt", "give PROMPT, -f FILE or piped input")

    with ending_at_once(as_json=as_json):
        kept = _session_file(session)
        loaded = _load(model, run_options, verbose=verbose)
    tell_plan(loaded, verbose=verbose)
    if ctx_size and ctx_size > loaded.native.n_ctx_train:
        console.note(f"note: -c {ctx_size} exceeds the training context of {loaded.native.n_ctx_train} tokens")
    talk = None
    if text is None or kept is not None:
        from edgeinfer.cli.talk import Talk

        limits = {"max_tokens": max_tokens, "stop": stop}
        settings = {**given, **{name: value for name, value in limits.items() if value}}
        chat_session = loaded.chat(on_overflow=cast("OnOverflow", on_overflow))
        talk = Talk(chat_session, loaded.sampling, settings, model=str(loaded.header.path), system=system, file=kept)
    if text is None:
        from edgeinfer.cli import chat

        assert talk is not None
        chat.run(talk, loaded.interrupt)
        leave(loaded, 0, verbose=verbose)
    with ending_at_once(as_json=as_json):  # a long text takes its time to become tokens
        if talk is None:
            stream = loaded.stream(
                text,
                system=system,
                raw=raw,
                params=dataclasses.replace(loaded.sampling, **given),
                max_tokens=max_tokens,
                stop=stop or (),
                grammar=structure,
                logprobs=logprobs,
            )
        else:
            stream = talk.ask(text, loaded.constraint(grammar=structure), logprobs)
    if talk is not None and (note := talk.dropped_note()):
        console.note(f"note: {note}")
    try:
        code = _show(loaded, stream, as_json=as_json)
    finally:  # a part of an answer counts as well
        if talk is not None:
            talk.keep()
    leave(loaded, code, verbose=verbose)


def _session_file(name: str | None) -> SessionFile | None:
    if name is None:
        return None
    from edgeinfer.api.sessions import SessionFile

    return SessionFile(name)


def _show(model: Model, stream: AnswerStream, *, as_json: bool) -> int:
    """Print an answer while it comes, or its envelope; a signal ends it, and what there is of it is printed.

    Returns the exit code.
    """
    output = console.Stream()
    with on_interrupt(lambda _: model.interrupt()) as signals:
        for piece in stream:
            if not as_json:
                output.write(piece)
        if as_json:
            console.result_json(_envelope(stream.answer))
        else:
            output.end()
    return 128 + signals[0] if stream.answer.finish_reason == "interrupted" else 0


def _envelope(answer: Answer) -> dict[str, Any]:
    envelope = dataclasses.asdict(answer)
    envelope["timings"] = {name: round(value, 3) for name, value in envelope["timings"].items()}
    for name in ("logprobs", "reasoning"):
        if envelope[name] is None:
            del envelope[name]
    return envelope


def _load(model: str, options: RuntimeOptions, *, verbose: bool) -> Model:
    """Load the model while another thread imports what the prompt's template needs: loading is C, most of the time."""
    from edgeinfer.api.load import load
    from edgeinfer.runtime import template

    threading.Thread(target=template.preload, daemon=True).start()
    return load(model, options, verbose=verbose)


def _default_model() -> str:
    from edgeinfer.api.models import default_model

    return default_model()


def _structure(json_schema: str | None, grammar: Path | None) -> Grammar | None:
    """What the answer must match; what is wrong with it is said before the model is loaded."""
    if json_schema is not None and grammar is not None:
        raise UsageError("both --json-schema and --grammar are given", "give one of them")
    if json_schema is not None:
        from edgeinfer.grammar.json_schema.compiler import parse_schema

        if json_schema.lstrip().startswith("{") or json_schema.strip() in ("true", "false"):
            return parse_schema(inputs.argument(json_schema, "the schema"))
        return parse_schema(inputs.file(Path(json_schema)), json_schema)
    if grammar is not None:
        from edgeinfer.grammar.gbnf import parse_gbnf

        return parse_gbnf(inputs.file(grammar), str(grammar))
    return None


def _prompt(prompt: str | None, file: Path | None) -> str | None:
    """PROMPT or FILE, then piped input after a blank line; None when there is neither."""
    if prompt is not None and file is not None:
        raise UsageError("both PROMPT and -f FILE are given", "give one of them")
    if prompt is not None:
        inputs.argument(prompt, "the prompt")
    piped = None if sys.stdin is None or sys.stdin.isatty() else inputs.standard_input().rstrip("\n")
    parts = [inputs.file(file) if file else prompt, piped]
    texts = [part for part in parts if part]
    if not texts:
        if prompt is not None or file is not None:
            raise UsageError("the prompt is empty", "say something")
        return None
    return "\n\n".join(texts)


def _system(system: str | None, file: Path | None) -> str | None:
    if system is not None and file is not None:
        raise UsageError("both --system and --system-file are given", "give one of them")
    if system is not None:
        inputs.argument(system, "the system prompt")
    return inputs.file(file) if file else system
