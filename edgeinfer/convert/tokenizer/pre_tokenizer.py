"""llama.cpp's name for the rules by which a tokenizer cuts text before it merges (`tokenizer.ggml.pre`).

The file's own rules decide. Several names can stand for the same rules (src/llama-vocab.cpp): the hash of a fixed text
tells which one llama.cpp would write, and names rules that are not in the table. What neither knows is refused, for
another rule would change the tokens silently.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgeinfer.convert.tokenizer.hashes import CHECK_TEXT, PRE_TOKENIZER_BY_HASH
from edgeinfer.errors import UnusableInputError
from edgeinfer.tokenizer_json import encode_all

if TYPE_CHECKING:
    import tokenizers

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_SYMBOLS_AND_SPACE = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}{{1,3}}|{_SYMBOLS_AND_SPACE}"
_QWEN2 = rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}|{_SYMBOLS_AND_SPACE}"
_QWEN35 = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+%s|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*%s"
_PATHS_AND_SPACE = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_TEKKEN = rf"{_CASED % ('', '')}|\p{{N}}|{_PATHS_AND_SPACE}"
_GPT4O = rf"{_CASED % (_CONTRACTIONS + '?', _CONTRACTIONS + '?')}|\p{{N}}{{1,3}}|{_PATHS_AND_SPACE}"
_FALCON = (
    '{"behavior": "Contiguous", "type": "Punctuation"}',
    "byte-level words",
    '{"individual_digits": false, "type": "Digits"}',
    "[0-9][0-9][0-9]",
)
_DEEPSEEK_V3 = (
    r"\p{N}{1,3}",
    "[一-龥\u3040-ゟ゠-ヿ]+",
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^{nl}\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    r"| ?[\p{P}\p{S}]+[{nl}]*|\s*[{nl}]+|\s+(?!\S)|\s+",
)
_UPPER_NOT_HAN, _LOWER_NOT_HAN = (f"{kind[:-1]}&&[^\\p{{Han}}]]" for kind in (_UPPER, _LOWER))
KIMI = (
    r"[\p{Han}]+"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{_UPPER_NOT_HAN}*{_LOWER_NOT_HAN}+{_CONTRACTIONS}?"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{_UPPER_NOT_HAN}+{_LOWER_NOT_HAN}*{_CONTRACTIONS}?"
    rf"|\p{{N}}{{1,3}}|{_SYMBOLS_AND_SPACE}"
)

# The steps -> llama.cpp's names for them. The first name is the one for a tokenizer whose hash is not known.
_NAMES_BY_RULES: dict[tuple[str, ...], tuple[str, ...]] = {
    ("byte-level words",): (
        *("gpt-2", "phi-2", "mpt", "olmo", "jais", "jina-v1-en", "jina-v2-code", "roberta-bpe", "jina-v2-es"),
        *("jina-v2-de", "gigachat", "a.x-4.0", "mellum", "modern-bert", "exaone4", "trillion", "granite-docling"),
    ),
    ("single digits", "byte-level words"): (
        *("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b", "mellum2"),
    ),
    (_LLAMA3, "bytes", "whole words first"): (
        *("llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "jina-v5-nano", "glm4"),
    ),
    (_LLAMA3, "bytes"): ("dbrx", "smaug-bpe", "chatglm-bpe", "glm4", "llama-bpe", "lfm2"),
    (_QWEN2, "bytes"): (
        *("qwen2", "stablelm2", "hunyuan", "solar-open", "deepseek-r1-qwen", "kormo", "f2llmv2", "megrez", "grok-2"),
    ),
    (_QWEN35, "bytes"): ("qwen35",),
    _FALCON: ("falcon",),
    (_TEKKEN, "bytes"): ("tekken",),
    (KIMI, "bytes"): ("kimi-k2",),
    (_GPT4O, "bytes"): ("gpt-4o", "llama4", "kanana2", "talkie", "minimax-m2"),
    (*(rule.replace("{nl}", "\r\n") for rule in _DEEPSEEK_V3), "bytes"): (
        *("deepseek-v3", "hunyuan-dense", "joyai-llm", "hy_v4"),
    ),
}
# A vocabulary's own words before any merge: of no consequence where merges lead to every word.
_ALSO_WITH_WHOLE_WORDS_FIRST = (_TEKKEN, _GPT4O, _QWEN2, _QWEN35, KIMI)


def name_pre_tokenizer(path: Path, parsed: dict[str, Any], original: tokenizers.Tokenizer, begin_token: str) -> str:
    """llama.cpp's name for the file's pre-tokenizing rules; UnusableInputError, with the rules, for unknown ones.

    `begin_token` is for `known_by_hash`.
    """
    rules = _rules(parsed)
    by_rules = names_by_rules(parsed)
    by_hash = known_by_hash(original, begin_token)
    if by_hash and (by_hash in by_rules or not by_rules):
        return by_hash
    if by_rules:
        return by_rules[0]
    raise UnusableInputError(
        f"{path}: unknown pre-tokenizer {' + '.join(rules)}",
        f"name the one of llama.cpp that does the same with --pre; known are those of {_known()}",
    )


def names_by_rules(parsed: dict[str, Any]) -> tuple[str, ...]:
    """The names of llama.cpp's pre-tokenizers that do what the file's rules say; none for rules not in the table."""
    return _NAMES_BY_RULES.get(_rules(parsed), ())


def known_by_hash(original: tokenizers.Tokenizer, begin_token: str) -> str | None:
    """llama.cpp's name for a tokenizer that it knows by its tokens of a fixed text.

    `begin_token` stands in front of them where the settings, which llama.cpp asks too, say so; "" where they don't.
    """
    plain, framed = (encode_all(original, [CHECK_TEXT], special=special)[0] for special in (False, True))
    begin = original.token_to_id(begin_token) if begin_token else None
    candidates = [*([[begin, *plain]] if begin is not None else []), framed, plain]
    hashes = (hashlib.sha256(str(ids).encode()).hexdigest() for ids in candidates)
    return next((PRE_TOKENIZER_BY_HASH[found] for found in hashes if found in PRE_TOKENIZER_BY_HASH), None)


def _rules(parsed: dict[str, Any]) -> tuple[str, ...]:
    steps = tuple(map(_describe, _steps(parsed.get("pre_tokenizer"))))
    whole_words = parsed["model"].get("ignore_merges") is True
    if whole_words and steps and steps[0] not in _ALSO_WITH_WHOLE_WORDS_FIRST:
        return (*steps, "whole words first")
    return steps


def _steps(section: Any) -> Iterator[Any]:
    """The steps of a pre-tokenizer, sequences flattened."""
    match section:
        case None:
            return
        case {"type": "Sequence", "pretokenizers": [*nested]}:
            for step in nested:
                yield from _steps(step)
        case _:
            yield section


def _describe(step: Any) -> str:
    match step:
        case {"type": "Split", "pattern": {"Regex": str(regex)}, "behavior": "Isolated", "invert": False}:
            return regex
        case {"type": "Split", "pattern": {"Regex": str(regex)}, "behavior": "Removed", "invert": True}:
            return regex
        case {"type": "ByteLevel", "use_regex": False, "add_prefix_space": False}:
            return "bytes"
        case {"type": "ByteLevel"}:
            # With a space in front the C library's tokens differ in the first word, which the check of tokens finds.
            return "byte-level words"
        case {"type": "Digits", "individual_digits": True}:
            return "single digits"
    return json.dumps(step, ensure_ascii=False, sort_keys=True)


def _known() -> str:
    return ", ".join(names[0] for names in _NAMES_BY_RULES.values())
