import numpy as np
import pytest

from trainer_core.batches.micro_batching import BatchLimits, share


def lengths_of(kind, count=200):
    generator = np.random.default_rng(1)
    return {
        "alike": np.full(count, 7),
        "long-tailed": np.minimum(generator.geometric(0.05, count), 100),
        "just over half": np.full(count, 51),
        "too long": np.where(np.arange(count) % 50 == 0, 250, 3),
    }[kind]


@pytest.mark.parametrize("kind", ["alike", "long-tailed", "just over half", "too long"])
@pytest.mark.parametrize("replicas", [1, 3])
@pytest.mark.parametrize("limits", [BatchLimits(100), BatchLimits(100, 4), BatchLimits(1), BatchLimits(10**6)], ids=str)
def test_each_row_is_in_one_micro_batch_within_the_limits(kind, replicas, limits):
    lengths = lengths_of(kind)
    rows = np.arange(3, 200)
    shares = share(lengths, rows, replicas, limits)
    assert len(shares) == replicas
    assert len({len(batches) for batches in shares}) == 1
    batches = [batch for batches in shares for batch in batches]
    assert sorted(np.concatenate(batches).tolist()) == rows.tolist()
    for batch in batches:
        assert limits.sequences is None or len(batch) <= limits.sequences
        assert lengths[batch].sum() <= limits.tokens or len(batch) == 1


@pytest.mark.parametrize("multiple", [2, 3, 8])
@pytest.mark.parametrize("count", [1, 5, 190])
def test_the_number_of_micro_batches_is_a_multiple_where_the_schedule_needs_it(multiple, count):
    lengths = lengths_of("long-tailed")
    for batches in share(lengths, np.arange(count), 2, BatchLimits(100), multiple):
        assert len(batches) % multiple == 0
        assert len(batches) > 0
    held = np.concatenate(
        [np.concatenate(batches) for batches in share(lengths, np.arange(count), 2, BatchLimits(100), 3)]
    )
    assert sorted(held.tolist()) == list(range(count))


def test_few_micro_batches_of_similar_size():
    lengths = lengths_of("long-tailed", 2000)
    shares = share(lengths, np.arange(2000), 2, BatchLimits(1000))
    fewest = -(-lengths.sum() // 2000)
    assert len(shares[0]) <= fewest + 1
    loads = np.array([[lengths[batch].sum() for batch in batches] for batches in shares])
    assert (abs(loads[0] - loads[1]) <= 5).all()  # those that run at the same time
    assert abs(loads.sum(1)[0] - loads.sum(1)[1]) < 0.01 * loads.sum()


def test_fewer_rows_than_replicas_leave_empty_micro_batches():
    shares = share(np.array([4, 4, 4]), np.array([1]), 3, BatchLimits(100))
    assert [[batch.tolist() for batch in batches] for batches in shares] == [[[1]], [[]], [[]]]


def test_sequences_without_positions_are_left_out():
    ((batch,),) = share(np.array([4, 0, 2]), np.arange(3), 1, BatchLimits(100))
    assert batch.tolist() == [0, 2]
