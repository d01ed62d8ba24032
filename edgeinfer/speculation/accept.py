"""Which tokens of a draft become text: exactly those that the model, sampled as ever, would have written itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence


def accepted(draft: Sequence[int], choose: Callable[[int], int]) -> Iterator[int]:
    """The tokens that a step brings, one at a time: those of a deterministic draft that were right, then one more.

    `choose(row)` samples the model's row of logits after the first `row` tokens of the draft. It is asked once per
    token that comes out, in order, and never for a row after a wrong token: so the text, the sampler's history and its
    random draws are those of decoding without a draft. (That is the rejection rule of speculative sampling for a draft
    of probability one: a token is kept with the probability that the model gives it, and what replaces it is drawn
    from the others.)
    """
    for row in range(len(draft) + 1):
        token = choose(row)
        yield token
        if row == len(draft) or token != draft[row]:
            return
