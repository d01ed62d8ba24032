"""Rows of JSON in, rows of JSON out, through one loaded model."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from reprlib import repr  # what stands in a row can be long and deep
from typing import Any

import numpy as np

from edgeinfer.api.files import checked_header, resolve
from edgeinfer.api.load import load
from edgeinfer.api.memory import expected_nbytes
from edgeinfer.api.model import Model
from edgeinfer.errors import EdgeinferError, UnusableInputError, UsageError
from edgeinfer.gguf_file.describe import kv_nbytes_per_token, recurrent_state_nbytes
from edgeinfer.gguf_file.header import Header
from edgeinfer.options import DEFAULT_CTX_SIZE, RuntimeOptions, SamplingParams, parse_logit_bias
from edgeinfer.runtime.answer import Reply
from edgeinfer.runtime.batch import Batch, Entry, ReadAhead
from edgeinfer.types import Constraint, Tokens

MAX_PARALLEL = 120
"""Requests at a time: the library knows 256 sequences, and finished ones keep theirs for a while."""
MAX_LINE_NBYTES = 1 << 24
"""Tokenizing takes forty times that. A context of a million tokens is a third of it, or all of it in JSON's escapes."""
_DEFAULT_PARALLEL = 32
_TOKENS_PER_REQUEST = 512
_MIN_TOKENS_PER_REQUEST = 128
_ALIASES = {"temp": "temperature"}
_SAMPLING = {f.name: f.default for f in dataclasses.fields(SamplingParams)}
_OTHER_KEYS = ("id", "prompt", "messages", "max_tokens", "stop", "priority", "deadline_ms", "json_schema", "grammar")


@dataclass(frozen=True, slots=True, eq=False)
class Row:
    """A line of input, ready to run, or what is wrong with it."""

    id: str | int
    end_nbytes: int
    """Where the line ends in the input."""
    tokens: Tokens = field(default_factory=lambda: np.empty(0, np.int32))
    params: SamplingParams = field(default_factory=SamplingParams)
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    priority: int = 0
    deadline_ms: float | None = None
    constraint: Constraint | None = None
    error: EdgeinferError | None = None


