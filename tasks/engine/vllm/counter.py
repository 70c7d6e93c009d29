"""Noise of a sample's token, from the seed of the sample and a position in its sequence alone: the counter of vLLM's
second model runner, in NumPy.

Philox 4x32-10 (Salmon et al., SC 2011) of seed and position gives 32 bits for a token; Philox of these and an entry of
the vocabulary gives the entry's Gumbel noise. Two tokens have the same noise with probability 2^-32: about 30 pairs
among 0.52 M tokens, in unrelated places. Imports numpy only.
"""

import numpy as np
from numpy.typing import NDArray

_MULTIPLIERS = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_KEY_STEPS = np.uint32(0x9E3779B9), np.uint32(0xBB67AE85)
_ROUNDS = 10
_LOW, _HALF = np.uint64(0xFFFFFFFF), np.uint64(32)
_SCALE = np.float32(4.6566127342e-10)  # of 31 bits to (0, 1); also the smallest value that is drawn

Words = NDArray[np.uint32]


def philox(key: NDArray[np.uint64], counter: NDArray[np.uint64]) -> Words:
    """The first of the four words of Philox 4x32-10, by element; key and counter are broadcast."""
    k0, k1 = _low(key), _high(key)
    c0, c1 = _low(counter), _high(counter)
    c2 = c3 = np.zeros((), dtype=np.uint32)
    a, b = _MULTIPLIERS
    with np.errstate(over="ignore"):
        for _ in range(_ROUNDS):
            left, right = b * c2.astype(np.uint64), a * c0.astype(np.uint64)
            c0, c2 = _high(left) ^ c1 ^ k0, _high(right) ^ c3 ^ k1
            c1, c3 = _low(left), _low(right)
            k0, k1 = k0 + _KEY_STEPS[0], k1 + _KEY_STEPS[1]
    return c0


def words(seeds: NDArray[np.int64], positions: NDArray[np.int64], vocabulary: int) -> Words:
    """The integers behind the noise of every entry of the vocabulary, (S, V), for S tokens."""
    tokens = philox(seeds.astype(np.uint64), positions.astype(np.uint64)).astype(np.uint64)
    return philox(tokens[:, None], np.arange(vocabulary, dtype=np.uint64)[None])


def gumbel(seeds: NDArray[np.int64], positions: NDArray[np.int64], vocabulary: int) -> NDArray[np.float32]:
    """The noise of every entry of the vocabulary, (S, V)."""
    drawn = words(seeds, positions, vocabulary).view(np.int32)
    uniform = np.where(drawn < 0, -1 - drawn, drawn).astype(np.float32) * _SCALE
    return -np.log(-np.log1p(-np.maximum(uniform, _SCALE)))


def _low(words: NDArray[np.uint64]) -> Words:
    return (words & _LOW).astype(np.uint32)


def _high(words: NDArray[np.uint64]) -> Words:
    return (words >> _HALF).astype(np.uint32)
