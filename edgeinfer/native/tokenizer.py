"""The library's tokenizers, given nothing that they cannot take.

They are fast and exact on what people write. Two things in them are not made for what a machine can write:

- For most rules by which byte-level BPE cuts text into words, src/unicode.cpp asks C++'s `std::regex`, which calls
  itself for every character of a match: 300 to 350 bytes of stack each (GNU's library, x86), so that 27,000 letters
  without a break end the process. Such texts are split in a thread whose stack is large enough.
- Every control token found in a text costs a walk over all that were found before (src/llama-vocab.cpp,
  `tokenizer_st_partition`): 40,000 took half a minute. Such texts are given in pieces that end with a control token,
  which changes nothing: what follows one is cut as if it were a text of its own.
"""

from __future__ import annotations

import ctypes
import re
import threading
from collections.abc import Callable, Iterator

import numpy as np

from edgeinfer.errors import ResourceError, UnusableInputError, UsageError
from edgeinfer.native.library import llama
from edgeinfer.native.special import SpecialTokens
from edgeinfer.types import Tokens

_INT32_MAX = 2**31 - 1
MAX_NBYTES = _INT32_MAX - 8
MAX_RUN_CHARS = 1 << 19
"""Without a break, for tokenizers that call themselves. A quarter of a gigabyte of stack."""
_STACK_NBYTES_PER_CHAR = 512
_SHORT_CHARS = 2048
"""At most a megabyte of stack, which every thread has."""
_STACK_STEP_NBYTES = 1 << 20

# What may stand in one match: something without white space, then white space (and `/`, in gpt-4o's rules).
_RUN = re.compile(r"\S+|[\s/]+")
_LINE = re.compile(r"[^\n]+|\n+")  # exaone-moe's words have single spaces in them
_DIGITS, _SPACES = re.compile(r"\d+"), re.compile(r"\s+")
# Rules that look ahead from every character: their time grows with the square of a run's length.
_SLOW_RUNS = {"superbpe": (_DIGITS, 1 << 13), "jais-2": (_SPACES, 1 << 17)}

# `tokenizer.ggml.pre` whose rules the library follows by loops of its own, or by expressions that match one character.
# fmt: off
_LOOPS = frozenset((
    "llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "jina-v5-nano", "dbrx",
    "smaug-bpe", "chatglm-bpe", "glm4", "glm5", "gpt-2", "phi-2", "jina-es", "jina-de", "gigachat", "jina-v2-es",
    "jina-v2-de", "a.x-4.0", "mellum", "modern-bert", "jina-v1-en", "jina-v2-code", "roberta-bpe", "mpt", "olmo",
    "jais", "trillion", "granite-docling", "exaone4", "starcoder", "refact", "command-r", "smollm", "codeshell",
    "exaone", "minerva-7b", "mellum2", "qwen2", "deepseek-r1-qwen", "kormo", "f2llmv2", "megrez", "stablelm2",
    "hunyuan", "solar-open", "grok-2", "qwen35", "laguna", "kimi-k2", "gemma4", "granite-embed-multi-311m",
    "sarvam-moe",
))
# fmt: on

_making_thread = threading.Lock()


