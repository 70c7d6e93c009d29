"""Samples and reports in a phase of training."""

import math
import tempfile
from dataclasses import replace

import numpy as np
import pytest

from storage.errors import InputError, NumericsError, StageFailed
from tests.trainer_core.models import random_examples, random_samples, read_export
from tests.trainer_core.oracle import export
from tests.trainer_core.ranks import run_trainers
from trainer_core.batches.sequences import Samples
from trainer_core.config import OptimizerConfig, ParallelConfig, PolicyConfig, TrainerConfig

SINGLE, PAIR = ParallelConfig(), ParallelConfig(pipeline=2)
LAYOUTS = [pytest.param(SINGLE, id="single"), pytest.param(PAIR, id="pp2", marks=pytest.mark.slow)]


def configuration(parallel=SINGLE, learning_rate=1e-3, **policy):
    return TrainerConfig(
        parallel=parallel,
        optimizer=OptimizerConfig(learning_rate=learning_rate),
        policy=PolicyConfig(**policy),
        micro_batch_size=4,
        max_length=64,
    )


def train(trainer, folder, samples, temperature=1.0):
    trainer.import_model()
    metrics = trainer.train_policy(samples, temperature)
    export(trainer, folder)
    return metrics


def only_usable(samples):
    keep, tokens, responses = samples.usable, [], []
    ends, response_ends = np.cumsum(samples.lengths), np.cumsum(samples.response_lengths)
    for row in np.flatnonzero(keep):
        tokens.append(samples.tokens[ends[row] - samples.lengths[row] : ends[row]])
        first = response_ends[row] - samples.response_lengths[row]
        responses.append(samples.engine_logprobs[first : response_ends[row]])
    return Samples(
        tokens=np.concatenate(tokens),
        prompt_lengths=samples.prompt_lengths[keep],
        response_lengths=samples.response_lengths[keep],
        engine_logprobs=np.concatenate(responses),
        rewards=samples.rewards[keep],
        groups=samples.groups[keep],
        usable=keep[keep],
    )


def test_samples_without_reward_take_no_part(model_dir, tmp_path):
    samples = random_samples()
    samples.rewards[~samples.usable] = math.nan
    (masked,) = run_trainers(model_dir, configuration(), train, str(tmp_path / "masked"), samples)
    (dropped,) = run_trainers(model_dir, configuration(), train, str(tmp_path / "dropped"), only_usable(samples))
    assert masked == dropped
    left, right = read_export(tmp_path / "masked"), read_export(tmp_path / "dropped")
    assert all(np.array_equal(left[name], right[name]) for name in left)


def test_groups_without_spread_leave_the_policy_as_it_is(model_dir, tmp_path):
    samples = replace(random_samples(), rewards=np.ones(16, dtype=np.float32))
    (metrics,) = run_trainers(model_dir, configuration(kl_sample=16), train, str(tmp_path), samples)
    assert metrics["grad_norm"] == 0
    assert metrics["kl"] == 0
    original, trained = read_export(model_dir), read_export(tmp_path)
    assert all(np.array_equal(original[name], trained[name]) for name in original)


def test_the_report_of_a_policy_step(model_dir, tmp_path):
    samples = random_samples()
    settings = configuration(mini_batches=2, epochs=2, kl_sample=4)
    (metrics,) = run_trainers(model_dir, settings, train, str(tmp_path), samples)
    assert metrics["steps"] == 4
    assert metrics["tokens"] == samples.response_lengths[samples.usable].sum()
    assert metrics["learning_rate"] == 1e-3
    assert metrics["kl"] > 0
    assert 0 < metrics["entropy"] <= math.log(100)
    assert 0 <= metrics["clip_fraction"] < 1
    assert metrics["engine_logprob_diff_max"] >= metrics["engine_logprob_diff_mean"] > 0
    assert "kl_reference" not in metrics


