"""A conversation as data: what the model is shown of it, and what is taken back or dropped."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgeinfer.errors import UsageError
from edgeinfer.runtime.conversation import Conversation, oldest_kept


def talk(n_turns, **options):
    said = [{"role": role, "content": f"{role} {i}"} for i in range(n_turns) for role in ("user", "assistant")]
    return Conversation(messages=said, **options)


def contents(conversation):
    return [message["content"] for message in conversation.shown()]


def test_the_system_prompt_stays_when_turns_are_dropped():
    assert contents(talk(2, system="be brief", n_dropped=2)) == ["be brief", "user 1", "assistant 1"]


def test_undo_takes_the_last_turn_back():
    conversation = talk(2)
    assert conversation.undo() == "user 1"
    assert contents(conversation) == ["user 0", "assistant 0"]
    assert conversation.undo() == "user 0"
    with pytest.raises(UsageError):
        conversation.undo()


def test_undo_of_all_that_is_shown_shows_the_turn_before_again():
    conversation = talk(3, n_dropped=4)
    conversation.undo()
    assert contents(conversation) == ["user 1", "assistant 1"]


def test_reasoning_is_given_to_the_template_under_the_names_that_templates_know():
    answer = {"role": "assistant", "content": "Yes.", "reasoning": "Hm."}
    (shown,) = Conversation(messages=[answer]).shown()
    assert shown == {"role": "assistant", "content": "Yes.", "reasoning_content": "Hm.", "thinking": "Hm."}


@given(st.lists(st.integers(1, 50), min_size=1, max_size=20), st.integers(0, 300))
def test_as_few_turns_as_can_be_are_dropped(lengths, most_tokens):
    starts = list(range(0, 2 * len(lengths), 2))

    def count(start):
        return sum(lengths[start // 2 :])

    kept = oldest_kept(starts, count, most_tokens)
    assert kept == next((s for s in starts if count(s) <= most_tokens), starts[-1])
