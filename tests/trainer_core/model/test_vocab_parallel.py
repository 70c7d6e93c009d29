import numpy as np
import pytest
import torch

from tests.trainer_core.ranks import run_ranks

VOCABULARY, COLUMNS, ROWS, TEMPERATURE = 11, 16, 10, 0.7
COUNT, AMONG = 3, 9


def inputs(dtype):
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(ROWS, COLUMNS, generator=generator)
    logits[0] *= 20  # one token has nearly all probability
    targets = torch.randint(0, VOCABULARY, (ROWS,), generator=generator)
    targets[0] = logits[0, :VOCABULARY].argmax()
    weights = torch.randn(2, ROWS, generator=generator, dtype=torch.float64)  # of log-probability and of entropy
    return logits.to(dtype), targets, weights


def join(rank, world_size, store):
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)
    return torch.distributed.group.WORLD


def sharded(rank, world_size, store, dtype, chunk, entropy):
    """Log-probabilities, entropies and the gradient of their weighted sum, for this rank's columns."""
    from trainer_core.model import vocab_parallel

    group = join(rank, world_size, store)
    vocab_parallel.CHUNK_ELEMENTS = chunk
    logits, targets, weights = inputs(dtype)
    own = logits.chunk(world_size, dim=-1)[rank].clone().requires_grad_()
    kept = own.detach().clone()
    found = vocab_parallel.log_probabilities(own, targets, TEMPERATURE, VOCABULARY, group, entropy)
    assert found[1].requires_grad == (entropy == "differentiated")
    (torch.stack(found) * weights).sum().backward()
    assert torch.equal(own.detach(), kept)  # nothing was done in place
    return *(values.detach().double().numpy() for values in found), own.grad.double().numpy()


def plain(dtype, entropy):
    logits, targets, weights = inputs(dtype)
    logits = logits.double().requires_grad_()
    log_probs = (logits[..., :VOCABULARY] / TEMPERATURE).log_softmax(-1)
    chosen = log_probs.gather(-1, targets.unsqueeze(-1)).squeeze(-1)
    whole = -(log_probs.exp() * log_probs).sum(-1)
    other = {"none": torch.zeros_like(whole), "reported": whole.detach(), "differentiated": whole}[entropy]
    (torch.stack((chosen, other)) * weights).sum().backward()
    return chosen.detach(), other.detach(), logits.grad


@pytest.mark.parametrize("entropy", ["none", "reported", "differentiated"])
@pytest.mark.parametrize(
    ("ranks", "dtype", "chunk"),
    [
        (1, torch.float64, 1 << 20),
        (1, torch.float64, 3 * COLUMNS),
        (2, torch.float64, 3 * COLUMNS),
        (4, torch.float64, 1),
        (1, torch.float32, 1 << 20),
        (2, torch.bfloat16, 1 << 20),
    ],
)
def test_values_and_gradients_are_those_of_plain_torch(ranks, dtype, chunk, entropy):
    chosen, whole, gradient = plain(dtype, entropy)
    results = run_ranks(ranks, sharded, dtype, chunk, entropy)
    exact = {"rtol": 0, "atol": 1e-12 if dtype == torch.float64 else 5e-6}
    for found_chosen, found_entropy, _ in results:
        torch.testing.assert_close(torch.from_numpy(found_chosen), chosen, **exact)
        torch.testing.assert_close(torch.from_numpy(found_entropy), whole, **exact)
    found = torch.cat([torch.from_numpy(shard) for _, _, shard in results], dim=-1)
    limits = {"rtol": 2**-8, "atol": 5e-6} if dtype == torch.bfloat16 else exact
    torch.testing.assert_close(found, gradient, **limits)


def differences(rank, world_size, store, entropy):
    """Compare the derivative with the limit of differences."""
    from trainer_core.model.vocab_parallel import log_probabilities

    group = join(rank, world_size, store)
    logits, targets, _ = inputs(torch.float64)
    logits[0] /= 20

    def values(logits):
        found = log_probabilities(logits, targets, TEMPERATURE, VOCABULARY, group, entropy)
        return found if entropy == "differentiated" else found[0]

    return torch.autograd.gradcheck(values, logits.requires_grad_())


