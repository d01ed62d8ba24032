"""From a prompt's tokens to an answer's text: one request through the engine, streamed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

from edgeinfer.errors import EdgeinferError, UsageError
from edgeinfer.options import SamplingParams
from edgeinfer.runtime.engine import Engine
from edgeinfer.runtime.reasoning import closing_of_open_block, split_reasoning
from edgeinfer.runtime.recording import MAX_LOGPROBS
from edgeinfer.runtime.request import Generation
from edgeinfer.runtime.text import TextStream
from edgeinfer.types import Answer, Constraint, FinishReason, Request, Timings, Tokens, Vocabulary

_request_ids = count()
_PROMPT_END_TOKENS = 16
"""Enough of a prompt to see whether its end opens a block of reasoning."""


@dataclass(frozen=True, slots=True)
class About:
    """What an answer says about where it comes from."""

    model: str
    kernels: str
    load_ms: float


class Reply:
    """One request's text, from its tokens: feed it after every step of the engine.

    The request is queued at once, so what is wrong with it is raised here, before any work.
    """

    def __init__(
        self,
        engine: Engine,
        vocabulary: Vocabulary,
        prompt: Tokens,
        params: SamplingParams,
        *,
        max_tokens: int | None = None,
        stop: Sequence[str] = (),
        priority: int = 0,
        deadline_ms: float | None = None,
        constraint: Constraint | None = None,
        logprobs: int | None = None,
        keep_answer: bool = False,
    ) -> None:
        if constraint is not None and any(stop):
            raise UsageError("a stop string could end the answer before it is complete", "drop stop or the schema")
        if logprobs is not None and not 0 <= logprobs <= MAX_LOGPROBS:
            raise UsageError(f"logprobs is {logprobs}", f"give a number from 0 to {MAX_LOGPROBS}")
        self._engine = engine
        self._vocabulary = vocabulary
        self._text = TextStream(stop)
        self._seen = len(prompt)
        self.generation = engine.submit(
            Request(
                next(_request_ids),
                prompt,
                params,
                # The context ends every answer; a number that no context reaches stands for "no limit".
                max_tokens=2**31 - 1 if max_tokens is None else max_tokens,
                end_tokens=vocabulary.end_tokens,
                priority=priority,
                deadline_ms=deadline_ms,
                constraint=constraint,
                logprobs=logprobs,
                keep_answer=keep_answer,
            )
        )
        self.finish_reason: FinishReason | None = None

    def read(self) -> Iterator[str]:
        """The text that has become certain since the last call. Sets `finish_reason` when it was the last.

        A stop string ends the request too: the engine knows no text. Raises the EdgeinferError that ended the request,
        if one did.
        """
        generation = self.generation
        if generation.error is not None:
            self.finish_reason = "interrupted"
            raise generation.error
        while self._seen < len(generation.tokens) and not self._text.stopped:
            piece = said(self._vocabulary, generation.tokens[self._seen])
            self._seen += 1
            if text := self._text.feed(piece):
                yield text
        if not self._text.stopped and generation.finish_reason is None:
            return
        if rest := self._text.finish():
            yield rest
        self._engine.cancel(generation.request.id)
        del generation.tokens[self._seen :]  # what the same step brought beyond a stop string
        self.finish_reason = "stop" if self._text.stopped else generation.finish_reason

    def logprobs(self) -> tuple[dict[str, Any], ...] | None:
        """What the envelope tells of every token of `tokens`; None where it was not asked for."""
        recorder = self.generation.recorder
        if recorder is None:
            return None
        return tuple(
            {
                **self._named(entry.token, entry.logprob),
                "top": [self._named(token, logprob) for token, logprob in entry.top],
            }
            for entry in recorder.entries[: len(self.tokens)]
        )

    def _named(self, token: int, logprob: float) -> dict[str, Any]:
        """A token by id and text; by its bytes where they are only a part of a character."""
        piece = self._vocabulary.piece(token, special=True)
        try:
            return {"id": token, "piece": piece.decode("utf-8"), "logprob": logprob}
        except UnicodeDecodeError:
            return {"id": token, "piece": list(piece), "logprob": logprob}

    def cancel(self) -> None:
        """End the request now, if it has not ended."""
        if self.finish_reason is None:
            self._engine.cancel(self.generation.request.id)
            self.finish_reason = "interrupted"

    @property
    def tokens(self) -> list[int]:
        """The answer's tokens so far, with the end token if there was one."""
        return self.generation.tokens[self.generation.prompt_tokens :]

    @property
    def prompt_end(self) -> str:
        """The last characters of the prompt, control tokens as they are spelled."""
        tokens = self.generation.request.tokens[-_PROMPT_END_TOKENS:].tolist()
        return b"".join(self._vocabulary.piece(token, special=True) for token in tokens).decode("utf-8", "replace")


