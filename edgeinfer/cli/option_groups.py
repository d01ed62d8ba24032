"""Options that several commands have: a function takes them and makes one value of them, which the commands ask for."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any


def with_groups(**groups: Callable[..., Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Have a function take, in place of a parameter, the options of the group of that name.

    The parameter gets a function that makes the group's value of them, so that what is wrong with them is raised where
    the command can tell it. A group can have groups of its own.
    """

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        own = inspect.signature(function, eval_str=True)
        theirs = {name: inspect.signature(make, eval_str=True) for name, make in groups.items()}
        for name, signature in theirs.items():
            # The one thing here that a type checker does not see.
            assert own.parameters[name].annotation == Callable[[], signature.return_annotation], f"{function}: {name}"

        @functools.wraps(function)
        def grouped(**values: Any) -> Any:
            for name, make in groups.items():
                values[name] = functools.partial(make, **{key: values.pop(key) for key in theirs[name].parameters})
            return function(**values)

        options: list[inspect.Parameter] = []
        for name, parameter in own.parameters.items():
            options += theirs[name].parameters.values() if name in theirs else [parameter]
        keywords = [option.replace(kind=inspect.Parameter.KEYWORD_ONLY) for option in options]
        grouped.__signature__ = own.replace(parameters=keywords)  # type: ignore[attr-defined]
        return grouped

    return decorate