def passes_of_an_iteration(trainer, reference):
    """Sequences in each pass of one iteration, and whether gradients were left."""
    import torch

    trainer.import_model()
    if reference:
        with tempfile.TemporaryDirectory() as folder:
            trainer.save(folder)
            trainer.load_reference(folder, "reference")
    seen = []
    trainer._model.chunks[0].register_forward_hook(
        lambda module, inputs, keywords, output: seen.append(
            (int((inputs[1] == 0).sum()), torch.is_grad_enabled())  # a segment begins at each position 0
        ),
        with_kwargs=True,
    )
    metrics = trainer.train_policy(random_samples(), 1.0, reference)
    return seen, sorted(metrics)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        ({}, [(15, True)]),
        ({"kl_sample": 4}, [(15, True), (4, False)]),
        ({"kl_coefficient": 0.1}, [(15, False), (15, True)]),
        ({"mini_batches": 2}, [(15, False), (8, True), (7, True)]),
        ({"epochs": 2}, [(15, False), (15, True), (15, True)]),
        ({"correction": {"type": "truncate"}}, [(15, True)]),
        ({"old_policy": "behaviour"}, [(15, True)]),
        ({"kl_coefficient": 0.1, "kl_in": "reward"}, [(15, False), (15, False), (15, True)]),
        ({"loss": {"type": "dpo"}}, [(15, False), (8, False), (8, True)]),
        ({"loss": {"type": "dpo"}, "mini_batches": 2}, [(15, False), (8, False), (4, True), (4, False), (4, True)]),
        ({"loss": {"type": "sft", "above": 0.5}}, [(10, True)]),
    ],
    ids=str,
)
def test_an_iteration_makes_no_pass_too_many(model_dir, policy, expected):
    settings = configuration(**policy).model_copy(update={"micro_batch_size": None})
    ((seen, metrics),) = run_trainers(model_dir, settings, passes_of_an_iteration, settings.policy.needs_reference)
    assert seen == expected
    assert ("kl" in metrics) == ("kl_sample" in policy)
    assert "entropy" in metrics


def twice(trainer, folder, samples):
    trainer.import_model()
    metrics = [trainer.train_policy(samples, 1.0) for _ in range(2)]
    export(trainer, folder)
    return metrics


def test_measuring_the_kl_leaves_no_trace(model_dir, tmp_path):
    found = {}
    for size in (0, 5):
        folder = tmp_path / str(size)
        (metrics,) = run_trainers(model_dir, configuration(kl_sample=size), twice, str(folder), random_samples())
        found[size] = [{k: v for k, v in one.items() if k != "kl"} for one in metrics], read_export(folder)
    assert found[0][0] == found[5][0]
    assert all(np.array_equal(found[0][1][name], found[5][1][name]) for name in found[0][1])


def test_a_single_update_is_the_first_of_several(model_dir):
    """The ratio is 1 without a scoring pass too: the gradient is that of the surrogate at the old weights."""
    one, two = (
        run_trainers(model_dir, configuration(learning_rate=0.0, epochs=epochs), train_only, random_samples())[0]
        for epochs in (1, 2)
    )
    assert one["clip_fraction"] == two["clip_fraction"] == 0
    for name in ("loss", "grad_norm", "entropy", "engine_logprob_diff_mean"):
        assert one[name] == pytest.approx(two[name], rel=1e-6, abs=1e-7)


def train_only(trainer, samples):
    trainer.import_model()
    return trainer.train_policy(samples, 1.0)


def test_hopeless_log_ratios_move_nothing_and_break_nothing(model_dir):
    """An engine or reference may call a sample impossible: the ratio is clamped, the gradient stays finite."""
    (metrics,) = run_trainers(model_dir, configuration(kl_coefficient=1.0), far_from_the_reference, random_samples())
    assert math.isfinite(metrics["loss"])
    assert math.isfinite(metrics["grad_norm"])


def far_from_the_reference(trainer, samples):
    """Train with a reference that gives e^-99 to every token that counts, and no number to the others."""
    from trainer_core.phases.policy import PolicyPhase

    trainer.import_model()
    counted = samples.per_response_token(samples.usable)
    reference = np.where(counted, -99, math.nan).astype(np.float32)
    phase = PolicyPhase(trainer._passes, trainer._optimizer, trainer._config.policy, 1.0, (0,))
    return phase.run(samples, reference).report


def train_on_own_logprobs(trainer, samples, temperature):
    trainer.import_model()
    sequences = np.split(samples.tokens, np.cumsum(samples.lengths)[:-1])
    own = trainer.logprobs(sequences, temperature)
    responses = [values[prompt - 1 :] for values, prompt in zip(own, samples.prompt_lengths, strict=True)]
    same = replace(samples, engine_logprobs=np.concatenate(responses))
    return trainer.train_policy(same, temperature), same.engine_logprobs, trainer.policy_logprobs()


