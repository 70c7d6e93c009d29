"""Every objective through the whole trainer: one step against a plain implementation, however the batch is divided."""

import dataclasses

import numpy as np
import pytest

from tests.trainer_core.models import hugging_face_logprobs, places_of, random_samples, read_export
from tests.trainer_core.oracle import export
from tests.trainer_core.phases.plain import plain_steps
from tests.trainer_core.ranks import run_ranks, run_trainers
from trainer_core.batches.micro_batching import BatchLimits
from trainer_core.config import OptimizerConfig, ParallelConfig, PolicyConfig, TrainerConfig

# without moments the weights move by gradient / (|gradient| + 1)
PLAIN_GRADIENT = OptimizerConfig(learning_rate=1.0, beta1=0.0, beta2=0.0, eps=1.0, clip_grad=0.0)
TEMPERATURE = 0.8
# a layout, and the most tokens of a micro-batch on a rank: several micro-batches, which take most of the time
DIVISIONS = {
    "single": (ParallelConfig(), 8192),
    "split": (ParallelConfig(), 20),
    "dp2": (ParallelConfig(data=2), 20),
    "tp2-pp2": (ParallelConfig(tensor=2, pipeline=2), 80),
    "cp2": (ParallelConfig(context=2), 20),
    "pp2-cp2": (ParallelConfig(context=2, pipeline=2), 40),
    "cp4": (ParallelConfig(context=4), 24),
}
OBJECTIVES = {
    "clip": {"old_policy": "behaviour"},
    "dual": {"old_policy": "behaviour", "loss": {"type": "clip", "dual_limit": 1.1}},
    "gspo": {
        "old_policy": "behaviour",
        "loss": {"type": "gspo", "clip_low": 0.05, "clip_high": 0.05},
        "loss_aggregation": "sequence",
    },
    "cispo": {"old_policy": "behaviour", "loss": {"type": "cispo", "clip_low": 0.1, "clip_high": 0.2}},
    "sft": {"loss": {"type": "sft", "above": 0.4}},
    "dpo": {"loss": {"type": "dpo", "beta": 0.3, "pairs": "all"}},
    "tis": {"correction": {"type": "truncate", "level": "token", "limit": 1.1}},
    "tis-sequence": {"correction": {"type": "truncate", "level": "sequence", "limit": 1.5}},
    "icepop": {"correction": {"type": "mask", "level": "token", "low": 0.8, "high": 1.2}},
    "kl": {"kl_coefficient": 0.5, "kl_estimator": "k2"},
    "kl-reward": {"kl_coefficient": 0.5, "kl_in": "reward", "kl_estimator": "k1"},
    "reinforce++": {
        "advantage": {"type": "reinforce_pp"},
        "kl_coefficient": 0.5,
        "kl_in": "reward",
        "kl_estimator": "k3",
    },
    "distilled": {"distill": {"teacher": "given", "coefficient": 0.7}, "old_policy": "behaviour"},
    "distilled-rewards": {
        "distill": {"teacher": "given", "coefficient": 0.4, "reward_weight": 0.6},
        "loss": {"type": "cispo", "clip_low": 1.0, "clip_high": 5.0},
    },
    "mask-sequence": {"correction": {"type": "mask", "level": "sequence_mean", "low": 0.9, "high": 1.1}},
}
DAILY = {
    "split": tuple(OBJECTIVES),
    "dp2": ("gspo", "sft", "dpo", "tis", "icepop", "reinforce++"),
    "tp2-pp2": ("clip", "dual", "cispo", "kl", "distilled"),
    "cp2": tuple(OBJECTIVES),
}
"""Objectives by layout in CI: all where one rank has several micro-batches and where ranks divide sequences,
and some where they divide the batch or the model. The others are left to `make prove`."""


def rows(*names):
    """Each division with each of these objectives."""
    return [
        pytest.param(division, name, marks=[] if division == "split" else pytest.mark.slow)
        if name in DAILY.get(division, ())
        else pytest.param(division, name, marks=pytest.mark.full)
        for division in DIVISIONS
        for name in names
    ]


