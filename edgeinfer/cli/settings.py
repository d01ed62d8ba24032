"""Sampling options and limits of a conversation, by name: given as flags, by `/set`, or kept with a session. Pure."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import Any

from edgeinfer.errors import UnusableInputError, UsageError
from edgeinfer.options import SamplingParams, parse_logit_bias

_DEFAULTS = {field.name: field.default for field in dataclasses.fields(SamplingParams)}
_ALIASES = {"temp": "temperature"}
_UNSET = ("none", "default")
NAMES = (*_DEFAULTS, "max_tokens", "stop")


class Settings:
    """What was given, over what the model recommends."""

    def __init__(self, recommended: SamplingParams, given: Mapping[str, Any]) -> None:
        self._recommended = recommended
        self.given = dict(given)

    @property
    def params(self) -> SamplingParams:
        """How tokens are chosen."""
        given = {name: value for name, value in self.given.items() if name in _DEFAULTS}
        return dataclasses.replace(self._recommended, **given)

    @property
    def max_tokens(self) -> int | None:
        """The most tokens of an answer, None for no limit."""
        value: int | None = self.given.get("max_tokens")
        return value

    @property
    def stop(self) -> tuple[str, ...]:
        """What ends an answer."""
        return tuple(self.given.get("stop", ()))

    def set(self, name: str, text: str) -> None:
        """Set an option as a person types it; `none` takes it back. Raises UsageError, and then nothing has changed."""
        name = _ALIASES.get(name, name).replace("-", "_")
        if name not in NAMES:
            raise UsageError(f"{name!r} is no setting", f"there are {', '.join(NAMES)}")
        given = {key: value for key, value in self.given.items() if key != name}
        if text.lower() not in _UNSET:
            given[name] = _checked(name, _typed(name, text))
        Settings(self._recommended, given)._check()
        self.given = given

    def table(self) -> Iterator[tuple[str, str]]:
        """Every setting and its value."""
        params = self.params
        for name in _DEFAULTS:
            value = getattr(params, name)
            if name == "logit_bias":
                value = " ".join(f"{token}{bias:+g}" for token, bias in value)
            yield name, "none" if value is None or value == "" else str(value)
        yield "max_tokens", str(self.max_tokens or "none")
        yield "stop", " ".join(map(repr, self.stop)) or "none"

    def _check(self) -> None:
        assert self.params  # which refuses values that cannot be


def saved_settings(values: Mapping[str, Any], subject: str) -> dict[str, Any]:
    """The settings that a session's file has. Raises UnusableInputError, about `subject`, for what cannot be one."""
    try:
        settings = {name: _checked(name, value) for name, value in values.items()}
        Settings(SamplingParams(), settings)._check()
    except UsageError as error:
        raise UnusableInputError(f"{subject}: {error.message}", error.hint) from None
    return settings


def _typed(name: str, text: str) -> Any:
    """What a person types, as the value that it stands for."""
    if name == "stop":
        return [text]
    if name == "logit_bias":
        return [list(parse_logit_bias(part)) for part in text.split()]
    if name == "ignore_eos":
        return {"true": True, "on": True, "false": False, "off": False}.get(text.lower(), text)
    try:
        return float(text) if isinstance(_DEFAULTS.get(name), float) else int(text)
    except ValueError:
        return text


def _checked(name: str, value: Any) -> Any:
    """A value of the option's type. Raises UsageError."""
    if name == "stop":
        if isinstance(value, list) and all(isinstance(text, str) and text for text in value):
            return value
    elif name == "logit_bias":
        if isinstance(value, list) and all(_is_bias(pair) for pair in value):
            return tuple((token, float(bias)) for token, bias in value)
    elif name == "ignore_eos":
        if isinstance(value, bool):
            return value
    elif name in NAMES:
        kinds = int | float if isinstance(_DEFAULTS.get(name), float) else int
        is_number = isinstance(value, kinds) and not isinstance(value, bool)
        if is_number and abs(value) < 2**53 and math.isfinite(value) and (name != "max_tokens" or value >= 1):
            return value
    else:
        raise UsageError(f"{name!r} is no setting", f"there are {', '.join(NAMES)}")
    raise UsageError(f"{name} is {value!r:.40}", "give a value that it can have")


def _is_bias(pair: Any) -> bool:
    return (
        isinstance(pair, list)
        and len(pair) == 2
        and type(pair[0]) is int
        and 0 <= pair[0] < 2**31
        and type(pair[1]) in (int, float)
    )