@pytest.mark.parametrize(("temperature", "mini_batches"), [(1.0, 1), (0.6, 2)])
def test_an_engine_that_agrees_differs_by_rounding_alone(model_dir, temperature, mini_batches):
    given, samples = configuration(mini_batches=mini_batches), random_samples()
    ((metrics, own, before),) = run_trainers(model_dir, given, train_on_own_logprobs, samples, temperature)
    assert metrics["engine_logprob_diff_max"] < 1e-5
    trained = samples.per_response_token(samples.usable)
    assert np.array_equal(np.isnan(before), ~trained)
    np.testing.assert_allclose(before[trained], own[trained], rtol=0, atol=1e-5)


def improve(trainer, samples, rounds):
    trainer.import_model()
    sequences = np.split(samples.tokens, np.cumsum(samples.lengths)[:-1])
    before = trainer.logprobs(sequences)
    for _ in range(rounds):
        trainer.train_policy(samples, 1.0)
    after = trainer.logprobs(sequences)
    gains = [a[prompt - 1 :].sum() - b[prompt - 1 :].sum() for a, b, prompt in
             zip(after, before, samples.prompt_lengths, strict=True)]  # fmt: skip
    return np.array(gains)


def test_what_was_rewarded_becomes_more_probable(model_dir):
    rewards = np.tile(np.array([0, 1], dtype=np.float32), 8)
    samples = replace(random_samples(), rewards=rewards, usable=np.ones(16, dtype=bool))
    (gains,) = run_trainers(model_dir, configuration(), improve, samples, 5)
    assert gains[rewards == 1].mean() > 0 > gains[rewards == 0].mean()


def compare_with_reference(trainer, folder, compare):
    trainer.import_model()
    trainer.save(f"{folder}/reference")
    export(trainer, f"{folder}/imported")
    trainer.load_reference(f"{folder}/reference", "reference")
    export(trainer, f"{folder}/unmoved")
    metrics = [trainer.train_policy(random_samples(seed), 1.0, reference=compare) for seed in (1, 2)]
    export(trainer, f"{folder}/trained")
    return [report.pop("kl_reference", None) for report in metrics], metrics


@pytest.mark.slow
@pytest.mark.parametrize("parallel", LAYOUTS)
def test_the_reference_is_compared_with_and_leaves_no_trace(model_dir, tmp_path, parallel):
    settings = configuration(parallel)
    compared = run_trainers(model_dir, settings, compare_with_reference, str(tmp_path / "a"), True)
    alone = run_trainers(model_dir, settings, compare_with_reference, str(tmp_path / "b"), False)
    at_start, after_a_step = compared[0][0]
    assert at_start == 0
    assert after_a_step > 1e-6
    assert [metrics for _, metrics in compared] == [metrics for _, metrics in alone]
    for left, right in [("a/imported", "a/unmoved"), ("a/trained", "b/trained")]:
        before, after = read_export(tmp_path / left), read_export(tmp_path / right)
        assert all(np.array_equal(before[name], after[name]) for name in before)


def pull(trainer, folder):
    trainer.import_model()
    trainer.save(f"{folder}/reference")
    trainer.load_reference(f"{folder}/reference", "reference")
    samples = random_samples(1)
    trainer.train_policy(samples, 1.0, reference=True)
    flat = replace(samples, rewards=np.ones(16, np.float32))
    return [trainer.train_policy(flat, 1.0, reference=True)["kl_reference"] for _ in range(12)]


@pytest.mark.slow
def test_a_kl_coefficient_leads_back_to_the_reference(model_dir, tmp_path):
    settings = configuration(kl_coefficient=1.0)
    (distances,) = run_trainers(model_dir, settings, pull, str(tmp_path))
    assert distances[-1] < 0.5 * max(distances)


def first_error(trainer, samples, reference):
    trainer.import_model()
    with pytest.raises((InputError, StageFailed)) as caught:
        trainer.train_policy(samples, 1.0, reference)
    return type(caught.value).__name__, str(caught.value)


@pytest.mark.parametrize(
    ("settings", "reference", "named"),
    [({"kl_coefficient": 0.1}, False, "kl_coefficient"), ({}, True, "load_reference")],
)
def test_a_missing_reference_is_refused(model_dir, settings, reference, named):
    (found,) = run_trainers(model_dir, configuration(**settings), first_error, random_samples(), reference)
    assert found[0] == "InputError"
    assert named in found[1]


def test_a_sequence_beyond_the_longest_is_refused(model_dir):
    settings = configuration().model_copy(update={"max_length": 9})
    (found,) = run_trainers(model_dir, settings, first_error, random_samples(), False)
    assert found[0] == "InputError"
    assert "max_length is 9" in found[1]


