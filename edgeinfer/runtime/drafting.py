"""The drafts of an engine's requests: asks the sources, lets the controller choose, learns from what came of it.

Whatever a source does wrong stays here: one that raises is asked no more about that request, and a draft ends before a
token that is not in the vocabulary.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TypeVar

from edgeinfer.options import MAX_DRAFT_TOKENS
from edgeinfer.runtime.request import Generation
from edgeinfer.scheduling.policy import DEFAULT_STEPS, Limits
from edgeinfer.speculation.acceptance import Acceptance
from edgeinfer.speculation.controller import LEAST_SURVIVAL, Best, best_length, shared_lengths
from edgeinfer.speculation.cost import CostCurve
from edgeinfer.speculation.draft import Draft, Proposal, Source, most_draft_tokens

T = TypeVar("T")

_PROBE_TOKENS = 2
_TRIALS = 8
"""Proposals of a source that is not free before what came of them decides whether it is asked."""
_FIRST_PROBE_TOKENS = 32
"""A source that is not free and does not pay is tried again after so many tokens, then after twice as many, in whatever
answer: to try it can mean to let it read a long text first."""
_ASSUMED_DRAFT_COST = 0.5
"""Of a token of a source that is not free, before one was timed, where a pass of the model is 1."""
_WEIGHT = 0.3  # of the newest time


@dataclass(slots=True)
class SourceUse:
    """What came of a source, over all requests."""

    drafted_tokens: int = 0
    accepted_tokens: int = 0
    failures: int = 0
    """Requests that it was asked no more about, because it raised something."""
    proposals: int = 0
    token_s: float | None = None
    """What a token of its proposals takes."""
    probe_tokens: int = _FIRST_PROBE_TOKENS
    """After so many tokens of an answer it is tried again, where it is not free and does not pay."""


@dataclass(slots=True, eq=False)
class Following:
    """What the sources know of one request, and what is known of them there."""

    drafts: dict[str, Draft]
    acceptance: Acceptance
    n_observed: int = 0
    """Of the request's tokens."""
    proposals: list[Proposal] = field(default_factory=list)
    """Of the step that runs, verified or not: the tokens that come say which were right."""
    timed: set[str] = field(default_factory=set)
    """Sources whose first proposal, which may have to read the whole prompt, is behind them."""
    probe_at: int = 0


@dataclass(frozen=True, slots=True)
class Room:
    """What the next step has room for."""

    n_running: int
    """Requests, those whose prompts are being computed too."""
    n_free: int
    """Cells of the KV cache that none of them holds."""
    request_tokens: int
    """What a request may have at most."""
    limits: Limits

    def draft_tokens(self, generation: Generation) -> int:
        """The most tokens of a request's draft: a step brings one more than it accepts."""
        left = min(generation.max_tokens - generation.n_answered, self.request_tokens + 1 - len(generation.tokens))
        return left - 1 if generation.n_answered else 0

    def most_s(self, plain_s: float) -> float:
        """How long a step may take that takes `plain_s` without drafts."""
        target_ms = self.limits.latency_target_ms
        if self.n_running == 1:
            return math.inf  # nobody else waits for its end
        return DEFAULT_STEPS * plain_s if target_ms is None else target_ms / 1e3