class AnswerStream:
    """Iterate for the pieces of text; `answer` is there when the iteration has ended.

    The pieces are what the model says; the answer has its reasoning apart, unless the text is `raw`. A consumer that
    stops early ends the request.
    """

    def __init__(self, engine: Engine, reply: Reply, about: About, *, raw: bool = False) -> None:
        self._engine = engine
        self._reply = reply
        self._about = about
        self._raw = raw
        self.closing_tag = None if raw else closing_of_open_block(reply.prompt_end)
        """What ends the reasoning that the prompt has begun, None where it began none."""
        self._shown: list[str] = []
        self._answer: Answer | None = None

    @property
    def answer(self) -> Answer:
        """The whole answer with what it cost."""
        if self._answer is None:
            raise EdgeinferError("the answer is not there before its stream has ended")
        return self._answer

    def cancel(self) -> None:
        """End the request now; `answer` is what there is of it. Does nothing when it has ended."""
        if self._answer is None:
            self._reply.cancel()
            self._assemble()

    @property
    def tokens(self) -> list[int]:
        """The answer's tokens so far, with the end token if there was one."""
        return self._reply.tokens

    def __iter__(self) -> Iterator[str]:
        """Run the engine until this request ends."""
        try:
            while self._reply.finish_reason is None:
                for text in self._reply.read():
                    self._shown.append(text)
                    yield text
                if self._reply.finish_reason is None:
                    self._engine.step()
            self._assemble()
        finally:
            self.cancel()

    def _assemble(self) -> None:
        generation, reason = self._reply.generation, self._reply.finish_reason
        assert reason is not None
        text, reasoning = "".join(self._shown), None
        if not self._raw:
            reasoning, text = split_reasoning(text, self.closing_tag)
        self._answer = Answer(
            self._about.model,
            self._about.kernels,
            text,
            reason,
            generation.sampler.seed,
            generation.usage,
            _timings(generation, self._about.load_ms),
            self._reply.logprobs(),
            reasoning,
        )


def said(vocabulary: Vocabulary, token: int) -> bytes:
    """A token of an answer as its reader sees it: a control token as it is spelled, an end token not at all."""
    if token in vocabulary.end_tokens:
        return b""
    return vocabulary.piece(token) or vocabulary.piece(token, special=True)


def _timings(generation: Generation, load_ms: float) -> Timings:
    """Prefill ends when the first token can be chosen; decoding is every token after the first."""
    finished_s = generation.finished_s or generation.submitted_s
    prefilled_s = generation.prefilled_s or finished_s
    first_s = generation.first_token_s or finished_s
    decode_s = finished_s - first_s
    decoded = max(0, generation.n_answered - 1)
    return Timings(
        load_ms=load_ms,
        prefill_ms=(prefilled_s - generation.submitted_s) * 1e3,
        ttft_ms=(first_s - generation.submitted_s) * 1e3,
        decode_ms=decode_s * 1e3,
        decode_tps=decoded / decode_s if decode_s > 0 else 0.0,
    )
