"""What is proposed from earlier answers, and which of them are kept."""

import random

import pytest

from edgeinfer.speculation.memory import MAX_TOKENS, Memory, MemoryDraft

EARLIER = list(range(100, 130))


def draft_of(memory, written, *, n_prompt=3, end_tokens=frozenset()):
    draft = MemoryDraft(memory, n_prompt, end_tokens)
    draft.propose(1)  # takes the answers in
    draft.observe([*range(n_prompt), *written[:1]])
    for token in written[1:]:
        draft.observe([token])
    return draft


def proposed(memory, written, most=63, **options):
    proposal = draft_of(memory, written, **options).propose(most)
    return None if proposal is None else list(proposal.tokens)


def test_an_answer_that_goes_like_an_earlier_one_is_guessed_from_it():
    memory = Memory([[1, 2, 3, 4, 5, 6, 7, 8], EARLIER])
    assert proposed(memory, [7, 50, *EARLIER[:3]]) == EARLIER[3:10]
    assert proposed(memory, EARLIER[5:9], 2) == EARLIER[9:11]


@pytest.mark.parametrize("written", [[], [50], [*EARLIER[:5], 50], EARLIER])
def test_nothing_is_guessed_where_nothing_fits(written):
    assert proposed(Memory([EARLIER]), written) is None


def test_the_prompt_does_not_count():
    draft = MemoryDraft(Memory([EARLIER]), 5, frozenset())
    draft.observe(EARLIER[:2])
    draft.observe(EARLIER[2:5])
    assert draft.propose(8) is None
    draft.observe(EARLIER[5:6])
    assert list(draft.propose(8).tokens) == EARLIER[6:9]


def test_a_guess_ends_with_the_earlier_answer_and_with_an_end_token():
    memory = Memory([EARLIER, [7] * 9])
    assert proposed(memory, EARLIER[:-2]) == EARLIER[-2:]
    assert proposed(memory, EARLIER[:10], end_tokens=frozenset({EARLIER[12]})) == EARLIER[10:13]


def test_an_answer_that_has_ended_helps_the_next_one():
    memory = Memory()
    draft = draft_of(memory, EARLIER)
    assert not memory.has_changed
    draft.close()
    assert memory.has_changed
    assert proposed(memory, EARLIER[:4], 3) == EARLIER[4:7]


def test_the_newest_answers_are_kept_each_once_and_short_ones_never():
    rng = random.Random(1)
    answers = [[rng.randrange(1000) for _ in range(500)] for _ in range(40)]
    memory = Memory(answers)
    memory.add([1, 2, 3])
    memory.add(answers[-2])
    assert memory.answers[-1] == tuple(answers[-2])
    assert memory.answers.count(tuple(answers[-2])) == 1
    assert sum(len(answer) + 1 for answer in memory.answers) <= MAX_TOKENS
    assert set(memory.answers) <= set(map(tuple, answers[-17:]))


def test_more_answers_than_are_kept_do_not_pile_up_and_still_help():
    rng = random.Random(2)
    memory = Memory()
    draft = draft_of(memory, [1, 2])
    for _ in range(60):
        memory.add([rng.randrange(1000) for _ in range(500)])
        for _ in range(3):
            memory.read_on()
            assert memory._n_read + len(memory._unread) <= 2 * MAX_TOKENS
    draft.observe([3])
    draft.propose(4)
    memory.add(EARLIER)
    for _ in range(100):
        memory.read_on()
    assert proposed(memory, EARLIER[:4], 3) == EARLIER[4:7]


def test_an_answer_longer_than_all_that_is_kept_leaves_its_end():
    memory = Memory([list(range(3 * MAX_TOKENS))])
    assert memory.answers[-1][-1] == 3 * MAX_TOKENS - 1
    assert len(memory.answers[-1]) < MAX_TOKENS
