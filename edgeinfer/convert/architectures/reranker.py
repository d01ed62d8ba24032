"""Qwen3-Reranker: a language model that answers "yes" or "no", of whose head only these two rows are wanted.

Its config is that of any Qwen3. sentence-transformers names the two tokens in a module of its own; before it did, only
the model's name told what it is for.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from edgeinfer.convert.architectures.base import Part, TensorRule, embedding_tensors, impossible
from edgeinfer.convert.architectures.pooling import modules
from edgeinfer.convert.checkpoint import Checkpoint
from edgeinfer.convert.config import Config
from edgeinfer.convert.json_file import read_file, read_object
from edgeinfer.errors import NotFoundError

LOGIT_SCORE = "LogitScore"
_RANK = 4  # llama_pooling_type
_NAME = re.compile(r"qwen3[-_ ]reranker", re.IGNORECASE)
_HEADING = re.compile(rb"^# *qwen3[-_ ]reranker", re.IGNORECASE | re.MULTILINE)
_MAX_CARD_NBYTES = 1 << 20
_KEY = "answer_token_ids"
TEMPLATE = (
    "<|im_start|>system\n"
    "Judge whether the Document meets the requirements based on the Query and the Instruct provided. "
    'Note that the answer can only be "yes" or "no".<|im_end|>\n'
    "<|im_start|>user\n"
    "<Instruct>: Given a web search query, retrieve relevant passages that answer the query\n"
    "<Query>: {query}\n"
    "<Document>: {document}<|im_end|>\n"
    "<|im_start|>assistant\n<think>\n\n</think>\n\n"
)
"""What the model was trained to read, from its model card; llama-server puts the texts into the braces."""


def with_answers(checkpoint: Checkpoint) -> Checkpoint:
    """The checkpoint with the tokens of "yes" and "no" in its config, where it is a reranker."""
    config = checkpoint.config
    scores = [folder for kind, folder in modules(config, LOGIT_SCORE) if kind == LOGIT_SCORE]
    tokens: list[Any] | None = None
    if scores:
        stated = Config(scores[0] / "config.json", read_object(scores[0] / "config.json"))
        tokens = [stated.integer(f"{answer}_token_id", at_least=0) for answer in ("true", "false")]
    elif not modules(config) and _is_named_so(checkpoint):
        tokens = _tokens_by_text(checkpoint.path / "tokenizer.json")
    if tokens is not None and not all(type(t) is int and 0 <= t < config.vocab_size for t in tokens or [None]):
        raise impossible(config, f"a reranker whose answers are the tokens {tokens} of {config.vocab_size}")
    return replace(checkpoint, config=config.with_values({_KEY: tokens}))


def _is_named_so(checkpoint: Checkpoint) -> bool:
    names = (checkpoint.path.name, checkpoint.repository, checkpoint.config.get("_name_or_path"))
    if any(isinstance(name, str) and _NAME.search(name) for name in names):
        return True
    try:
        return bool(_HEADING.search(read_file(checkpoint.path / "README.md", _MAX_CARD_NBYTES)))
    except NotFoundError:
        return False


def _tokens_by_text(path: Path) -> list[Any]:
    match read_object(path):
        case {"model": {"vocab": dict(vocabulary)}}:
            return [vocabulary.get(answer) for answer in ("yes", "no")]
    return []


def is_reranker(config: Config) -> bool:
    """Whether `with_answers` found it to be one."""
    return config.get(_KEY) is not None


def reranker_metadata() -> dict[str, Any]:
    """The probabilities of the two answers are what llama.cpp makes of a text."""
    return {"pooling_type": _RANK, "classifier.output_labels": ["yes", "no"]}


def head_of_answers(config: Config) -> Iterator[TensorRule]:
    """Token embedding, final norm, and of the head (or the embedding, where the two are one) the answers' rows."""
    embd, vocab = config.integer("hidden_size"), config.vocab_size
    is_tied = config.flag("tie_word_embeddings")
    source = "model.embed_tokens.weight" if is_tied else "lm_head.weight"
    rows = (Part(source, (vocab, embd), first_row=token, n_rows=1) for token in config.get(_KEY))
    yield from (rule for rule in embedding_tensors(config) if is_tied or rule.name != "output.weight")
    yield TensorRule("cls.output.weight", (2, embd), tuple(rows))
