"""The noise of a token from its seed and position."""

import subprocess
import sys

import numpy as np
import pytest

from tasks.config.environment import child_python_path
from tasks.engine.vllm.counter import LANE, choose, philox, words

FULL = (1 << 64) - 1


@pytest.mark.parametrize(
    ("key", "counter", "known"),
    [
        (0, (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),  # of the known answers of Random123
        (FULL, (0, 7), None),
        (0x123456789ABCDEF0, (0xFEDCBA98, 0x76543210), None),
    ],
)
def test_the_words_are_those_of_philox_4x32_10(key, counter, known):
    found = tuple(int(word[0]) for word in philox(*(np.array([one], np.uint64) for one in (key, *counter))))
    assert found == reference(key, *counter)
    assert known in (None, found)


def reference(key, c0, c1):
    """Philox with Python's integers."""
    low = (1 << 32) - 1
    k0, k1, c2, c3 = key & low, key >> 32, 0, 0
    for _ in range(10):
        left, right = 0xCD9E8D57 * c2, 0xD2511F53 * c0
        c0, c1, c2, c3 = (left >> 32) ^ c1 ^ k0, left & low, (right >> 32) ^ c3 ^ k1, right & low
        k0, k1 = (k0 + 0x9E3779B9) & low, (k1 + 0xBB67AE85) & low
    return c0, c1, c2, c3


def test_each_entry_has_a_word_of_its_own():
    found = words(np.array([5]), np.array([9]), 6 * LANE)[0]
    for entry in (0, 1, LANE, 3 * LANE + 7, 4 * LANE, 6 * LANE - 1):
        group, (word, lane) = entry // (4 * LANE), divmod(entry % (4 * LANE), LANE)
        assert found[entry] == reference(5, group * LANE + lane, 9)[word]
    assert len(set(found.tolist())) == len(found)


def test_noise_depends_on_seed_position_and_entry_alone():
    seeds, positions = np.array([5, 5, 7, -3, 5 + (1 << 40)]), np.array([9, 10, 9, 0, 9])
    together = words(seeds, positions, 700)
    for row in range(len(seeds)):
        assert np.array_equal(words(seeds[row : row + 1], positions[row : row + 1], 700)[0], together[row])
    assert np.array_equal(words(seeds, positions, 20), together[:, :20])
    assert len(np.unique(together)) == together.size


def test_tokens_chosen_with_the_noise_have_the_probabilities_of_the_logits():
    logits = np.array([0.0, 1.0, 2.0, -1.0, -30.0], dtype=np.float32)
    count = 20_000
    chosen = choose(np.tile(logits, (count, 1)), np.full(count, 11), np.arange(count))
    shares = np.bincount(chosen, minlength=len(logits)) / count
    expected = np.exp(logits) / np.exp(logits).sum()
    np.testing.assert_allclose(shares, expected, atol=0.012)  # three standard deviations


@pytest.mark.slow
def test_the_kernels_for_cards_choose_the_same_tokens():
    """Triton interprets them; it decides on that when they are imported."""
    code = "from tests.tasks.engine.vllm.test_counter import compare; compare()"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**child_python_path(), "TRITON_INTERPRET": "1"}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def compare():
    """Choose from logits with both, where some are cut off and some are equal."""
    import torch

    from tasks.engine.vllm.draw import draw

    generator, rows = np.random.default_rng(0), torch.tensor([3, 1, 4, 0, 5])
    seeds, temperatures = generator.integers(-(1 << 62), 1 << 62, 6), torch.tensor([1.0, 0.0, 1.0, 0.7, 0.0, 2.0])
    for vocabulary in (32, 700, 9000):
        logits = torch.from_numpy(generator.normal(size=(5, vocabulary)).astype(np.float32)).mul(2).round(decimals=1)
        logits[2, ::3], logits[3, :-1] = -torch.inf, -torch.inf
        positions = torch.from_numpy(generator.integers(0, 5000, 5))
        tokens, logprobs = draw(logits, rows, torch.from_numpy(seeds), positions, temperatures)
        expected = choose(logits.numpy(), seeds[rows.numpy()], positions.numpy())
        greedy = logits.argmax(dim=-1).numpy()
        assert tokens.tolist() == np.where(temperatures[rows].numpy() == 0, greedy, expected).tolist()
        whole = logits.log_softmax(dim=-1).gather(-1, tokens[:, None])[:, 0]
        torch.testing.assert_close(logprobs, whole, rtol=0, atol=1e-5)
