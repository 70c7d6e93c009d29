"""The order of samples and examples is another in each pass, epoch and iteration, and the same from the same seed."""

import itertools
from types import SimpleNamespace

import numpy as np
import pytest

from tests.trainer_core.ranks import run_ranks
from trainer_core.config import PolicyConfig

SAMPLES, PARTS, EPOCHS = 48, 3, 4
EXAMPLES = 24
SIZES = [(6, 16), (24, 4), (5, 12)]
"""Examples of a supervised batch, and the number of batches."""


def epochs(step, seed=0, epochs=EPOCHS, parts=PARTS):
    """The mini-batches of each epoch of an iteration, in order; an optimizer counts the updates."""
    from trainer_core.phases.update import mini_batches

    optimizer = SimpleNamespace(updates=0)
    policy = PolicyConfig(mini_batches=parts, epochs=epochs)
    found = []
    for part in mini_batches(np.arange(SAMPLES), policy, optimizer, (seed, step)):  # pyright: ignore[reportArgumentType]
        found.append(tuple(part.tolist()))
        optimizer.updates += 1
    return list(itertools.batched(found, parts))


def all_orders(rank, world_size, store):
    from trainer_core.phases.supervised import batches

    return {
        "iterations": [epochs(step) for step in range(3)],
        "again": epochs(0),
        "another seed": epochs(0, seed=1),
        "whole": epochs(0, epochs=1, parts=1),
        "supervised": [[rows.tolist() for rows in batches(EXAMPLES, *given, 7)] for given in SIZES],
        "seeds": [tuple(np.concatenate(list(batches(EXAMPLES, EXAMPLES, 1, seed)))) for seed in range(3)],
    }


@pytest.fixture(scope="module")
def orders():
    return run_ranks(1, all_orders)[0]


def test_each_epoch_goes_through_all_samples_in_mini_batches_of_its_own(orders):
    found = orders["iterations"][0]
    assert len(found) == EPOCHS
    assert all(sorted(itertools.chain(*parts)) == list(range(SAMPLES)) for parts in found)
    assert len({frozenset(map(frozenset, parts)) for parts in found}) == EPOCHS


def test_each_iteration_has_mini_batches_of_its_own(orders):
    assert len(set(itertools.chain(*orders["iterations"]))) == 3 * EPOCHS


def test_the_same_seed_gives_the_same_mini_batches(orders):
    assert orders["again"] == orders["iterations"][0] != orders["another seed"]


def test_a_single_mini_batch_is_all_samples(orders):
    assert orders["whole"] == [(tuple(range(SAMPLES)),)]


@pytest.mark.parametrize(("place", "size"), [(place, size) for place, (size, _) in enumerate(SIZES)])
def test_each_supervised_pass_has_an_order_of_its_own(orders, place, size):
    found = orders["supervised"][place]
    first, second = found[: EXAMPLES // size], found[EXAMPLES // size :][: EXAMPLES // size]
    assert first != second
    assert all(len(rows) == size for rows in found)
    assert len(set(itertools.chain(*first))) == len(first) * size
    if EXAMPLES % size == 0:
        passes = list(itertools.batched(itertools.chain(*found), EXAMPLES))
        assert len(set(passes)) == len(passes)
        assert all(sorted(one) == list(range(EXAMPLES)) for one in passes)


def test_another_seed_gives_another_order_of_examples(orders):
    assert len(set(orders["seeds"])) == 3
