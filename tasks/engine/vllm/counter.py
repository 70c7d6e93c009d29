"""Noise of a sample's token, from the seed of the sample, a position in its sequence and an entry of the vocabulary
alone.

Philox 4x32-10 (Salmon et al., SC 2011), with the seed as key and entries and position as counter, gives four words of
32 bits, each of which becomes the Gumbel noise of one entry. The seed enters with all of its 64 bits, so no two places
share their noise. Imports numpy only."""

import numpy as np
from numpy.typing import NDArray

LANE = 128  # entries of the vocabulary among which the four words of a counter are this far apart
_MULTIPLIERS = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_KEY_STEPS = np.uint64(0x9E3779B9), np.uint64(0xBB67AE85)
_ROUNDS = 10
_LOW, _HALF = np.uint64(0xFFFFFFFF), np.uint64(32)
_SCALE = np.float32(4.6566127342e-10)  # of 31 bits to (0, 1); also the smallest value that is drawn
_AT_ONCE = 1 << 16  # entries, whose numbers then stay in the processor's cache

Words = NDArray[np.uint64]  # words of 32 bits, each in 64: products of two fit


def philox(key: Words, first: Words, second: Words) -> tuple[Words, Words, Words, Words]:
    """Words of Philox 4x32-10 for keys of 64 bits and counters whose upper two words are 0; all are broadcast."""
    k0, k1 = key & _LOW, key >> _HALF
    c0, c1, c2, c3 = first, second, np.zeros((), np.uint64), np.zeros((), np.uint64)
    for _ in range(_ROUNDS):
        right, left = _MULTIPLIERS[0] * c0, _MULTIPLIERS[1] * c2
        c0, c2 = (left >> _HALF) ^ c1 ^ k0, (right >> _HALF) ^ c3 ^ k1
        c1, c3 = left & _LOW, right & _LOW
        k0, k1 = (k0 + _KEY_STEPS[0]) & _LOW, (k1 + _KEY_STEPS[1]) & _LOW
    return c0, c1, c2, c3


def words(seeds: NDArray[np.int64], positions: NDArray[np.int64], vocabulary: int) -> NDArray[np.uint32]:
    """The integers behind the noise of every entry of the vocabulary, (S, V), for S tokens."""
    groups = -(-vocabulary // (4 * LANE))
    counters = np.arange(groups * LANE, dtype=np.uint64)
    four = philox(seeds[:, None].view(np.uint64), counters, positions[:, None].view(np.uint64))
    found = np.empty((len(seeds), groups, 4, LANE), np.uint32)
    for number, word in enumerate(four):
        found[:, :, number] = word.reshape(-1, groups, LANE)
    return found.reshape(len(seeds), -1)[:, :vocabulary]


def gumbel(seeds: NDArray[np.int64], positions: NDArray[np.int64], vocabulary: int) -> NDArray[np.float32]:
    """The noise of every entry of the vocabulary, (S, V)."""
    drawn = words(seeds, positions, vocabulary).view(np.int32)
    found = (drawn ^ (drawn >> 31)).astype(np.float32)  # 31 bits
    found *= _SCALE
    np.maximum(found, _SCALE, out=found)
    for function in (np.negative, np.log1p, np.negative, np.log, np.negative):
        function(found, out=found)
    return found


def choose(logits: NDArray[np.float32], seeds: NDArray[np.int64], positions: NDArray[np.int64]) -> NDArray[np.int64]:
    """The tokens, (S,), with the largest sums of logit, (S, V), and noise."""
    chosen = np.empty(len(logits), np.int64)
    size = max(1, _AT_ONCE // logits.shape[1])
    for rows in (slice(first, first + size) for first in range(0, len(logits), size)):
        noise = gumbel(seeds[rows], positions[rows], logits.shape[1])
        chosen[rows] = np.argmax(np.add(noise, logits[rows], out=noise), axis=1)
    return chosen
