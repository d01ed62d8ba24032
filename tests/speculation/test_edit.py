"""What is proposed where a text is written again with changes."""

import pytest

from edgeinfer.speculation.edit import Edit, EditDraft

SOURCE = list(range(100, 140))


def after(written, *, source=SOURCE, end_tokens=frozenset()):
    draft = EditDraft(end_tokens)
    draft.observe([1, 2, *source, 3, 4])
    draft.observe(written)
    return draft


def proposed(written, most=63, **options):
    proposal = after(written, **options).propose(most)
    return None if proposal is None else list(proposal.tokens)


def test_a_changed_token_is_taken_for_one_and_the_copy_goes_on_behind_it():
    assert proposed([*SOURCE[:12], 7], 4) == SOURCE[13:17]


@pytest.mark.parametrize(("change", "resumed"), [([7, 8], 13), ([7, 8, 9], 14), ([], 15), ([7], 20)])
def test_a_copy_resumes_near_the_change(change, resumed):
    """Where a token of it comes again: after something else, or after something was left out."""
    assert proposed([*SOURCE[:12], *change, SOURCE[resumed]], 5) == SOURCE[resumed + 1 : resumed + 6]


def test_the_nearest_place_that_most_of_the_last_tokens_fit_is_taken():
    source = [*SOURCE[:14], 50, 51, 52, 60, 51, 70, 80, 90]  # 51 twice behind the change
    assert proposed([*source[:12], 7, 51], 1, source=source) == [52]
    assert proposed([*source[:12], 7, 60, 51], 1, source=source) == [70]


def test_a_change_is_made_again():
    name = [60, 61]
    source = [*SOURCE[:10], *name, *SOURCE[10:20], *name, *SOURCE[20:30], *name, *SOURCE[30:]]
    new = [7, 8, 9]
    once = [*SOURCE[:10], *new, *SOURCE[10:20]]
    assert proposed(once, 5, source=source) == [*new, *SOURCE[20:22]]
    twice = [*once, *new, *SOURCE[20:28]]
    proposal = after(twice, source=source).propose(6)
    assert list(proposal.tokens) == [*SOURCE[28:30], *new, SOURCE[30]]
    edit = Edit()
    assert edit.expected(proposal.grades[2]) > edit.expected(after(once, source=source).propose(1).grades[0])


@pytest.mark.parametrize(
    "written",
    [
        [],
        [5, 6, 7],
        SOURCE[:20],  # nothing has changed: that is for lookup
        [*SOURCE[:5], 7],  # too short a copy
        [*SOURCE[:12], 7, 8],  # nobody knows where it goes on
        [*SOURCE[:12], 7, *SOURCE[13:20]],  # the change is long over
        [*SOURCE[:12], *range(1000, 1040)],  # no change but something else
        SOURCE,
    ],
)
def test_nothing_is_proposed(written):
    assert proposed(written) is None


def test_a_proposal_ends_with_an_end_token_and_is_no_longer_than_twice_the_copy():
    assert proposed([*SOURCE[:12], 7], end_tokens=frozenset({SOURCE[15]})) == SOURCE[13:16]
    assert len(proposed([*SOURCE[:9], 7], source=[*SOURCE, *range(200, 300)])) == 19


def test_every_grade_has_an_expected_acceptance():
    assert all(0 < Edit().expected(grade) < 1 for grade in range(9))


def test_tokens_come_one_by_one_or_together():
    written = [*SOURCE[:12], 7, 8, *SOURCE[14:16]]
    draft = after([])
    for token in written:
        draft.observe([token])
        draft.propose(8)
    assert draft.propose(8).tokens == after(written).propose(8).tokens
