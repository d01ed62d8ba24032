"""llama.cpp's sampler chain, applied to one row of logits: `types.Sampler` and its factory."""

from __future__ import annotations

import ctypes
import secrets
import weakref
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgeinfer.errors import UnusableInputError, UsageError
from edgeinfer.native.library import llama
from edgeinfer.native.model import NativeVocabulary
from edgeinfer.options import SamplingParams
from edgeinfer.types import Sampler

# Values that llama.cpp's own tools use and that have no option here (common/common.h).
_DRY_BASE, _DRY_ALLOWED_LENGTH, _DRY_LAST_N = 1.75, 2, 64
_DRY_BREAKERS = (b"\n", b":", b'"', b"*")
_MIROSTAT_M = 100
_MIN_KEEP = 1

_CANDIDATE = np.dtype([("id", np.int32), ("logit", np.float32), ("p", np.float32)])  # llama_token_data
_RANDOM_SEED = 0xFFFFFFFF  # the library takes this one to mean "any"


class NativeSamplerFactory:
    """Makes samplers for one vocabulary; see `types.SamplerFactory`."""

    def __init__(self, vocabulary: NativeVocabulary) -> None:
        self._vocabulary = vocabulary
        self._suppressed = vocabulary.suppressed_tokens()
        # Megabytes for a large vocabulary, needed only while a token is chosen: all chains of an engine share them.
        self._candidates = _Candidates(vocabulary.n_tokens)

    def __call__(self, params: SamplingParams) -> Sampler:
        """Build the chain that `params` describes. Raises UsageError for a biased token that does not exist."""
        seed = secrets.randbelow(_RANDOM_SEED) if params.seed is None else params.seed
        biases = self._biases(params)
        if params.temperature == 0 and not biases and not _has_penalties(params):
            return GreedySampler(seed)
        reach = _reach(params, biases)
        chain = llama.llama_sampler_chain_init(llama.llama_sampler_chain_default_params())
        for sampler in self._links(params, seed, biases):
            llama.llama_sampler_chain_add(chain, sampler)
        return ChainSampler(chain, self._candidates, seed, reach)

    def _biases(self, params: SamplingParams) -> list[tuple[int, float]]:
        for token, _ in params.logit_bias:
            if not 0 <= token < self._vocabulary.n_tokens:
                raise UsageError(
                    f"--logit-bias names token {token}",
                    f"the vocabulary has tokens 0 to {self._vocabulary.n_tokens - 1}",
                )
        banned = self._end_tokens if params.ignore_eos else []
        return [*params.logit_bias, *((token, -np.inf) for token in [*banned, *self._suppressed])]

    @cached_property
    def _end_tokens(self) -> list[int]:
        return self._vocabulary.all_end_tokens()

    def _links(self, params: SamplingParams, seed: int, biases: list[tuple[int, float]]) -> list[Any]:
        """The chain's links in llama.cpp's order, without those that would do nothing."""
        links = []
        n_vocab = self._vocabulary.n_tokens
        if biases:
            array = (llama.llama_logit_bias * len(biases))(*biases)
            links.append(llama.llama_sampler_init_logit_bias(n_vocab, len(biases), array))
        if params.mirostat and params.temperature > 0:
            links.append(llama.llama_sampler_init_temp(params.temperature))
            links.append(self._mirostat(params, seed))
            return links
        if _has_repetition_penalties(params):
            links.append(
                llama.llama_sampler_init_penalties(
                    n_vocab,
                    params.repeat_last_n,
                    params.repeat_penalty,
                    params.frequency_penalty,
                    params.presence_penalty,
                )
            )
        if params.dry_multiplier > 0:
            breakers = (ctypes.c_char_p * len(_DRY_BREAKERS))(*_DRY_BREAKERS)
            links.append(
                llama.llama_sampler_init_dry(
                    self._vocabulary.handle,
                    params.dry_multiplier,
                    _DRY_BASE,
                    _DRY_ALLOWED_LENGTH,
                    _DRY_LAST_N,
                    breakers,
                    len(_DRY_BREAKERS),
                )
            )
        if params.temperature == 0:
            return [*links, llama.llama_sampler_init_greedy()]
        return [*links, *_truncation(params, seed), llama.llama_sampler_init_dist(seed)]

    def _mirostat(self, params: SamplingParams, seed: int) -> Any:
        tau, eta = params.mirostat_tau, params.mirostat_eta
        if params.mirostat == 1:
            return llama.llama_sampler_init_mirostat(self._vocabulary.n_tokens, seed, tau, eta, _MIROSTAT_M)
        return llama.llama_sampler_init_mirostat_v2(seed, tau, eta)