class NativeTokenizer:
    """Splits texts with the vocabulary of a loaded model, which must outlive it."""

    def __init__(self, model_handle: int) -> None:
        self._vocab = llama.llama_model_get_vocab(model_handle)
        kind = llama.llama_vocab_type(self._vocab)
        model, self._rules = (_metadata(model_handle, f"tokenizer.ggml.{key}") for key in ("model", "pre"))
        # gemma4's model brings its rules along.
        self._recurses = kind == llama.LLAMA_VOCAB_TYPE_BPE and self._rules not in _LOOPS and model != "gemma4"
        self._adds_first = kind == llama.LLAMA_VOCAB_TYPE_WPM or bool(llama.llama_vocab_get_add_bos(self._vocab))
        self._n_tokens = int(llama.llama_vocab_n_tokens(self._vocab))
        self._special: dict[bool, SpecialTokens] = {}

    def tokens(self, text: str, *, add_special: bool, parse_special: bool) -> Tokens:
        """See `types.Vocabulary.tokenize`. The caller has seen to it that the tokens around a text exist.

        Raises UsageError for text that UTF-8 cannot hold or that has too long a run, ResourceError when there is no
        memory for the stack, UnusableInputError when the vocabulary cannot spell the text.
        """
        try:
            data = text.encode("utf-8")
        except UnicodeEncodeError:
            raise UsageError("the text is not valid Unicode", "give UTF-8 text") from None
        if len(data) > MAX_NBYTES:
            raise UsageError(f"the text is {len(data)} bytes long, more than can be tokenized at once", "shorten it")
        n_deep = self._longest_run(text) if self._recurses else 0
        if len(data) <= SpecialTokens.FEW_NBYTES:
            return self._with_stack(data, n_deep, add_special, parse_special)
        if parse_special not in self._special:
            self._special[parse_special] = SpecialTokens.of(self._vocab, with_control=parse_special)
        pieces = self._special[parse_special].cut(data)
        first = next(pieces)
        rest = list(pieces)
        if not rest:
            return self._with_stack(first, n_deep, add_special, parse_special)
        parts = [self._with_stack(piece, n_deep, False, parse_special) for piece in (first, *rest)]
        frame = self._with_stack(b"", 0, add_special, False)
        n_before = int(self._adds_first and add_special)
        return np.concatenate([frame[:n_before], *parts, frame[n_before:]])

    def _longest_run(self, text: str) -> int:
        """Characters that a match can go over, at most; the whole text where that is few enough."""
        if self._rules in _SLOW_RUNS:
            pattern, most = _SLOW_RUNS[self._rules]
            _check_run(_longest(pattern, text), most)
        if len(text) <= MAX_RUN_CHARS // 2:
            return len(text)
        longest = _longest(_LINE if self._rules == "exaone-moe" else _RUN, text)
        _check_run(longest, MAX_RUN_CHARS)
        return min(len(text), 2 * longest)

    def _with_stack(self, data: bytes, n_deep: int, add_special: bool, parse_special: bool) -> Tokens:
        def call() -> Tokens:
            return self._call(data, add_special, parse_special)

        if not self._recurses or min(n_deep, len(data)) <= _SHORT_CHARS:
            return call()
        return _in_thread(call, min(n_deep, len(data)) * _STACK_NBYTES_PER_CHAR)

    def _call(self, data: bytes, add_special: bool, parse_special: bool) -> Tokens:
        capacity = len(data) + 8  # a token per byte, and the special ones
        while True:
            tokens = np.empty(capacity, np.int32)
            pointer = tokens.ctypes.data_as(ctypes.POINTER(ctypes.c_int32))
            count = int(
                llama.llama_tokenize(self._vocab, data, len(data), pointer, capacity, add_special, parse_special)
            )
            if count >= 0:
                return self._sound(tokens[:count].copy())
            if count < -_INT32_MAX:
                raise UsageError("the text has more tokens than can be counted", "shorten it")
            capacity = -count

    def _sound(self, tokens: Tokens) -> Tokens:
        """What the library says of a text that its vocabulary cannot spell is -1."""
        if len(tokens) and not 0 <= tokens.min() <= tokens.max() < self._n_tokens:
            raise UnusableInputError("the vocabulary has no token for a part of the text", "convert the model again")
        return tokens


def _longest(pattern: re.Pattern[str], text: str) -> int:
    """The length of the longest match."""
    return max(_lengths(pattern, text), default=0)


def _lengths(pattern: re.Pattern[str], text: str) -> Iterator[int]:
    return (found.end() - found.start() for found in pattern.finditer(text))


def _check_run(n_chars: int, most: int) -> None:
    if n_chars > most:
        raise UsageError(
            f"the text has {n_chars} characters without a break, this model's tokenizer takes {most}",
            "put spaces or line breaks between them, or shorten it",
        )


def _in_thread(call: Callable[[], Tokens], stack_nbytes: int) -> Tokens:
    """What `call` gives or raises, in a thread with so much stack. The memory that it takes is what is used of it."""
    results: list[Tokens] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(call())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="edgeinfer-tokenizer", daemon=True)
    with _making_thread:
        before = threading.stack_size((stack_nbytes // _STACK_STEP_NBYTES + 2) * _STACK_STEP_NBYTES)
        try:
            thread.start()
        except RuntimeError:
            raise ResourceError("not enough memory to split a text this long", "shorten it, or break it up") from None
        finally:
            threading.stack_size(before)
    try:
        thread.join()
    except BaseException:
        thread.join()  # it works on what the caller may free next
        raise
    if errors:
        raise errors[0]
    return results[0]


def _metadata(model_handle: int, key: str) -> str:
    """A text of the model's file, "" where it has none of that name."""
    buffer = ctypes.create_string_buffer(256)
    length = int(llama.llama_model_meta_val_str(model_handle, key.encode(), buffer, len(buffer)))
    return buffer.value.decode("utf-8", "replace") if length >= 0 else ""