class Drafting:
    """One per engine. Without sources it does nothing."""

    def __init__(
        self,
        sources: Sequence[Source],
        n_vocab: int,
        clock: Callable[[], float],
        *,
        curve: CostCurve | None = None,
        most_tokens: int = MAX_DRAFT_TOKENS,
    ) -> None:
        self._sources = {source.name: source for source in sources}
        self._n_vocab = n_vocab
        self._clock = clock
        self._most_tokens = min(most_tokens, MAX_DRAFT_TOKENS)
        self._followed: dict[Generation, Following] = {}
        self._general = Acceptance(lambda source, grade: self._sources[source].expected(grade))
        self.curve = curve or CostCurve()
        self.use = {name: SourceUse() for name in self._sources}
        """By the source's name."""
        self.was_stopped = False
        self._spent_s = self._plain_s = 0.0

    @property
    def is_on(self) -> bool:
        """Whether there is anybody to ask."""
        return bool(self._sources)

    def stop(self) -> None:
        """No more drafts: the model's memory turned out not to forget them."""
        self.was_stopped = True
        for generation in list(self._followed):
            self.forget(generation)
        self._sources = {}

    def forget(self, generation: Generation) -> None:
        """A request has ended."""
        following = self._followed.pop(generation, None)
        if following is not None:
            for name in list(following.drafts):
                self._end(following, name)

    def propose(self, decoding: Sequence[Generation], room: Room) -> dict[Generation, Proposal]:
        """The drafts to verify in a step that has a row of each of these requests anyway.

        Where steps have a target, a prompt has what its time leaves, and no draft takes that away.
        """
        if not self._sources or (len(decoding) < room.n_running and room.limits.latency_target_ms != math.inf):
            return {}
        n_rows = len(decoding)
        n_free = min(room.limits.max_step_tokens, room.n_free) - n_rows
        unit_s = self.curve.unit_s
        most_cost = room.most_s(self.curve.seconds(n_rows)) / unit_s if unit_s else math.inf
        share = min(n_free, self._most_tokens, most_draft_tokens(n_rows))
        chosen: dict[Generation, tuple[Proposal, list[float]]] = {}
        for generation in decoding:
            most = min(share, room.draft_tokens(generation))
            if most < 1:
                continue
            best = self._best(self._follow(generation), generation.n_answered, most, n_rows, most_cost)
            if best is not None:
                chosen[generation] = best
        survivals = [survival for _, survival in chosen.values()]
        lengths = shared_lengths(survivals, n_rows, n_free, self.curve, most_cost) if survivals else []
        drafts = {}
        for (generation, (proposal, _)), length in zip(chosen.items(), lengths, strict=True):
            if length:
                drafts[generation] = _shortened(proposal, length)
        return drafts

    @property
    def speed_up(self) -> float | None:
        """How many times faster answers were written than without drafts, as far as this can be told."""
        return self._plain_s / self._spent_s if self._spent_s else None

    def observe_step(self, n_answers: int, n_rows: int, n_new: int, seconds: float) -> None:
        """A pass over one row of every answer and over drafts, `n_rows` in all, brought so many tokens."""
        self.curve.observe(n_rows, seconds)
        if self.curve.unit_s is not None:
            self._spent_s += seconds
            self._plain_s += n_new / n_answers * self.curve.cost(n_answers) * self.curve.unit_s

    def learn(self, generation: Generation, draft: Proposal | None, new: Sequence[int]) -> None:
        """A step brought these tokens, of which all but the last were drafted."""
        if draft is not None:
            generation.drafted_tokens += len(draft.tokens)
            generation.accepted_tokens += len(new) - 1
            self.use[draft.source].drafted_tokens += len(draft.tokens)
            self.use[draft.source].accepted_tokens += len(new) - 1
        following = self._followed.get(generation)
        if following is None:
            return
        for proposal in following.proposals:
            for guess, grade, token in zip(proposal.tokens, proposal.grades, new, strict=False):
                following.acceptance.observe(proposal.source, grade, guess == token)
                if guess != token:
                    break
        following.proposals.clear()

    def _follow(self, generation: Generation) -> Following:
        """What the sources know of a request, up to its last token."""
        following = self._followed.get(generation)
        if following is None:
            following = self._followed[generation] = Following({}, Acceptance(general=self._general))
            for name, source in self._sources.items():
                draft = self._guarded(following, name, partial(source.open, generation.request))
                if draft is not None:
                    following.drafts[name] = draft
        new = generation.tokens[following.n_observed :]
        following.n_observed = len(generation.tokens)
        for name, draft in list(following.drafts.items()):
            self._guarded(following, name, partial(draft.observe, new))
        return following

    def _best(
        self, following: Following, n_answered: int, most_tokens: int, n_rows: int, most_cost: float
    ) -> tuple[Proposal, list[float]] | None:
        """The proposal that promises most, and the probability of each of its tokens to become text."""
        best, found = Best(0, 0.0), None
        following.proposals.clear()  # of a step that the cache had no room for
        for name in sorted(following.drafts, key=lambda name: not self._sources[name].is_free):
            wanted, is_probe = most_tokens, False
            if not self._sources[name].is_free:
                wanted = self._worth_asking(following, name, wanted, n_rows, most_cost, best)
                use = self.use[name]
                is_probe = wanted == 0 and n_answered >= max(following.probe_at, use.probe_tokens)
                if is_probe or (wanted == 0 and use.proposals < _TRIALS):
                    wanted = min(_PROBE_TOKENS, most_tokens)
                elif wanted:
                    use.probe_tokens = _FIRST_PROBE_TOKENS
            proposal = self._ask(following, name, wanted) if wanted > 0 else None
            if proposal is None:  # it may still be reading the text: ask again
                continue
            if is_probe:
                use.probe_tokens *= 2
                following.probe_at = n_answered + use.probe_tokens
            following.proposals.append(proposal)
            survive = partial(following.acceptance.survival, name, proposal.grades, LEAST_SURVIVAL)
            survival = self._guarded(following, name, survive) or []
            promised = best_length(survival, n_rows, self.curve, most_cost=most_cost)
            if promised.rate > best.rate:
                best, found = promised, (proposal, survival)
        return found if best.length else None

    def _worth_asking(
        self, following: Following, name: str, most_tokens: int, n_rows: int, most_cost: float, best: Best
    ) -> int:
        """How many tokens to ask a source for that takes time; none where `best` promises more without it."""
        token_s, unit_s = self.use[name].token_s, self.curve.unit_s
        draft_cost = token_s / unit_s if token_s is not None and unit_s else _ASSUMED_DRAFT_COST
        chance = following.acceptance.average(name)
        survival = [chance**n for n in range(1, most_tokens + 1)]
        promised = best_length(survival, n_rows, self.curve, most_cost=most_cost, draft_cost=draft_cost)
        return promised.length if promised.rate > best.rate else 0

    def _ask(self, following: Following, name: str, most_tokens: int) -> Proposal | None:
        """A source's proposal, cut to what can be one."""
        draft, use = following.drafts[name], self.use[name]
        is_free = self._sources[name].is_free
        started_s = 0.0 if is_free else self._clock()
        proposal = self._guarded(following, name, lambda: draft.propose(most_tokens))
        spent_s = 0.0 if is_free else self._clock() - started_s
        if self.curve.unit_s is not None:
            self._spent_s += spent_s
        if proposal is None:
            return None
        use.proposals += 1
        if not is_free and name in following.timed and proposal.tokens:
            token_s = spent_s / len(proposal.tokens)
            use.token_s = token_s if use.token_s is None else use.token_s + _WEIGHT * (token_s - use.token_s)
        following.timed.add(name)
        return self._guarded(following, name, lambda: self._sound(proposal, name, most_tokens))

    def _sound(self, proposal: Proposal, name: str, most_tokens: int) -> Proposal | None:
        """The part of a proposal that the engine can run; its grades count for the source that was asked."""
        length = min(len(proposal.tokens), len(proposal.grades), most_tokens)
        for i, token in enumerate(proposal.tokens[:length]):
            if not 0 <= token < self._n_vocab:
                length = i
                break
        if length == 0:
            return None
        if length == len(proposal.tokens) == len(proposal.grades) and proposal.source == name:
            return proposal
        return _shortened(replace(proposal, source=name), length)

    def _guarded(self, following: Following, name: str, act: Callable[[], T]) -> T | None:
        """What a source does; None where it fails, and then it is asked no more about this request."""
        try:
            return act()
        except Exception:
            self.use[name].failures += 1
            self._end(following, name)
            return None

    def _end(self, following: Following, name: str) -> None:
        """Let a source free what it holds for a request."""
        draft = following.drafts.pop(name, None)
        if draft is not None:
            with contextlib.suppress(Exception):
                draft.close()


def _shortened(proposal: Proposal, length: int) -> Proposal:
    if length == len(proposal.tokens):
        return proposal
    return replace(proposal, tokens=proposal.tokens[:length], grades=proposal.grades[:length])