@pytest.mark.parametrize("entropy", ["none", "differentiated"])
def test_the_derivative_is_the_limit_of_differences(entropy):
    assert run_ranks(1, differences, entropy) == [True]


def test_padding_takes_no_probability_and_no_gradient():
    _, _, *others = [shard for _, _, shard in run_ranks(4, sharded, torch.float32, 1 << 20, "differentiated")]
    assert (others[0][..., VOCABULARY - 8 :] == 0).all()
    assert (others[1] == 0).all()  # the last rank holds padding alone


def allocations(rank, world_size, store, entropy):
    """Elements of every array that is made, but for the gradient of the logits; and elements of a chunk."""
    from torch.utils._python_dispatch import TorchDispatchMode

    from trainer_core.model import vocab_parallel

    group = join(rank, world_size, store)
    vocab_parallel.CHUNK_ELEMENTS = 5000
    sizes = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            result = function(*args, **(kwargs or {}))
            for made in result if isinstance(result, tuple) else (result,):
                storages = {x.untyped_storage().data_ptr() for x in args if isinstance(x, torch.Tensor)}
                if isinstance(made, torch.Tensor) and made.untyped_storage().data_ptr() not in storages:
                    sizes.append(made.untyped_storage().nbytes() // made.element_size())
            return result

    logits = torch.randn(100, 1000, requires_grad=True)
    targets = torch.arange(100)
    with Watch():
        found = vocab_parallel.log_probabilities(logits, targets, TEMPERATURE, 1000, group, entropy)
        torch.stack(found).sum().backward()
    return sorted(sizes)


@pytest.mark.parametrize("entropy", ["none", "reported", "differentiated"])
def test_no_array_of_the_logits_size_is_made_but_their_gradient(entropy):
    (sizes,) = run_ranks(1, allocations, entropy)
    assert sizes[-1] == 100 * 1000
    assert sizes[-2] <= 5000


def several(rank, world_size, store, dtype, chunk):
    """Likeliest tokens among the first nine, and the gradient of a weighted sum of their log-probabilities."""
    from trainer_core.model import vocab_parallel

    group = join(rank, world_size, store)
    vocab_parallel.CHUNK_ELEMENTS = chunk
    own = inputs(dtype)[0].chunk(world_size, dim=-1)[rank].clone().requires_grad_()
    tokens, logprobs = vocab_parallel.likeliest(own.detach(), COUNT, AMONG, TEMPERATURE, VOCABULARY, group)
    found = vocab_parallel.log_probabilities_at(own, tokens, TEMPERATURE, VOCABULARY, group)
    torch.testing.assert_close(found.detach().float(), logprobs.float(), rtol=0, atol=2e-6)
    (found * of_tokens(tokens)).sum().backward()
    return tokens.numpy(), logprobs.double().numpy(), own.grad.double().numpy()


def of_tokens(tokens):
    """A weight for each, of either sign."""
    return torch.sin(1.0 + tokens.double() + 3 * torch.arange(len(tokens))[:, None])


@pytest.mark.parametrize(
    ("ranks", "dtype", "chunk"),
    [
        (1, torch.float64, 1 << 20),
        (2, torch.float64, 3 * COLUMNS),
        pytest.param(4, torch.float64, 1, marks=pytest.mark.slow),  # one rank holds padding alone
        (2, torch.bfloat16, 1 << 20),
    ],
)
def test_the_likeliest_tokens_and_their_gradients_are_those_of_one_rank(ranks, dtype, chunk):
    logits = inputs(dtype)[0].double().requires_grad_()
    whole = (logits[:, :VOCABULARY] / TEMPERATURE).log_softmax(-1)
    values, tokens = (one[:, :COUNT] for one in whole[:, :AMONG].sort(stable=True, descending=True))
    (whole.gather(-1, tokens) * of_tokens(tokens)).sum().backward()
    found = run_ranks(ranks, several, dtype, chunk)
    close = {"rtol": 0, "atol": 1e-12} if dtype == torch.float64 else {"rtol": 2**-7, "atol": 1e-6}
    for own, logprobs, _ in found:
        np.testing.assert_array_equal(own, tokens)
        np.testing.assert_allclose(logprobs, values.detach(), rtol=0, atol=5e-6)
    np.testing.assert_allclose(np.concatenate([one[2] for one in found], axis=-1), logits.grad, **close)
