"""Sums over sequences that ranks divide, as a user's loss may use them: their values and gradients."""

import torch

from tests.trainer_core.ranks import run_ranks
from trainer_core.objectives.tokens import Segments

LENGTHS = ((2, 1), (1, 3))  # of two sequences, on each of two ranks
VALUES = ((1.0, 2.0, -0.5), (4.0, 0.25, -1.0, 3.0))
WEIGHTS = ((0.5, 2.0), (-1.5, 3.0))  # of the squares of the sums in each rank's loss


def summed(rank, world_size, store):
    """The sums, and the gradient of this rank's values of a loss that each rank has a part of."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)
    values = torch.tensor(VALUES[rank], requires_grad=True)
    found = Segments(torch.tensor(LENGTHS[rank]), torch.distributed.group.WORLD).sum(values)
    (found**2 * torch.tensor(WEIGHTS[rank])).sum().backward()
    assert values.grad is not None
    return found.tolist(), values.grad.tolist()


def test_the_gradient_of_a_sum_over_ranks_is_that_of_all_their_losses():
    own = [torch.tensor(some).split(lengths) for some, lengths in zip(VALUES, LENGTHS, strict=True)]
    sums = torch.stack([part.sum() for some in own for part in some]).reshape(2, 2).sum(0)
    of_each = 2 * sums * torch.tensor(WEIGHTS).sum(0)
    found = run_ranks(2, summed)
    assert [one for one, _ in found] == [sums.tolist()] * 2
    for lengths, (_, gradient) in zip(LENGTHS, found, strict=True):
        assert gradient == of_each.repeat_interleave(torch.tensor(lengths)).tolist()