@pytest.mark.parametrize(
    "policy",
    [
        {"leave_out_equal_groups": True},
        {"loss": {"type": "sft", "above": 1.0}},
        {"overlong": {"type": "leave_out", "length": 1}},
    ],
    ids=str,
)
def test_when_nothing_is_left_to_train_on_the_policy_stays(model_dir, tmp_path, policy):
    samples = replace(random_samples(), rewards=np.ones(16, dtype=np.float32))
    (metrics,) = run_trainers(model_dir, configuration(**policy), train, str(tmp_path), samples)
    assert metrics == {"grad_norm": 0, "steps": 0, "tokens": 0}
    original, trained = read_export(model_dir), read_export(tmp_path)
    assert all(np.array_equal(original[name], trained[name]) for name in original)


def test_samples_of_which_none_is_usable_fail_the_stage(model_dir):
    samples = replace(random_samples(), usable=np.zeros(16, dtype=bool))
    (found,) = run_trainers(model_dir, configuration(), first_error, samples, False)
    assert found[0] == "StageFailed"


def survive_bad_rewards(trainer, folder):
    trainer.import_model()
    rewards = random_samples().rewards.copy()
    rewards[0] = math.inf
    with pytest.raises(NumericsError) as caught:
        trainer.train_policy(replace(random_samples(), rewards=rewards), 1.0)
    export(trainer, folder)
    return str(caught.value), trainer.train_policy(random_samples(), 1.0)


@pytest.mark.parametrize("parallel", LAYOUTS)
def test_a_loss_that_is_not_finite_is_not_applied(model_dir, tmp_path, parallel):
    untouched = run_trainers(model_dir, configuration(parallel), train, str(tmp_path / "clean"), random_samples())
    for rank, (message, metrics) in enumerate(
        run_trainers(model_dir, configuration(parallel), survive_bad_rewards, str(tmp_path / "bad"))
    ):
        assert "update 1" in message
        assert metrics == untouched[rank]  # weights and moments were those after the import
    original, exported = read_export(model_dir), read_export(tmp_path / "bad")
    assert all(np.array_equal(original[name], exported[name]) for name in original)


def warm_up(trainer, folder, steps, batch_size, optimizer):
    trainer.import_model()
    metrics = trainer.train_supervised(random_examples(), steps, batch_size, optimizer)
    export(trainer, folder)
    return metrics, trainer.train_policy(random_samples(), 1.0)["learning_rate"]


@pytest.mark.slow
def test_supervised_steps_learn_the_examples(model_dir, tmp_path):
    settings = configuration(PAIR)
    optimizer = OptimizerConfig(learning_rate=1e-2, warmup_steps=2)
    ranks = run_trainers(model_dir, settings, warm_up, str(tmp_path), 30, 12, optimizer)
    metrics, policy_rate = ranks[0]
    assert ranks[1] == ranks[0]
    assert metrics["loss"] < 0.5 * metrics["first_loss"]
    assert (metrics["step/1"], metrics["step/30"]) == (metrics["first_loss"], metrics["loss"])
    assert sum(name.startswith("step/") for name in metrics) == 30
    assert metrics["steps"] == 30
    assert metrics["learning_rate"] == pytest.approx(1e-2)
    assert policy_rate == pytest.approx(1e-3)


def test_no_supervised_steps_change_nothing(model_dir, tmp_path):
    (result,) = run_trainers(model_dir, configuration(), warm_up, str(tmp_path), 0, 8, None)
    assert result[0]["steps"] == 0
    original, exported = read_export(model_dir), read_export(tmp_path)
    assert all(np.array_equal(original[name], exported[name]) for name in original)


def identities(trainer, folder):
    seen = []
    trainer.import_model()
    for change in (
        lambda: trainer.train_policy(random_samples(), 1.0),
        lambda: trainer.train_supervised(random_examples(), 1, 4),
        lambda: trainer.save(f"{folder}/state"),
        lambda: trainer.logprobs([np.arange(4, dtype=np.int32)]),
        lambda: trainer.load(f"{folder}/state"),
        trainer.import_model,
    ):
        trainer.adopt("committed")
        change()
        seen.append(trainer.identity())
    return seen


def test_an_identity_ends_with_the_weights_it_names(model_dir, tmp_path):
    (seen,) = run_trainers(model_dir, configuration(), identities, str(tmp_path))
    assert seen == [None, None, "committed", "committed", None, None]
