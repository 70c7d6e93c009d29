"""A stored rollout of two turns with tokens of a tool between them: what trains on it, against a dense computation."""

import numpy as np
import pyarrow as pa
import pytest
import torch

from storage.backends.root import open_root
from storage.schema import REWARD, ROLLOUT
from storage.turns import one_turn
from tasks.stages.names import Stage
from tests.storage.tables import rollout_table, scored_table
from tests.trainer_core.batches.test_reading import store_tables
from trainer_core.batches.flat import flatten
from trainer_core.batches.reading import read_samples
from trainer_core.context_parallel import Context
from trainer_core.objectives.losses import policy_loss
from trainer_core.objectives.objective_config import PolicyConfig
from trainer_core.objectives.registry import loss_of
from trainer_core.objectives.tokens import Segments, Tokens

VOCABULARY, PROMPT = 11, 5
MASKS = [
    [1, 1, 0, 0, 1, 0, 1, 1],  # turn, tool, turn, tool, turn
    [0, 1, 1, 0],  # begins and ends with what was not sampled
    [1, 1, 1],  # a plain answer
    [0, 0],  # nothing was sampled
    [1, 0, 0, 1],
]
RANDOM = np.random.default_rng(0)
RESPONSES = [RANDOM.integers(0, VOCABULARY, len(mask)).tolist() for mask in MASKS]
LOGPROBS = [[-float(RANDOM.random()) * own for own in mask] for mask in MASKS]


@pytest.fixture
def samples(tmp_path):
    table = rollout_table(len(MASKS), 1)
    lists = {
        "prompt_tokens": RANDOM.integers(0, VOCABULARY, (len(MASKS), PROMPT)).tolist(),
        "response_tokens": RESPONSES,
        "sampled": [[bool(own) for own in mask] for mask in MASKS],
        "logprobs": LOGPROBS,
        "weight_version": [[own - 1 for own in mask] for mask in MASKS],
    }
    columns = {name: pa.array(lists[name], ROLLOUT.field(name).type) for name in lists}
    columns["turns"] = one_turn(np.array([len(mask) for mask in MASKS]), pa.repeat("stop", len(MASKS)))
    table = pa.Table.from_arrays([columns.get(name, table[name]) for name in ROLLOUT.names], schema=ROLLOUT)
    root = open_root(str(tmp_path))
    scores = scored_table(table, [1.0, 0.5, 0.0, 1.0, 0.25])
    return read_samples(
        root, store_tables(root, Stage.ROLLOUT, ROLLOUT, [table]), store_tables(root, Stage.REWARD, REWARD, [scores])
    )


def test_only_sampled_tokens_are_responses(samples):
    assert samples.response_lengths.tolist() == [sum(mask) for mask in MASKS]
    assert samples.lengths.tolist() == [PROMPT + 8, PROMPT + 3, PROMPT + 3, PROMPT, PROMPT + 4]
    assert samples.usable.tolist() == [True, True, True, False, True]
    kept = np.concatenate(LOGPROBS)[np.concatenate(MASKS) == 1]
    assert samples.engine_logprobs.tolist() == kept.astype(np.float32).tolist()


@pytest.mark.parametrize("rows", [[0, 1, 2, 4], [4, 1], [2, 0]])
def test_what_is_predicted_are_the_sampled_tokens_in_their_places(samples, rows):
    batch = flatten(samples, np.array(rows))
    targets = [token for row in rows for token, own in zip(RESPONSES[row], MASKS[row], strict=True) if own]
    assert batch.targets.tolist() == targets
    shares = [flatten(samples, np.array(rows), 1, Context(2, rank)) for rank in (0, 1)]
    assert sorted(np.concatenate([one.targets for one in shares]).tolist()) == sorted(targets)


BEHAVIOUR = {"old_policy": "behaviour"}
WIDE = {"clip_low": 0.99999, "clip_high": 1e6}
LOSSES = {
    "clip": {"loss": {"type": "clip"}, **WIDE, **BEHAVIOUR},
    "gspo": {"loss": {"type": "gspo", **WIDE}, **BEHAVIOUR},
    "cispo": {"loss": {"type": "cispo", **WIDE}, **BEHAVIOUR},
    "sft": {"loss": {"type": "sft"}},
}  # nothing is clipped, so that every token that counts has a gradient


@pytest.mark.parametrize("name", LOSSES)
def test_only_sampled_tokens_have_a_gradient_and_the_loss_is_that_of_a_dense_mask(samples, name):
    rows = np.flatnonzero(samples.usable)
    batch = flatten(samples, rows)
    logits = torch.randn(len(batch.tokens), VOCABULARY, generator=torch.Generator().manual_seed(0)).requires_grad_()
    counts = torch.from_numpy(batch.response_lengths)
    known = torch.from_numpy(samples.engine_logprobs)[batch.responses]
    values = {"advantages": ADVANTAGES.repeat_interleave(counts), "old_logprobs": known, "behaviour_logprobs": known}
    policy = PolicyConfig.model_validate(LOSSES[name])
    tokens = Tokens(logits.log_softmax(-1)[batch.predicting, batch.targets], Segments(counts), values)
    found = policy_loss(policy, loss_of(policy), tokens).loss.sum()
    (gradient,) = torch.autograd.grad(found, logits)
    others = np.setdiff1d(np.arange(len(batch.tokens)), batch.predicting)
    assert len(others) and (gradient[others] == 0).all()
    expected = sum(dense_loss(name, *one) for one in dense_rows(batch, logits))
    (dense,) = torch.autograd.grad(expected, logits)
    assert found.item() == pytest.approx(expected.item(), rel=1e-5)
    torch.testing.assert_close(gradient, dense)


def dense_rows(batch, logits):
    """Of each sample: log-probabilities of all its tokens but the first, what was stored of them, the mask and the
    advantage. What the mask leaves out has other values than 0."""
    for number, row in enumerate(batch.rows):
        first, count = int(batch.lengths[:number].sum()), int(batch.lengths[number])
        following = [*batch.tokens[first + 1 : first + count], 0][: PROMPT - 1] + RESPONSES[row]
        mask = torch.tensor([0] * (PROMPT - 1) + MASKS[row])[:count]
        stored = torch.tensor([-9.0] * (PROMPT - 1) + LOGPROBS[row])[:count]
        own = logits[first : first + count].log_softmax(-1)
        yield own.gather(-1, torch.tensor(following)[:count, None])[:, 0], stored, mask, ADVANTAGES[number]


def dense_loss(name, logprobs, stored, mask, advantage):
    change = logprobs - stored
    if name == "gspo":
        mean = (mask * change).sum() / mask.sum()
        return -advantage * mask.sum() * mean.exp()
    each = {"clip": change.exp(), "cispo": change.exp().detach() * logprobs, "sft": logprobs / advantage}[name]
    return -advantage * (mask * each).sum()


ADVANTAGES = torch.tensor([1.0, -0.5, 0.75, -2.0])
