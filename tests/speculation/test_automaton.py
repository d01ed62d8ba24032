"""What followed the longest end of a text that stood in it before: against a search through the whole text."""

import time

from hypothesis import given, settings
from hypothesis import strategies as st

from edgeinfer.speculation.automaton import SuffixAutomaton

TEXTS = st.lists(st.integers(0, 2), max_size=60)


def followers(text, length):
    """What followed each earlier place where the text's last `length` tokens stand, in order."""
    end = text[len(text) - length :]
    return [text[i + length] for i in range(len(text) - length) if text[i : i + length] == end]


def longest(text):
    return max((n for n in range(len(text)) if n and followers(text, n)), default=0)


@settings(deadline=None)
@given(TEXTS, st.integers(1, 7))
def test_it_finds_the_longest_match_and_its_most_frequent_follower(text, piece):
    automaton = SuffixAutomaton()
    for start in range(0, len(text), piece):
        automaton.extend(text[start : start + piece])
        known = text[: start + piece]
        assert automaton.matched == longest(known)
        guesses = list(automaton.continuation(1))
        assert bool(guesses) == (automaton.matched > 0)
        for guess in guesses:
            found = followers(known, automaton.matched)
            assert guess.matched == automaton.matched
            assert (guess.tries == guess.seen) == (len(set(found)) == 1)
            if automaton.matched <= 16:  # longer chains of ends are not all counted
                assert guess.seen == found.count(guess.token)


@given(TEXTS)
def test_what_it_guesses_further_on_stood_there_too(text):
    automaton = SuffixAutomaton()
    automaton.extend(text)
    guesses = list(automaton.continuation(20))
    for i, guess in enumerate(guesses):
        said = text + [g.token for g in guesses[: i + 1]]
        part = said[len(said) - 1 - guess.matched :]
        assert any(text[j : j + len(part)] == part for j in range(len(text)))


def test_a_copied_text_is_guessed_to_its_end():
    words = list(range(100, 160))
    automaton = SuffixAutomaton()
    automaton.extend([*words, 7, *words[:3]])
    guesses = list(automaton.continuation(40))
    assert [g.token for g in guesses] == words[3:43]
    assert [g.matched for g in guesses] == list(range(3, 43))


def test_a_text_that_repeats_itself_is_guessed_beyond_its_end():
    automaton = SuffixAutomaton()
    automaton.extend([1, 2, 3] * 5)
    assert [g.token for g in automaton.continuation(10)] == [1, 2, 3, 1, 2, 3, 1, 2, 3, 1]


def test_nothing_is_guessed_of_what_never_stood_there():
    automaton = SuffixAutomaton()
    assert list(automaton.continuation(5)) == []
    automaton.extend([1, 2, 3])
    assert list(automaton.continuation(5)) == []


def test_the_work_per_token_does_not_grow_with_the_text():
    """In processor time, with much to spare: what matters is that no kind of text is quadratic."""
    for text in ([1] * 20_000, [1, 2] * 10_000, [i * i % 97 for i in range(20_000)]):
        automaton = SuffixAutomaton()
        started_s = time.process_time()
        automaton.extend(text)
        assert time.process_time() - started_s < 2
