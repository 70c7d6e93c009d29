import pytest
import torch

from tests.trainer_core.ranks import run_ranks

VOCABULARY, COLUMNS, TEMPERATURE = 11, 16, 0.7


def inputs(dtype):
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(2, 5, COLUMNS, generator=generator)
    targets = torch.randint(0, VOCABULARY, (2, 5), generator=generator)
    weights = torch.randn(2, 2, 5, generator=generator)  # of log-probability and of entropy
    return logits.to(dtype), targets, weights


def sharded(rank, world_size, store, dtype):
    """Log-probabilities, entropies and the gradient of their weighted sum, for this rank's columns."""
    from trainer_core.model.vocab_parallel import log_probabilities

    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)
    logits, targets, weights = inputs(dtype)
    own = logits.chunk(world_size, dim=-1)[rank].clone().requires_grad_()
    kept = own.detach().clone()
    found = log_probabilities(own, targets, TEMPERATURE, VOCABULARY, torch.distributed.group.WORLD)
    (torch.stack(found) * weights).sum().backward()
    assert torch.equal(own.detach(), kept)  # nothing was done in place
    return *(values.detach().numpy() for values in found), own.grad.float().numpy()


def plain(dtype):
    logits, targets, weights = inputs(dtype)
    logits.requires_grad_()
    log_probs = (logits.float()[..., :VOCABULARY] / TEMPERATURE).log_softmax(-1)
    chosen = log_probs.gather(-1, targets.unsqueeze(-1)).squeeze(-1)
    entropy = -(log_probs.exp() * log_probs).sum(-1)
    (torch.stack((chosen, entropy)) * weights).sum().backward()
    return chosen.detach(), entropy.detach(), logits.grad.float()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_values_and_gradients_are_those_of_plain_torch(ranks, dtype):
    chosen, entropy, gradient = plain(dtype)
    results = run_ranks(ranks, sharded, dtype)
    tolerance = {"rtol": 0, "atol": 2e-6 if dtype == torch.float32 else 1e-2}
    for found_chosen, found_entropy, _ in results:
        torch.testing.assert_close(torch.from_numpy(found_chosen), chosen, rtol=0, atol=2e-6)
        torch.testing.assert_close(torch.from_numpy(found_entropy), entropy, rtol=0, atol=2e-6)
    shards = [torch.from_numpy(shard) for _, _, shard in results]
    torch.testing.assert_close(torch.cat(shards, dim=-1), gradient, **tolerance)


def test_padding_takes_no_probability_and_no_gradient():
    _, _, *others = [shard for _, _, shard in run_ranks(4, sharded, torch.float32)]
    assert (others[0][..., VOCABULARY - 8 :] == 0).all()
    assert (others[1] == 0).all()  # the last rank holds padding alone
