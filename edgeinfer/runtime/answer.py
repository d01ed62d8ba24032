"""From a prompt's tokens to an answer's text: one request through the engine, streamed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count

from edgeinfer.errors import EdgeinferError
from edgeinfer.options import SamplingParams
from edgeinfer.runtime.engine import Engine
from edgeinfer.runtime.request import Generation
from edgeinfer.runtime.text import TextStream
from edgeinfer.types import Answer, FinishReason, Request, Timings, Tokens, Vocabulary

_request_ids = count()


@dataclass(frozen=True, slots=True)
class About:
    """What an answer says about where it comes from."""

    model: str
    kernels: str
    load_ms: float


class AnswerStream:
    """Iterate for the pieces of text; `answer` is there when the iteration has ended.

    The request is queued at once, so what is wrong with it is raised here, before any work. A consumer that stops
    early ends the request.
    """

    def __init__(
        self,
        engine: Engine,
        vocabulary: Vocabulary,
        prompt: Tokens,
        params: SamplingParams,
        *,
        about: About,
        max_tokens: int | None = None,
        stop: Sequence[str] = (),
    ) -> None:
        self._engine = engine
        self._vocabulary = vocabulary
        self._about = about
        self._text = TextStream(stop)
        self._shown: list[str] = []
        self._answer: Answer | None = None
        request = Request(
            next(_request_ids),
            prompt,
            params,
            # The context ends every answer; a number that no context reaches stands for "no limit".
            max_tokens=2**31 - 1 if max_tokens is None else max_tokens,
            end_tokens=vocabulary.end_tokens,
        )
        self._generation = engine.submit(request)

    @property
    def answer(self) -> Answer:
        """The whole answer with what it cost."""
        if self._answer is None:
            raise EdgeinferError("the answer is not there before its stream has ended")
        return self._answer

    def cancel(self) -> None:
        """End the request now; `answer` is what there is of it. Does nothing when it has ended."""
        if self._answer is None:
            self._engine.cancel(self._generation.request.id)
            self._answer = self._assemble("interrupted")

    @property
    def tokens(self) -> list[int]:
        """The answer's tokens so far, with the end token if there was one."""
        return self._generation.tokens[self._generation.prompt_tokens :]

    def __iter__(self) -> Iterator[str]:
        """Run the engine until this request ends."""
        generation, vocabulary = self._generation, self._vocabulary
        seen = generation.prompt_tokens
        try:
            while not self._text.stopped:
                for token in generation.tokens[seen:]:
                    seen += 1
                    yield from self._show(self._text.feed(vocabulary.piece(token)))
                if generation.finish_reason is not None:
                    break
                self._engine.step()
            rest = self._text.finish()
            yield from self._show(rest)
            self._engine.cancel(generation.request.id)  # a stop string ends the text, and the engine knows no text
            self._answer = self._assemble("stop" if self._text.stopped else generation.finish_reason or "stop")
        finally:
            self.cancel()

    def _show(self, text: str) -> Iterator[str]:
        if text:
            self._shown.append(text)
            yield text

    def _assemble(self, reason: FinishReason) -> Answer:
        generation = self._generation
        text, seed = "".join(self._shown), generation.sampler.seed
        return Answer(
            self._about.model,
            self._about.kernels,
            text,
            reason,
            seed,
            generation.usage,
            _timings(generation, self._about.load_ms),
        )


def _timings(generation: Generation, load_ms: float) -> Timings:
    """Prefill ends when the first token can be chosen; decoding is every token after the first."""
    finished_s = generation.finished_s or generation.submitted_s
    prefilled_s = generation.prefilled_s or finished_s
    first_s = generation.first_token_s or finished_s
    decode_s = finished_s - first_s
    decoded = max(0, generation.completion_tokens - 1)
    return Timings(
        load_ms=load_ms,
        prefill_ms=(prefilled_s - generation.submitted_s) * 1e3,
        ttft_ms=(first_s - generation.submitted_s) * 1e3,
        decode_ms=decode_s * 1e3,
        decode_tps=decoded / decode_s if decode_s > 0 else 0.0,
    )