def load_for_batch(
    model: str | Path, options: RuntimeOptions, *, parallel: int | None = None, verbose: bool = False
) -> Model:
    """Load a model to run `parallel` requests at a time, by default as many as suit it and the memory.

    Raises UsageError for a number that cannot be, and what `load` raises.
    """
    if parallel is not None and not 1 <= parallel <= MAX_PARALLEL:
        raise UsageError(f"--parallel is {parallel}", f"give a number from 1 to {MAX_PARALLEL}")
    header = checked_header(resolve(model))
    one = header.metadata.count(f"{header.architecture}.context_length") or DEFAULT_CTX_SIZE
    wanted = parallel or _fitted_parallel(header)
    ctx_size = options.ctx_size or _fitted_ctx_size(header, wanted, min(one, DEFAULT_CTX_SIZE))
    return load(
        model,
        options,
        max_sequences=parallel or max(1, min(wanted, ctx_size // _MIN_TOKENS_PER_REQUEST)),
        latency_target_ms=math.inf,  # nobody watches: the most tokens per second
        max_request_tokens=options.ctx_size or one,
        remember_shared_only=True,  # of many prompts, most never come again
        default_ctx_size=ctx_size,
        verbose=verbose,
    )


def batch(model: Model, lines: Iterable[bytes], *, skip: Callable[[Any], bool] = lambda id: False) -> Batch[Row]:
    """Answer the lines of a JSONL file; iterate over the result, and `document` makes a line of output of an entry.

    A row whose id `skip` knows is left out. Whatever is wrong with a row is that row's error.
    """
    rows = ReadAhead(_rows(model, lines, skip), 2 * model.engine.limits.max_running)

    def start(row: Row) -> Reply:
        if row.error is not None:
            raise row.error
        return Reply(
            model.engine,
            model.vocabulary,
            row.tokens,
            row.params,
            max_tokens=row.max_tokens,
            stop=row.stop,
            priority=row.priority,
            deadline_ms=row.deadline_ms,
            constraint=row.constraint,
        )

    return Batch(model.engine, rows, start)


def document(entry: Entry[Row]) -> dict[str, Any]:
    """The output row of a finished entry, in the contract's order."""
    if entry.usage is None:
        assert entry.error is not None
        return {"id": entry.row.id, "text": None, "finish_reason": None, "usage": None, **entry.error.as_json()}
    usage = dataclasses.asdict(entry.usage)
    return {"id": entry.row.id, "text": entry.text, "finish_reason": entry.finish_reason, "usage": usage, "error": None}


def _fitted_parallel(header: Header) -> int:
    """As many requests as usual, or as a quarter of the free memory has states of recurrent layers for."""
    state, available = recurrent_state_nbytes(header), expected_nbytes()
    if not state or available is None:
        return _DEFAULT_PARALLEL
    return max(1, min(_DEFAULT_PARALLEL, (available - header.tensor_nbytes) // 4 // state))


def _fitted_ctx_size(header: Header, parallel: int, least: int) -> int:
    """Tokens of KV cache for so many requests, as far as a quarter of the free memory goes, at least `least`."""
    wanted = parallel * _TOKENS_PER_REQUEST
    per_token, available = kv_nbytes_per_token(header), expected_nbytes()
    if per_token and available is not None:
        states = parallel * recurrent_state_nbytes(header)
        wanted = min(wanted, (available - header.tensor_nbytes - states) // 4 // per_token)
    return max(least, wanted)


def _rows(model: Model, lines: Iterable[bytes], skip: Callable[[Any], bool]) -> Iterator[Row]:
    end_nbytes = 0
    for number, line in enumerate(lines, start=1):
        end_nbytes += len(line)
        if not line.strip():
            continue
        row_id, values = _identified(line, number)
        if skip(row_id):
            continue
        try:
            if isinstance(values, EdgeinferError):
                raise values
            yield _row(model, row_id, end_nbytes, values)
        except EdgeinferError as error:
            yield Row(row_id, end_nbytes, error=error.bare())


def _identified(line: bytes, number: int) -> tuple[str | int, dict[str, Any] | EdgeinferError]:
    """A row's id, and its values or what is wrong with them. What has no id has the number of its line."""
    try:
        values = _parse(line)
    except EdgeinferError as error:
        return number, error
    row_id = values.get("id", number)
    if isinstance(row_id, bool) or not isinstance(row_id, str | int):
        hint = "give one, or none: then it is the line's number"
        return number, UsageError("the id is neither a string nor a whole number", hint)
    return row_id, values


def _parse(line: bytes) -> dict[str, Any]:
    if len(line) > MAX_LINE_NBYTES:
        raise UnusableInputError(f"the line is longer than {MAX_LINE_NBYTES} bytes", "shorten the prompt")
    try:
        values = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UnusableInputError(f"not JSON: {error}", "one JSON object per line, in UTF-8") from None
    if not isinstance(values, dict):
        raise UnusableInputError("the line is no JSON object", 'for example {"prompt": "..."}')
    return values


def _row(model: Model, row_id: str | int, end_nbytes: int, values: dict[str, Any]) -> Row:
    """Check a row and tokenize it. Raises an EdgeinferError for what is wrong with it."""
    unknown = [key for key in values if _ALIASES.get(key, key) not in _SAMPLING and key not in _OTHER_KEYS]
    if unknown:
        raise UsageError(f"unknown key {repr(unknown[0])}", f"known are {', '.join([*_OTHER_KEYS, *_SAMPLING])}")
    stop = values.get("stop")
    stop = [] if stop is None else stop
    stop = [stop] if isinstance(stop, str) else stop
    if not (isinstance(stop, list) and all(isinstance(s, str) for s in stop)):
        raise UsageError("stop is neither a string nor a list of strings", "give it as one of them")
    max_tokens = _number(values, "max_tokens", None, int)
    if max_tokens is not None and max_tokens < 1:
        raise UsageError(f"max_tokens is {max_tokens}", "ask for at least one token")
    tokens = _tokens(model, values)
    model.engine.check_prompt(len(tokens))  # here already: what does not fit is not to be kept
    return Row(
        id=row_id,
        end_nbytes=end_nbytes,
        tokens=tokens,
        params=_params(model.sampling, values),
        max_tokens=max_tokens,
        stop=tuple(stop),
        priority=_number(values, "priority", 0, int),
        deadline_ms=_number(values, "deadline_ms", None, float),
        constraint=_constraint(model, values),
    )


def _constraint(model: Model, values: dict[str, Any]) -> Constraint | None:
    schema, grammar = values.get("json_schema"), values.get("grammar")
    if not (schema is None or isinstance(schema, dict | bool)):
        raise UsageError("json_schema is no JSON Schema", 'give an object, for example {"type": "integer"}')
    if not (grammar is None or isinstance(grammar, str)):
        raise UsageError("grammar is no text", "give it as a string")
    return model.constraint(schema, grammar)


def _tokens(model: Model, values: dict[str, Any]) -> Tokens:
    if ("prompt" in values) == ("messages" in values):
        raise UsageError("a row needs either prompt or messages", "give one of them")
    if "prompt" in values:
        if not isinstance(values["prompt"], str) or not values["prompt"]:
            raise UsageError("the prompt is no text, or empty", "give a string")
        return model.tokens(values["prompt"], raw=True)
    messages = values["messages"]
    is_list = isinstance(messages, list) and messages and all(isinstance(m, dict) for m in messages)
    if not is_list or not all(isinstance(m.get(k), str) for m in messages for k in ("role", "content")):
        raise UsageError(
            "messages is no list of objects with role and content", 'as [{"role": "user", "content": ...}]'
        )
    return model.tokens(messages)


def _params(recommended: SamplingParams, values: dict[str, Any]) -> SamplingParams:
    given: dict[str, Any] = {}
    for key, value in values.items():
        name = _ALIASES.get(key, key)
        if name not in _SAMPLING or value is None:
            continue
        if name == "logit_bias":
            if not (isinstance(value, list) and all(isinstance(text, str) for text in value)):
                raise UsageError("logit_bias is no list of strings", 'for example ["42-inf", "7+1.5"]')
            given[name] = tuple(map(parse_logit_bias, value))
        elif name == "ignore_eos":
            if not isinstance(value, bool):
                raise UsageError(f"{key} is {repr(value)}", "give true or false")
            given[name] = value
        else:
            given[name] = _number(values, key, None, float if isinstance(_SAMPLING[name], float) else int)
    return dataclasses.replace(recommended, **given)


def _number(values: dict[str, Any], key: str, default: Any, kind: type[int] | type[float]) -> Any:
    value = values.get(key)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int if kind is int else int | float):
        raise UsageError(f"{key} is {repr(value)}", f"give {'a whole number' if kind is int else 'a number'}")
    if abs(value) >= 2**53 or not math.isfinite(value):
        raise UsageError(f"{key} is {repr(value)}", "give a number that can be meant")
    return value
