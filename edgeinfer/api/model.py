"""A loaded model: text in, text out."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np

from edgeinfer.api.adapters import LoadedAdapter, add_to
from edgeinfer.api.answers import Answers
from edgeinfer.api.draft_model import DraftModel, open_draft
from edgeinfer.api.draft_plan import DraftPlan
from edgeinfer.api.drafts import CostFile, draft_notes, open_drafting
from edgeinfer.api.pass_work import pass_work
from edgeinfer.api.prefix_cache import open_prefix_cache
from edgeinfer.api.vocabulary import Wrap
from edgeinfer.cache.prefix import CLOSE_WAIT_S, DiskPrefixCache
from edgeinfer.errors import UsageError
from edgeinfer.gguf_file.describe import readable
from edgeinfer.gguf_file.header import Header
from edgeinfer.native.context import NativeBackend
from edgeinfer.native.model import NativeModel
from edgeinfer.native.sampler import NativeSamplerFactory
from edgeinfer.options import RuntimeOptions, SamplingParams
from edgeinfer.runtime.answer import About, AnswerStream, Reply
from edgeinfer.runtime.engine import Engine
from edgeinfer.runtime.memory import Plan
from edgeinfer.runtime.prompt import chat_tokens, no_template, raw_tokens
from edgeinfer.runtime.session import ChatSession, OnOverflow, TurnSettings
from edgeinfer.runtime.template import ChatTemplate, Message
from edgeinfer.scheduling.policy import Limits
from edgeinfer.speculation.cost import CostCurve
from edgeinfer.types import Answer, Constraint, Placement, Tokens, Vocabulary

if TYPE_CHECKING:  # imported for the first answer that has to match something
    from edgeinfer.api.structure import Structures
    from edgeinfer.grammar.nodes import Grammar

# A file's recommendations (general.sampling.*, src/llama-arch.cpp) by their name there and ours.
_SAMPLING_KEYS = {
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "xtc_probability": "xtc_probability",
    "xtc_threshold": "xtc_threshold",
    "penalty_last_n": "repeat_last_n",
    "penalty_repeat": "repeat_penalty",
    "mirostat": "mirostat",
    "mirostat_tau": "mirostat_tau",
    "mirostat_eta": "mirostat_eta",
}


def open_model(
    native: NativeModel,
    header: Header,
    plan: Plan,
    options: RuntimeOptions,
    *,
    adapters: Sequence[LoadedAdapter],
    vocabulary_over: Wrap,
    draft: DraftPlan | None,
    limits: Limits,
    remember_shared_only: bool,
    kernels_note: str,
    started_s: float,
) -> Model:
    """What `load` makes of the weights, which belong to the result; they are freed when it fails."""
    max_sequences = limits.max_running
    with contextlib.ExitStack() as opened:
        opened.enter_context(native)
        if adapters:
            add_to(native, adapters, options)
        # Beginnings of texts outlive their requests in sequences of their own, where those cost nothing.
        kept = 0 if max_sequences == 1 or native.is_stateful else max_sequences
        backend = opened.enter_context(NativeBackend(native, options, max_sequences=max_sequences + kept))
        # Other kernels, and GPUs, take other times and round otherwise: what they leave in the KV cache is not mixed.
        build = native.kernels.build() + ("" if plan.placement == Placement() else f" {plan.placement}")
        cache = open_prefix_cache(header, backend, options, build, adapters) if options.prefix_cache else None
        drafter = None
        if draft is not None and not native.is_stateful:
            repack = plan.placement.repack
            drafter = opened.enter_context(open_draft(draft, backend, options, max_sequences, repack=repack))
        costs = CostFile.of(header, backend, options, build, adapters)
        curve = CostCurve(costs.read())
        answers = Answers.of(cache, options, backend.n_vocab)
        engine = Engine(
            backend,
            NativeSamplerFactory(native.vocabulary),
            cache,
            limits=replace(limits, work=pass_work(header, plan.placement)),
            remember_shared_only=remember_shared_only,
            drafting=open_drafting(
                options,
                backend,
                curve,
                drafter.source if drafter else None,
                answers.memory if answers else None,
            ),
        )
        vocabulary = vocabulary_over(native.vocabulary)
        load_ms = (time.perf_counter() - started_s) * 1e3
        loaded = Model(
            header,
            plan,
            options,
            native,
            vocabulary,
            backend,
            engine,
            cache,
            costs,
            answers,
            drafter,
            kernels_note=kernels_note,
            load_ms=load_ms,
        )
        opened.pop_all()
    return loaded


class Model:
    """A loaded model: text in, text out. `load` makes one."""

    def __init__(
        self,
        header: Header,
        plan: Plan,
        options: RuntimeOptions,
        native: NativeModel,
        vocabulary: Vocabulary,
        backend: NativeBackend,
        engine: Engine,
        prefix_cache: DiskPrefixCache | None,
        costs: CostFile,
        answers: Answers | None,
        drafter: DraftModel | None,
        *,
        kernels_note: str,
        load_ms: float,
    ) -> None:
        self.header = header
        self.plan = plan
        """How the model was fitted to the machine."""
        self.options = options
        """Those that it runs with, after everything that was left open is decided."""
        self.native = native
        self.kernels = native.kernels.name
        """The library that runs the model."""
        self.kernels_note = kernels_note
        """Why it is not another one."""
        self.backend = backend
        self.prefix_cache = prefix_cache
        self._costs = costs
        self._answers = answers
        self.drafter = drafter
        self.load_ms = load_ms
        self.vocabulary = vocabulary
        self.engine = engine
        self.sampling = _recommended_sampling(header)
        """The model's own recommendations over llama.cpp's defaults."""
        self.template = self._chat_template()
        self._structures: Structures | None = None
        self._about = About(str(header.path), self.kernels, load_ms)

    def stream(
        self,
        prompt: str | Sequence[Message] | Tokens,
        *,
        system: str | None = None,
        raw: bool = False,
        params: SamplingParams | None = None,
        max_tokens: int | None = None,
        stop: Sequence[str] = (),
        json_schema: Any = None,
        grammar: str | Grammar | None = None,
        logprobs: int | None = None,
    ) -> AnswerStream:
        """Begin an answer; iterate over the result for the text, then read its `answer`.

        A text is what the user says, through the chat template; with `raw`, or when the model has no template and there
        is no system prompt, it is continued as it stands. `max_tokens` None goes on until the model ends or the context
        is full. A `json_schema` (what JSON makes of one, or its text) or a `grammar` (GBNF) is what the answer matches
        when it has ended by itself. `logprobs` asks for the probability of every token and of so many likeliest ones.
        Raises ContextOverflowError before any work when the prompt does not fit, UnusableInputError for a schema or a
        grammar that cannot be followed.
        """
        constraint = self.constraint(json_schema, grammar)
        tokens = self.tokens(prompt, system=system, raw=raw)
        turn = TurnSettings(params or self.sampling, max_tokens, tuple(stop), constraint=constraint, logprobs=logprobs)
        return self._begin(tokens, turn, raw=raw or self.template is None)

    def generate(self, prompt: str | Sequence[Message] | Tokens, **options: Any) -> Answer:
        """The whole answer at once; takes what `stream` takes."""
        stream = self.stream(prompt, **options)
        for _ in stream:
            pass
        return stream.answer

    def tokens(
        self, prompt: str | Sequence[Message] | Tokens, *, system: str | None = None, raw: bool = False
    ) -> Tokens:
        """The tokens that `stream` would run for a prompt."""
        if isinstance(prompt, np.ndarray):
            return prompt
        if not isinstance(prompt, str):
            return chat_tokens(self.vocabulary, self.template, prompt)
        if raw or (self.template is None and system is None):
            return raw_tokens(self.vocabulary, prompt)
        messages = [{"role": "system", "content": system}] if system else []
        return chat_tokens(self.vocabulary, self.template, [*messages, {"role": "user", "content": prompt}])

    def chat(
        self,
        *,
        system: str | None = None,
        params: SamplingParams | None = None,
        max_tokens: int | None = None,
        stop: Sequence[str] = (),
        on_overflow: OnOverflow = "error",
    ) -> ChatSession:
        """Begin a conversation; "truncate" drops its oldest turns where the context is full.

        Raises UsageError for a model without a chat template.
        """
        if self.template is None:
            raise no_template()
        return ChatSession(
            self._begin,
            self.vocabulary,
            self.template,
            n_ctx=self.backend.n_ctx,
            settings=TurnSettings(params or self.sampling, max_tokens, tuple(stop)),
            system=system,
            on_overflow=on_overflow,
        )

    def constraint(self, json_schema: Any = None, grammar: str | Grammar | None = None) -> Constraint | None:
        """What a new answer is held to, None for nothing; raises what `Structures.constraint` does."""
        if json_schema is None and grammar is None:
            return None
        if self._structures is None:
            from edgeinfer.api.structure import Structures

            self._structures = Structures(self.vocabulary)
        return self._structures.constraint(json_schema, grammar)

    def interrupt(self) -> None:
        """End the running answers soon, in the middle of a prompt too; from any thread."""
        self.engine.interrupt()
        if self.drafter is not None:
            self.drafter.backend.abort()

    def finish_writing(self, wait_s: float = CLOSE_WAIT_S) -> None:
        """Wait until the prefix cache is written, for a process that is about to end, and no longer than `wait_s`."""
        self._costs.write(self.engine.drafting.curve)
        if self._answers is not None:
            self._answers.write()
        if self.prefix_cache is not None:
            self.prefix_cache.close(wait_s)

    def notes(self) -> Iterator[str]:
        """What `-v` tells when the answers are there: problems, and what drafts brought."""
        if self.prefix_cache is not None and self.prefix_cache.problem:
            yield self.prefix_cache.problem
        yield from draft_notes(self.engine.drafting, self.backend.capabilities)

    def close(self) -> None:
        """Free everything."""
        self.finish_writing()
        if self.drafter is not None:
            self.drafter.close()
        if self._structures is not None:
            self._structures.close()
        self.backend.close()
        self.native.close()

    def __enter__(self) -> Model:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def _begin(self, tokens: Tokens, turn: TurnSettings, *, raw: bool = False) -> AnswerStream:
        """Begin an answer; a `raw` one has no place for reasoning, nor has one that must match something."""
        reply = Reply(
            self.engine,
            self.vocabulary,
            tokens,
            turn.params,
            max_tokens=turn.max_tokens,
            stop=turn.stop,
            keep_answer=turn.keep_answer,
            constraint=turn.constraint,
            logprobs=turn.logprobs,
        )
        return AnswerStream(self.engine, reply, self._about, raw=raw or turn.constraint is not None)

    def _chat_template(self) -> ChatTemplate | None:
        source = readable(self.header.metadata.text("tokenizer.chat_template"))
        bos, eos = (
            "" if token is None else self.vocabulary.text(token) for token in (self.vocabulary.bos, self.vocabulary.eos)
        )
        return ChatTemplate(source, bos=bos, eos=eos) if source else None


def _recommended_sampling(header: Header) -> SamplingParams:
    """llama.cpp's defaults with the file's `general.sampling.*` over them; values that cannot be are ignored."""
    params = SamplingParams()
    for key, name in _SAMPLING_KEYS.items():
        value = header.metadata.number(f"general.sampling.{key}")
        if value is None:
            continue
        with contextlib.suppress(UsageError, ValueError, OverflowError):
            params = replace(params, **{name: type(getattr(params, name))(value)})
    return params