def stepped(trainer, names, tokens, samples, reference, folder):
    """Take one step on each of these objectives from the imported weights, in micro-batches of that many tokens."""
    from trainer_core.phases.policy import PolicyPhase

    passes, metrics = dataclasses.replace(trainer._passes, limits=BatchLimits(tokens)), {}
    for name in names:
        trainer.import_model()
        policy = PolicyConfig.model_validate(OBJECTIVES[name])
        phase = PolicyPhase(passes, trainer._optimizer, policy, TEMPERATURE, (0,))
        metrics[name] = phase.run(samples, reference if policy.needs_reference else None).report
        export(trainer, f"{folder}/{name}")
    return metrics


@pytest.fixture(scope="module")
def samples(model_dir):
    """Draw by policies that are near the model, the older of which sampled the first half of each response; values of
    samples that do not count are NaN."""
    drawn = random_samples(3, turns=True)
    sequences = np.split(drawn.tokens, np.cumsum(drawn.lengths)[:-1])
    (own,) = run_ranks(1, hugging_face_logprobs, model_dir, sequences, TEMPERATURE)
    flat = np.concatenate([one[places_of(drawn, row) - 1] for row, one in enumerate(own)])
    halves = np.concatenate([np.arange(size) * 2 < size for size in drawn.response_lengths])
    near = flat + np.random.default_rng(0).normal(0, 1, len(flat)) * np.where(halves, 0.37, 0.2)
    teacher = flat + np.random.default_rng(2).normal(0, 0.8, len(flat))
    for values in (near, teacher):
        values[~drawn.per_response_token(drawn.usable)] = np.nan
    return dataclasses.replace(
        drawn, engine_logprobs=near.astype(np.float32), teacher_logprobs=teacher.astype(np.float32)
    )


@pytest.fixture(scope="module")
def reference(samples):
    return (samples.engine_logprobs - np.random.default_rng(1).normal(0, 0.5, len(samples.engine_logprobs))).astype(
        np.float32
    )


@pytest.fixture(scope="module")
def expected(model_dir, samples, reference, tmp_path_factory):
    folder = tmp_path_factory.mktemp("plain")
    (losses,) = run_ranks(1, plain_steps, model_dir, samples, reference, TEMPERATURE, OBJECTIVES, str(folder))
    return losses, {name: read_export(folder / name) for name in OBJECTIVES}


@pytest.fixture(scope="module")
def found(model_dir, samples, reference, tmp_path_factory):
    """Metrics and weights after a step, by division and objective; those of a day are computed together."""
    done = {}

    def step(division, name):
        daily = DAILY.get(division, ())
        names = daily if name in daily else tuple(one for one in OBJECTIVES if one not in daily)
        if (division, name) not in done:
            parallel, tokens = DIVISIONS[division]
            folder = tmp_path_factory.mktemp("stepped")
            settings = TrainerConfig(parallel=parallel, optimizer=PLAIN_GRADIENT, max_length=64)
            given = names, tokens, samples, reference, str(folder)
            metrics = run_trainers(model_dir, settings, stepped, *given)[0]
            done.update({(division, one): (metrics[one], read_export(folder / one)) for one in names})
        return done[division, name]

    return step


@pytest.mark.slow
@pytest.mark.parametrize(("division", "name"), rows(*OBJECTIVES))
def test_a_step_is_that_of_a_plain_implementation(division, name, expected, found, model_dir):
    losses, weights = expected
    metrics, own = found(division, name)
    assert metrics["loss"] == pytest.approx(losses[name], rel=1e-4, abs=1e-5)
    assert own.keys() == weights[name].keys()
    original = read_export(model_dir)
    assert max(np.abs(own[key] - original[key]).max() for key in original) > 1e-2
    for key, weight in weights[name].items():
        np.testing.assert_allclose(own[key], weight, rtol=0, atol=5e-6, err_msg=key)


@pytest.mark.parametrize(("division", "name"), rows("clip", "dual", "gspo", "cispo"))
def test_some_ratios_are_clipped(division, name, found):
    metrics, _ = found(division, name)
    assert 0.05 < metrics["clip_fraction"] < 0.95


@pytest.mark.parametrize(("division", "name"), rows("tis", "tis-sequence", "icepop", "mask-sequence"))
def test_the_correction_is_reported(division, name, found):
    metrics, _ = found(division, name)
    assert 0.05 < metrics["correction_fraction"] < 0.95
    assert 0.01 < metrics["engine_kl"] < 0.1  # differences of 0.3 nat are a KL of 0.045 (0.37 and 0.2: 0.044)
