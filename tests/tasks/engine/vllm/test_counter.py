"""The noise of a token from its seed and position."""

import numpy as np
import pytest

from tasks.engine.vllm.counter import gumbel, philox, words

FULL = (1 << 64) - 1


@pytest.mark.parametrize(
    ("key", "counter", "word"),
    [(0, 0, 0x6627E8D5), (FULL, 0, None), (0x123456789ABCDEF0, 0x0FEDCBA987654321, None)],
)
def test_the_words_are_those_of_philox_4x32_10(key, counter, word):
    found = int(philox(np.array([key], np.uint64), np.array([counter], np.uint64))[0])
    assert found == reference(key, counter)
    assert word in (None, found)  # of the known answers of Random123


def reference(key, counter):
    """Philox with Python's integers."""
    low = (1 << 32) - 1
    k0, k1, c0, c1, c2, c3 = key & low, key >> 32, counter & low, counter >> 32, 0, 0
    for _ in range(10):
        left, right = 0xCD9E8D57 * c2, 0xD2511F53 * c0
        c0, c1, c2, c3 = (left >> 32) ^ c1 ^ k0, left & low, (right >> 32) ^ c3 ^ k1, right & low
        k0, k1 = (k0 + 0x9E3779B9) & low, (k1 + 0xBB67AE85) & low
    return c0


def test_noise_depends_on_seed_position_and_entry_alone():
    seeds, positions = np.array([5, 5, 7, -3]), np.array([9, 10, 9, 0])
    together = words(seeds, positions, 40)
    for row in range(4):
        assert np.array_equal(words(seeds[row : row + 1], positions[row : row + 1], 40)[0], together[row])
    assert np.array_equal(words(seeds, positions, 20), together[:, :20])
    assert len({tuple(row) for row in together.tolist()}) == 4


def test_tokens_chosen_with_the_noise_have_the_probabilities_of_the_logits():
    logits = np.array([0.0, 1.0, 2.0, -1.0, -30.0], dtype=np.float32)
    count = 20_000
    noise = gumbel(np.full(count, 11), np.arange(count), len(logits))
    assert np.isfinite(noise).all()
    shares = np.bincount((logits + noise).argmax(axis=1), minlength=len(logits)) / count
    expected = np.exp(logits) / np.exp(logits).sum()
    np.testing.assert_allclose(shares, expected, atol=0.012)  # three standard deviations
