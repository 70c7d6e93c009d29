"""Distillation on a teacher's likeliest tokens: loss and gradient against double loops in float64, on every layout."""

import dataclasses
import math

import numpy as np
import pytest
import torch

from tests.trainer_core.phases.plain import responses_of
from tests.trainer_core.phases.test_distillation import (
    COUNTED,
    LAYOUTS,
    SAMPLES,
    TEMPERATURE,
    TOP,
    models,
    settings,
)
from tests.trainer_core.ranks import run_ranks, run_trainers
from trainer_core.config import PolicyConfig
from trainer_core.objectives.losses import top_divergence

__all__ = ["models"]
K, WEIGHT = TOP.top_k, 0.3
POLICY = PolicyConfig(distill=TOP)
REWARDED = PolicyConfig(distill=TOP.model_copy(update={"reward_weight": WEIGHT}))
REWARDED_IN_CI = dict.fromkeys(("single", "tp2-sp-pp2"), pytest.mark.slow)


def by_loops(own, teacher, chosen):
    """Reverse KL of one position over the chosen tokens and all others, of whole (V,) log-probabilities."""
    total, rest, theirs = 0.0, 0.0, 0.0
    for token in range(len(own)):
        if token in chosen:
            total += math.exp(own[token]) * (own[token] - teacher[token])
        else:
            rest, theirs = rest + math.exp(own[token]), theirs + math.exp(teacher[token])
    return total + rest * math.log(rest / theirs)


def test_the_divergence_is_that_of_a_double_loop():
    generator = np.random.default_rng(0)
    own, teacher = (torch.from_numpy(3 * generator.normal(size=(40, 20))).log_softmax(-1) for _ in range(2))
    chosen = teacher.topk(5).indices
    found = top_divergence(own.gather(-1, chosen), teacher.gather(-1, chosen))
    expected = [by_loops(*one) for one in zip(own.tolist(), teacher.tolist(), chosen.tolist(), strict=True)]
    np.testing.assert_allclose(found.numpy(), expected, rtol=0, atol=1e-12)
    whole = (own.exp() * (own - teacher)).sum(-1)
    assert (found >= 0).all()
    assert (found <= whole + 1e-12).all()
    almost = teacher.topk(19).indices
    torch.testing.assert_close(top_divergence(own.gather(-1, almost), teacher.gather(-1, almost)), whole)


def test_a_certain_teacher_and_a_certain_policy_have_finite_gradients():
    own = torch.tensor([[0.0, -90.0], [-90.0, -1e-9], [-1e-9, -30.0]], requires_grad=True)
    found = top_divergence(own, torch.tensor([[-90.0, 0.0], [-90.0, 0.0], [-1e-9, -25.0]]))
    found.sum().backward()
    assert torch.isfinite(found).all()
    assert torch.isfinite(own.grad).all()


def whole_softmax(directory):
    """All log-probabilities at the place of each response token of the usable samples, in float64; with the model."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float64).eval()
    return model, list(responses_of(model, SAMPLES, TEMPERATURE, whole=True))


def in_double(rank, world_size, store, student, teacher):
    """Likeliest tokens of the teacher and their log-probabilities; KL by loops; norms of the gradient without and with
    rewards."""
    model, own = whole_softmax(student)
    with torch.no_grad():
        theirs = torch.cat([one["everything"] for one in whole_softmax(teacher)[1]])
    top, everything = theirs.topk(K), torch.cat([one["everything"] for one in own])
    loops = zip(everything.tolist(), theirs.tolist(), top.indices.tolist(), strict=True)
    loss = np.mean([by_loops(*one) for one in loops])
    outside = torch.ones_like(theirs, dtype=torch.bool).scatter(-1, top.indices, False)
    rests = [torch.where(outside, one.exp(), 0.0).sum(-1) for one in (everything, theirs)]
    known = everything.gather(-1, top.indices)
    total = (known.exp() * (known - top.values)).sum(-1) + rests[0] * (rests[0].log() - rests[1].log())
    assert abs(float(total.mean()) - loss) < 1e-12
    rewards = np.where(SAMPLES.usable, SAMPLES.rewards, np.nan).reshape(-1, 4)
    advantages = (rewards - np.nanmean(rewards, 1, keepdims=True)) / (
        np.nanstd(rewards, 1, ddof=1, keepdims=True) + 1e-6
    )
    advantages = torch.cat([torch.full((len(one["logprobs"]),), advantages.ravel()[one["row"]]) for one in own])
    logprobs, norms = torch.cat([one["logprobs"] for one in own]), []
    surrogate = -advantages.double() * (logprobs - logprobs.detach()).exp()
    for weight in (0.0, WEIGHT):
        whole = (TOP.coefficient * total + weight * surrogate).mean()
        gradients = torch.autograd.grad(whole, list(model.parameters()), retain_graph=True)
        norms.append(math.sqrt(sum(float((one**2).sum()) for one in gradients)))
    return top.indices.numpy(), top.values.numpy(), TOP.coefficient * loss, norms


@pytest.fixture(scope="module")
def expected(models):
    return run_ranks(1, in_double, models[0], str(models[1]))[0]


def walk(trainer, teacher):
    """Scores of the teacher, and the report of a first update."""
    trainer.import_model()
    scores = trainer.teacher_scores(teacher, SAMPLES, TEMPERATURE)
    samples = dataclasses.replace(SAMPLES, teacher_logprobs=scores.logprobs, teacher_top=scores.top)
    return scores.top, trainer.train_policy(samples, TEMPERATURE)


@pytest.mark.parametrize(
    ("layout", "rewarded"),
    [
        *(pytest.param(name, False, marks=[] if name == "tp2" else pytest.mark.slow) for name in LAYOUTS),
        *(pytest.param(name, True, marks=REWARDED_IN_CI.get(name, pytest.mark.full)) for name in LAYOUTS),
    ],
)
def test_scores_loss_and_gradient_are_those_of_float64(models, expected, layout, rewarded):
    policy = REWARDED if rewarded else POLICY
    tokens, logprobs, loss, norms = expected
    for top, report in run_trainers(models[0], settings(layout, policy=policy), walk, models[1]):
        np.testing.assert_array_equal(top.tokens[COUNTED], tokens)
        np.testing.assert_allclose(top.logprobs[COUNTED], logprobs, rtol=0, atol=1e-5)
        assert not top.tokens[~COUNTED].any()
        assert report["grad_norm"] == pytest.approx(norms[rewarded], rel=1e-4)
        assert rewarded or report["loss"] == pytest.approx(loss, rel=1e-5)
