"""From a text or a conversation to the tokens that the model continues."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from edgeinfer.errors import UnusableInputError, UsageError
from edgeinfer.runtime.template import ChatTemplate, Message
from edgeinfer.types import Tokens, Vocabulary

Marks = tuple[str, str]
"""Two characters that no text of a message uses, around spellings of control tokens that are to stay text."""
_PRIVATE_USE = range(0xE000, 0xF8FF)


def raw_tokens(vocabulary: Vocabulary, text: str) -> Tokens:
    """The text as it stands, control tokens spelled out in it included, after the model's begin token."""
    return _spelled(text, vocabulary.tokenize(text, add_special=True, parse_special=True))


def chat_text(vocabulary: Vocabulary, template: ChatTemplate, messages: Sequence[Message]) -> tuple[str, Marks | None]:
    """The conversation's text, and the marks in it, None where it needed none.

    What a person writes stays text, also when it spells a control token: such spellings are marked before the
    template, whose own control tokens count, puts everything together; of a text that has one in another spelling, all
    is marked. Raises UnusableInputError for messages with parts of parts without end.
    """
    try:
        return _marked_text(vocabulary, template, messages)
    except RecursionError:
        raise UnusableInputError("the messages are nested too deeply", "give contents as text") from None


def _marked_text(
    vocabulary: Vocabulary, template: ChatTemplate, messages: Sequence[Message]
) -> tuple[str, Marks | None]:
    texts = list(_texts(messages))
    spellings = sorted({word for text in texts for word in _control_spellings(vocabulary, text)}, key=len, reverse=True)
    if not spellings:
        return template.render(messages), None
    everything = set("".join(texts))
    unused = (chr(code) for code in _PRIVATE_USE if chr(code) not in everything)
    marks = next(unused), next(unused)
    pattern = re.compile("|".join(map(re.escape, spellings)))

    def mark(text: str) -> str:
        if _control_spellings(vocabulary, pattern.sub("\n", text)):
            return _marked(text, marks)
        return pattern.sub(lambda found: _marked(found[0], marks), text)

    return template.render([_each_text(message, mark) for message in messages]), marks


def _marked(text: str, marks: Marks) -> str:
    """The text between marks, without the blanks around it: templates take those off."""
    bare = text.strip() or text
    before, _, after = text.partition(bare)
    return before + marks[0] + bare + marks[1] + after


def tokenize_chat(vocabulary: Vocabulary, text: str, marks: Marks | None, *, continues: bool = False) -> Tokens:
    """Tokens of what `chat_text` gave; `continues` when tokens stand before it already.

    The begin token is added only where the template did not write it.
    """
    add_special = not continues and not _begins_with_bos(vocabulary, text)
    if marks is None:
        return _spelled(text, vocabulary.tokenize(text, add_special=add_special, parse_special=True))
    opening, closing = marks
    # A template may cut or repeat contents, so marks can stand alone; the odd parts are whole marked spellings.
    parts = re.split(f"{opening}([^{opening}{closing}]*){closing}", text)
    tokens = []
    for index, part in enumerate(parts):
        part = part.replace(opening, "").replace(closing, "")
        if part or index == 0:
            special = add_special and index == 0
            tokens.append(vocabulary.tokenize(part, add_special=special, parse_special=index % 2 == 0))
    return _spelled(text, np.concatenate(tokens))


def chat_tokens(vocabulary: Vocabulary, template: ChatTemplate | None, messages: Sequence[Message]) -> Tokens:
    """The tokens of a conversation. Raises UsageError for a model without a template."""
    if template is None:
        raise no_template()
    return tokenize_chat(vocabulary, *chat_text(vocabulary, template, messages))


def _spelled(text: str, tokens: Tokens) -> Tokens:
    if len(tokens) == 0 and text.strip():
        raise UnusableInputError("the vocabulary has no token for any part of the text", "convert the model again")
    return tokens


def no_template() -> UsageError:
    """Why a conversation is impossible with this model."""
    return UsageError(
        "the model's file has no chat template, so it takes no system prompt and no chat",
        "it is a base model: give it a text to continue",
    )


def _control_spellings(vocabulary: Vocabulary, text: str) -> set[str]:
    """The control tokens that a text turns into, as the vocabulary spells them.

    A tokenizer that normalizes may find one that is spelled otherwise in the text, by full-width letters for example.
    """
    tokens = np.unique(vocabulary.tokenize(text, add_special=False, parse_special=True))
    control = {token for token in tokens.tolist() if not vocabulary.piece(token)}
    if control:  # what stands for unknown letters is no control token of the text's
        control -= set(vocabulary.tokenize(text, add_special=False, parse_special=False).tolist())
    return {vocabulary.piece(token, special=True).decode("utf-8", "replace") for token in control} - {""}


def _texts(value: Any) -> Iterator[str]:
    """Every text in messages: contents, their parts, names, roles."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _texts(item)
    elif isinstance(value, Sequence):
        for item in value:
            yield from _texts(item)


def _each_text(value: Any, change: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {key: _each_text(item, change) for key, item in value.items()}
    return [_each_text(item, change) for item in value] if isinstance(value, Sequence) else value


def _begins_with_bos(vocabulary: Vocabulary, text: str) -> bool:
    return vocabulary.bos is not None and bool(spelled := vocabulary.text(vocabulary.bos)) and text.startswith(spelled)