def _truncation(params: SamplingParams, seed: int) -> list[Any]:
    links = []
    if params.top_k > 0:
        links.append(llama.llama_sampler_init_top_k(params.top_k))
    if params.typical_p < 1:
        links.append(llama.llama_sampler_init_typical(params.typical_p, _MIN_KEEP))
    if params.top_p < 1:
        links.append(llama.llama_sampler_init_top_p(params.top_p, _MIN_KEEP))
    if params.min_p > 0:
        links.append(llama.llama_sampler_init_min_p(params.min_p, _MIN_KEEP))
    if params.xtc_probability > 0:
        links.append(llama.llama_sampler_init_xtc(params.xtc_probability, params.xtc_threshold, _MIN_KEEP, seed))
    if params.temperature != 1:
        links.append(llama.llama_sampler_init_temp(params.temperature))
    return links


def _reach(params: SamplingParams, biases: list[tuple[int, float]]) -> int | None:
    """See `types.Sampler.reach`: what is cut off first, and what earlier links can push below that.

    A link that can raise a logit leaves no bound.
    """
    if params.temperature and (params.mirostat or params.top_k <= 0):
        return None
    reach = params.top_k if params.temperature else 1
    if any(bias > 0 for _, bias in biases):
        return None
    reach += len(biases)
    if _has_repetition_penalties(params):
        if params.repeat_penalty < 1 or params.frequency_penalty < 0 or params.presence_penalty < 0:
            return None
        reach += params.repeat_last_n
    return reach + (_DRY_LAST_N if params.dry_multiplier > 0 else 0)


def _has_repetition_penalties(params: SamplingParams) -> bool:
    return params.repeat_last_n > 0 and (
        params.repeat_penalty != 1 or params.frequency_penalty != 0 or params.presence_penalty != 0
    )


def _has_penalties(params: SamplingParams) -> bool:
    return _has_repetition_penalties(params) or params.dry_multiplier > 0


class GreedySampler:
    """The largest logit wins; needs no copy of the row and no history."""

    def __init__(self, seed: int) -> None:
        self._seed = seed

    @property
    def seed(self) -> int:
        """The seed in use (it changes nothing here)."""
        return self._seed

    @property
    def reach(self) -> int:
        """One logit decides."""
        return 1

    def sample(self, logits: NDArray[np.float32]) -> int:
        """The index of the largest logit, the first among equals."""
        token = int(logits.argmax())
        if logits[token] != logits[token]:  # argmax finds a NaN first
            raise _not_a_number()
        return token

    def accept(self, token: int) -> None:
        """Greedy choice has no history."""


class _Candidates:
    """The array that the samplers sort and thin out; made when first needed, for greedy choice never needs it."""

    def __init__(self, n_vocab: int) -> None:
        self._n_vocab = n_vocab
        self._ids = np.empty(0, np.int32)
        self._array = np.empty(0, _CANDIDATE)
        self._pointer: Any = None

    def fill(self, logits: NDArray[np.float32]) -> Any:
        """The library's structure over one row of logits."""
        if self._pointer is None:
            self._ids = np.arange(self._n_vocab, dtype=np.int32)
            self._array = np.zeros(self._n_vocab, _CANDIDATE)
            self._pointer = self._array.ctypes.data_as(llama.llama_token_data_p)
        # Ids too: the samplers sort the candidates in place.
        self._array["id"] = self._ids
        self._array["logit"] = logits
        return llama.llama_token_data_array(self._pointer, self._n_vocab, -1, False)


class ChainSampler:
    """A chain of the library's samplers over an array of candidates that is filled from a row of logits."""

    def __init__(self, chain: Any, candidates: _Candidates, seed: int, reach: int | None) -> None:
        self._chain = chain
        self._seed = seed
        self._reach = reach
        self._candidates = candidates
        weakref.finalize(self, llama.llama_sampler_free, chain)

    @property
    def seed(self) -> int:
        """The seed in use."""
        return self._seed

    @property
    def reach(self) -> int | None:
        """How many of the largest logits the choice can depend on; None where all can matter."""
        return self._reach

    def sample(self, logits: NDArray[np.float32]) -> int:
        """Choose a token from one row of logits of shape `(n_vocab,)`; does not change the history."""
        array = self._candidates.fill(logits)
        llama.llama_sampler_apply(self._chain, ctypes.byref(array))
        if not 0 <= array.selected < array.size:
            raise _not_a_number()
        return int(array.data[array.selected].id)

    def accept(self, token: int) -> None:
        """Add a token of the text (prompt or answer) to the history that the penalties see."""
        llama.llama_sampler_accept(self._chain, token)


def _not_a_number() -> UnusableInputError:
    return UnusableInputError(
        "the model computed something that is not a number", "the file may be damaged: convert it again"
    )
