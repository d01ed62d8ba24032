"""Turns what an adapter adds to the checkpoint's weights into pairs of tensors for those of the GGUF file.

A tensor of the file is made of rows of the checkpoint's (architectures.base), so what is added to it is again a product
of two factors: `left` has its rows, in the rule's order, `right` its columns. Where rows of several adapted weights
meet in one matrix, `right` has all their rows one after the other, and `left` has blocks. Experts have factors of their
own, of one rank.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from edgeinfer.convert.adapters.peft import Delta
from edgeinfer.convert.adapters.row_order import Order, is_transposed, n_rows, order_of, row_length
from edgeinfer.convert.architectures.base import ConstantRule, Part, TensorRule
from edgeinfer.convert.checkpoint import Reader, TensorSpec
from edgeinfer.errors import UnusableInputError, listed

EMBEDDING = "token_embd.weight"
"""Its rows are looked up: the library wants its factors the other way round (src/llama-graph.cpp, build_inp_embd)."""
HEAD = "output.weight"
MERGE_HINT = "merge it: `edgeinfer convert CHECKPOINT --lora ADAPTER`"

Matrix = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class _Piece:
    """Rows of one matrix of the file that are rows of an adapted weight."""

    delta: Delta
    begin: int
    """The first of them in the matrix."""
    order: Order
    """Which elements of the weight they are."""

    @property
    def key(self) -> tuple[str, bytes]:
        """The same for pieces with the same `right`."""
        columns = self.order.columns
        return self.delta.module, b"" if columns is None else columns.tobytes()


@dataclass(frozen=True, slots=True)
class Factors:
    """What is added to the tensor `name`: to each of its matrices `alpha / rank · left · right`."""

    name: str
    shape: tuple[int, ...]
    """Of the tensor, row length last."""
    matrices: tuple[tuple[_Piece, ...], ...]
    """What the matrices are made of; more than one for experts."""
    rank: int
    alpha: float
    """What the file states; by how much this tensor's differs is in `left`."""

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of the tensors `lora_a` ("a") and `lora_b` ("b") in the file, row length last."""
        *stack, rows, columns = self.shape
        if self.name == EMBEDDING:
            return {"a": (*stack, rows, self.rank), "b": (*stack, columns, self.rank)}
        return {"a": (*stack, self.rank, columns), "b": (*stack, rows, self.rank)}

    @property
    def stored(self) -> tuple[TensorSpec, ...]:
        """The adapter's tensors that it is made of."""
        deltas = {piece.delta.module: piece.delta for pieces in self.matrices for piece in pieces}
        return tuple(spec for delta in deltas.values() for spec in (delta.a, delta.b))

    def matrix(self, reader: Reader, side: str, number: int) -> Matrix:
        """A matrix of one of the tensors. Raises what `reader.floats` raises."""
        pieces, is_table = self.matrices[number], self.name == EMBEDDING
        if (side == "a") == is_table:
            return self._left(reader, pieces)
        right = self._right(reader, pieces)
        return right.T if is_table else right

    def _left(self, reader: Reader, pieces: Iterable[_Piece]) -> Matrix:
        left = np.zeros((self.shape[-2], self.rank), np.float32)
        offsets = _offsets(pieces)
        for piece in pieces:
            delta, order = piece.delta, piece.order
            rows = read_rows(reader, delta.a).T if delta.is_embedding else read_rows(reader, delta.b)
            at, factor = offsets[piece.key], delta.alpha / self.alpha * (self.rank / delta.rank) * order.factor
            out = left[piece.begin : piece.begin + len(order.rows), at : at + delta.rank]
            np.multiply(rows[order.rows], np.float32(factor), out=out)
        return left

    def _right(self, reader: Reader, pieces: Iterable[_Piece]) -> Matrix:
        right = np.zeros((self.rank, self.shape[-1]), np.float32)
        offsets = _offsets(pieces)
        for piece in {piece.key: piece for piece in pieces}.values():
            delta, columns = piece.delta, piece.order.columns
            rows = read_rows(reader, delta.b).T if delta.is_embedding else read_rows(reader, delta.a)
            at = offsets[piece.key]
            right[at : at + delta.rank] = rows if columns is None else rows[:, columns]
        return right


def _offsets(pieces: Iterable[_Piece]) -> dict[tuple[str, bytes], int]:
    """Where the part of each in the inner dimension begins."""
    offsets: dict[tuple[str, bytes], int] = {}
    end = 0
    for piece in pieces:
        if piece.key not in offsets:
            offsets[piece.key] = end
            end += piece.delta.rank
    return offsets


