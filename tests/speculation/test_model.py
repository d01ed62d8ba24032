"""A model that drafts: what it proposes is its own greedy text, and its cache is what it would be without proposals."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgeinfer.options import SamplingParams
from edgeinfer.runtime.fake import N_VOCAB, FakeBackend
from edgeinfer.speculation.model import MAX_READ_TOKENS, ModelSource
from edgeinfer.types import Request, Row


class Sure(FakeBackend):
    """So sure of its tokens that a proposal does not end early."""

    def _logits(self, state):
        return 10 * super()._logits(state)


def request(tokens, end_tokens=frozenset()):
    return Request(0, np.array(tokens, np.int32), SamplingParams(), 50, end_tokens)


def greedy(tokens, count):
    """What the model alone would write."""
    backend, text = Sure(n_ctx=1000, max_batch_tokens=500), list(tokens)
    logits = backend.forward([Row(0, np.array(text, np.int32), 0, len(text) - 1)])
    for _ in range(count):
        text.append(int(logits[-1].argmax()))
        logits = backend.forward([Row(0, np.array(text[-1:], np.int32), len(text) - 1, 0)])
    return text[len(tokens) :]


def draft_of(source, text):
    draft = source.open(request(text))
    draft.observe(text)
    return draft


def test_it_proposes_its_greedy_text_graded_by_probability():
    text = [1, 2, 3, 4]
    source = ModelSource("small", Sure(), N_VOCAB)
    proposal = draft_of(source, text).propose(7)
    assert proposal.source == "small"
    assert list(proposal.tokens) == greedy(text, 7)
    assert len(proposal.grades) == 7
    assert min(proposal.grades) > 5


def test_a_grade_means_the_probability_that_the_model_gave_the_token():
    class Flat(FakeBackend):
        def _logits(self, state):
            line = np.full(N_VOCAB, -np.inf, np.float32)
            line[[7, 9]] = np.log([0.75, 0.25])
            return line

    source = ModelSource("flat", Flat(), N_VOCAB)
    proposal = draft_of(source, [1, 2]).propose(10)
    assert proposal.tokens == (7, 7, 7, 7)[: len(proposal.tokens)]
    assert 1 < len(proposal.tokens) < 10  # four of them are right together less than half of the time
    assert [source.expected(grade) for grade in proposal.grades] == pytest.approx([0.95 * 0.75] * len(proposal.grades))
    expected = [source.expected(grade) for grade in range(16)]
    assert expected == sorted(expected)
    assert 0 <= expected[0] <= expected[-1] <= 1


def test_a_proposal_ends_with_the_token_that_ends_the_text():
    text = [1, 2, 3, 4]
    end = greedy(text, 5)[2]
    source = ModelSource("small", Sure(), N_VOCAB)
    draft = source.open(request(text, frozenset({end})))
    draft.observe(text)
    assert list(draft.propose(9).tokens) == greedy(text, 3)


def test_tokens_that_the_target_does_not_have_are_not_proposed():
    source = ModelSource("small", Sure(), 10)
    assert max(draft_of(source, [1, 2, 3]).propose(20).tokens) < 10


@settings(max_examples=80, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 8), st.integers(0, 8), st.booleans()), max_size=12), st.integers(1, 70))
def test_after_any_rejection_the_cache_is_that_of_a_text_never_drafted(steps, n_prompt):
    text = [token % 50 for token in range(n_prompt)]
    backend = Sure(n_ctx=1000)
    draft = draft_of(ModelSource("small", backend, N_VOCAB), text)
    for asked, kept, goes_on in steps:
        while (proposal := draft.propose(asked)) is None:
            assert backend.held(0) == text[: len(backend.held(0))]
        assert list(proposal.tokens) == greedy(text, len(proposal.tokens))
        new = [*proposal.tokens[:kept], 200 if goes_on else proposal.tokens[-1]]
        text += new
        draft.observe(new)
    while draft.propose(1) is None:
        pass
    assert backend.held(0) == text
    plain = Sure(n_ctx=1000, max_batch_tokens=500)
    plain.forward([Row(0, np.array(text, np.int32), 0, len(text))])
    assert [cell.state for cell in backend._sequences[0]] == [cell.state for cell in plain._sequences[0]]


def test_a_long_text_is_read_in_pieces():
    backend = Sure(n_ctx=1000)
    text = [token % 50 for token in range(3 * MAX_READ_TOKENS + 5)]
    draft = draft_of(ModelSource("small", backend, N_VOCAB), text)
    assert [draft.propose(4) is None for _ in range(4)] == [True, True, True, False]
    assert backend.forwards == 4 + 3


def test_what_an_ended_request_read_serves_the_next_one():
    backend = Sure(n_ctx=1000, max_sequences=2)
    source = ModelSource("small", backend, N_VOCAB)
    first = draft_of(source, [1, 2, 3, 4, 5])
    first.propose(3)
    first.close()
    computed = backend.computed_tokens
    second = draft_of(source, [1, 2, 3, 4, 9])
    assert list(second.propose(1).tokens) == greedy([1, 2, 3, 4, 9], 1)
    assert backend.computed_tokens == computed + 1


def test_there_are_as_many_drafts_as_sequences():
    source = ModelSource("small", Sure(max_sequences=2), N_VOCAB)
    drafts = [source.open(request([token])) for token in range(3)]
    assert [draft is None for draft in drafts] == [False, False, True]
    drafts[0].close()
    assert source.open(request([7])) is not None


def test_a_full_cache_forgets_ended_requests_first_and_then_gives_up():
    backend = Sure(n_ctx=40, max_sequences=2)
    source = ModelSource("small", backend, N_VOCAB)
    ended = draft_of(source, list(range(20)))
    ended.propose(1)
    ended.close()
    draft = draft_of(source, list(range(100, 130)))
    assert list(draft.propose(3).tokens) == greedy(range(100, 130), 3)
    draft.observe(list(range(20)))
    assert draft.propose(3) is None
    assert draft.propose(3) is None
    assert backend.held(0) == backend.held(1) == []


@pytest.mark.parametrize("options", [{"can_trim": False}, {"window": 4}], ids=["no trimming", "window"])
def test_memory_that_does_not_take_tokens_back_is_read_anew(options):
    text = list(range(12))
    draft = draft_of(ModelSource("small", Sure(n_ctx=1000, **options), N_VOCAB), text)
    for _ in range(3):
        assert list(draft.propose(6).tokens) == greedy(text, 6)
        text.append(77)
        draft.observe([77])


def test_an_aborted_pass_is_no_proposal_and_leaves_nothing_behind():
    backend = Sure(n_ctx=1000)
    source = ModelSource("small", backend, N_VOCAB)
    draft = draft_of(source, [1, 2, 3, 4])
    backend.abort()
    assert draft.propose(3) is None
    assert backend.held(0) == []
    draft.close()
    assert list(draft_of(source, [1, 2, 3, 4]).propose(3).tokens) == greedy([1, 2, 3, 4], 3)