def factors(rules: Iterable[TensorRule | ConstantRule], deltas: Mapping[str, Delta], where: str) -> list[Factors]:
    """The pairs for the tensors that `rules` make of the weights in `deltas`, in the order of the rules.

    Raises UnusableInputError, with `where` in front, for weights that the model does not have, of another shape, or
    that the file has in another form than their rows.
    """
    alpha = Counter(delta.alpha for delta in deltas.values()).most_common(1)[0][0]
    found, used = [], set[str]()
    for rule in adapted_rules(rules, deltas):
        found.append(_factors(rule, deltas, alpha, where))
        used.update(part.source for part in rule.parts)
    refuse_unknown(deltas.keys() - used, where)
    return found


def adapted_rules(rules: Iterable[TensorRule | ConstantRule], deltas: Collection[str]) -> Iterator[TensorRule]:
    """Those that use one of the weights."""
    for rule in rules:
        if isinstance(rule, TensorRule) and any(part.source in deltas for part in rule.parts):
            yield rule


def refuse_unknown(names: Collection[str], where: str) -> None:
    """Raise UnusableInputError unless there are none."""
    if names:
        raise UnusableInputError(
            f"{where}: {len(names)} adapted weights are not in the base model: {listed(sorted(names))}",
            "is this the base that it was trained on? (--base)",
        )


def tied(where: str) -> UnusableInputError:
    """The error for an adapter of an embedding that is the output matrix, too: there it would count as well."""
    return UnusableInputError(
        f"{where}: the embedding is adapted, which is the output matrix of the model, too",
        "train an adapter without the embedding",
    )


def _factors(rule: TensorRule, deltas: Mapping[str, Delta], alpha: float, where: str) -> Factors:
    if any(deltas[part.source].is_embedding for part in rule.parts if part.source in deltas) and rule.name == HEAD:
        raise tied(where)
    if not rule.name.endswith(".weight"):
        raise UnusableInputError(f"{where}: {rule.name} is no matrix, so it has no adapter in the file", MERGE_HINT)
    shape = rule.shape if len(rule.shape) > 1 else (1, *rule.shape)
    height = shape[-2]
    matrices: list[list[_Piece]] = [[] for _ in range(math.prod(shape[:-2]))]
    begin = 0
    for part in rule.parts:
        delta = deltas.get(part.source)
        if delta is None:
            begin += n_rows(part) * row_length(part) // rule.shape[-1]
            continue
        order = _order(rule, part, delta, where)
        while len(order.rows):
            matrix, first = divmod(begin, height)
            here, rest = order.rows[: height - first], order.rows[height - first :]
            matrices[matrix].append(_Piece(delta, first, replace(order, rows=here)))
            begin, order = begin + len(here), replace(order, rows=rest)
    assert begin == height * len(matrices), f"the rule for {rule.name} gives {begin} rows"
    rank = max(sum({piece.key: piece.delta.rank for piece in pieces}.values()) for pieces in matrices)
    return Factors(rule.name, shape, tuple(map(tuple, matrices)), rank, alpha)


def _order(rule: TensorRule, part: Part, delta: Delta, where: str) -> Order:
    is_swapped = is_stored_swapped(delta, part, where)
    if is_swapped and not delta.is_embedding:
        # The file turns the matrix round again, to what the product is: (outputs, inputs).
        return Order(np.arange(rule.shape[-2]))
    order = order_of(part)
    if order is None or part.shape[-1] != rule.shape[-1]:
        raise UnusableInputError(
            f"{where}: {delta.module} has another form in the file ({rule.name}), which no adapter fits", MERGE_HINT
        )
    return order


def is_stored_swapped(delta: Delta, part: Part, where: str) -> bool:
    """Whether the checkpoint has the weight as (inputs, outputs): an embedding's, and those of GPT-2's modules.

    Raises UnusableInputError unless what is added has the shape of the weight.
    """
    shape = (delta.b.shape[0], delta.a.shape[1])
    fits, fits_swapped = shape == part.shape, shape[::-1] == part.shape
    # Most rules turn no matrix round, so a square one that is turned is stored as (inputs, outputs).
    is_swapped = fits_swapped and (delta.is_embedding or is_transposed(part))
    if not is_swapped and (delta.is_embedding or not fits):
        added = shape[::-1] if delta.is_embedding else shape
        raise UnusableInputError(
            f"{where}: {delta.module} adds {list(added)} to a weight of {list(part.shape)}",
            "is this the base that it was trained on? (--base)",
        )
    return is_swapped


def read_rows(reader: Reader, spec: TensorSpec, row0: int = 0, n_rows: int | None = None) -> Matrix:
    """Rows `[row0, row0 + n_rows)` of a factor, or all of them. Raises what `reader.floats` raises."""
    out = np.empty((spec.shape[0] if n_rows is None else n_rows, spec.shape[1]), np.float32)
    reader.floats(spec, row0, out)
    return out
