"""Micro-batches that are launched as a graph. Without a card the work is repeated instead."""

from dataclasses import replace

import numpy as np
import pytest

from storage.errors import InputError
from tests.trainer_core.models import VOCABULARY, random_samples
from tests.trainer_core.ranks import run_ranks, run_trainers
from trainer_core.batches.sequences import Samples
from trainer_core.config import MegatronConfig, OptimizerConfig, ParallelConfig, RankSpec, TrainerConfig
from trainer_core.model.replay import Pace, Recorders
from trainer_core.objectives.objective_config import PolicyConfig
from trainer_core.start import start_trainer


def equal_lengths(seed, count=24):
    """Samples of one length: micro-batches with equally many have one shape."""
    generator = np.random.default_rng(seed)
    return Samples(
        tokens=generator.integers(0, VOCABULARY, count * 9).astype(np.int32),
        prompt_lengths=np.full(count, 4),
        response_lengths=np.full(count, 5),
        engine_logprobs=-5 * generator.random(count * 5).astype(np.float32),
        rewards=generator.random(count).astype(np.float32),
        groups=(np.arange(count) // 4).astype(np.int32),
        usable=np.ones(count, dtype=bool),
    )


class Repetition:
    """Replaces `replay.Graphs` without a card: each repetition fills in its results in place."""

    def __init__(self, pays):
        self._pays, self.left = pays, []

    def first(self, work):
        return work()

    def pays(self, left, positions):
        self.left.append(left)
        return self._pays

    def record(self, work, positions):
        results = [{}]

        def again():
            for name, value in work()[0].items():
                results[0].setdefault(name, value.clone()).copy_(value)

        return results, again


def repetitions(pays):
    return Recorders(scoring=Repetition(pays), training=Repetition(pays))


def trained(trainer, folder, recorders, samples):
    trainer.import_model()
    if recorders is not None:
        trainer._passes = replace(trainer._passes, recorders=recorders)
    metrics = [trainer.train_policy(one, 0.9) for one in samples]
    return metrics, trainer.save(folder).identity


def trained_in_pieces(trainer, folder, recorders, samples):
    result = trained(trainer, folder, recorders, samples)
    assert len(recorders.training.left) == 2 * len(samples)  # of each epoch
    assert len(recorders.scoring.left) >= len(samples)  # before the first of them
    return result


def configuration(**changes):
    policy = PolicyConfig.model_validate({"kl_sample": 16, "epochs": 2, "entropy_coefficient": 0.01})
    optimizer = OptimizerConfig(learning_rate=1e-2)
    return TrainerConfig(optimizer=optimizer, policy=policy, micro_batch_size=2, max_length=64, **changes)


@pytest.mark.slow
@pytest.mark.parametrize("replicas", [1, 2])
def test_recorded_micro_batches_train_as_others_do(model_dir, tmp_path, replicas):
    config = configuration(parallel=ParallelConfig(data=replicas))
    samples = [equal_lengths(seed) for seed in (1, 2)]
    plain = run_trainers(model_dir, config, trained, str(tmp_path), None, samples)
    for pays in (True, False):
        assert plain == run_trainers(model_dir, config, trained_in_pieces, str(tmp_path), repetitions(pays), samples)


def test_what_fills_batches_up_to_one_shape_changes_no_update(model_dir, tmp_path):
    config = configuration().model_copy(update={"micro_batch_size": 8})  # two batches: too few to be recorded
    samples = [random_samples(seed) for seed in (1, 2)]
    (plain, _), (filled, _) = (
        run_trainers(model_dir, config, trained, str(tmp_path), recorders, samples)[0]
        for recorders in (None, repetitions(pays=True))
    )
    for one, other in zip(plain, filled, strict=True):
        assert other == pytest.approx(one, rel=1e-4, abs=1e-6)


@pytest.mark.parametrize(
    ("pace", "left", "pays"),
    [
        (Pace(), 3, False),  # nothing takes time
        (Pace(launch=0.2, elapsed=0.2), 3, True),  # the host is slower; the first graph will show the difference
        (Pace(launch=0.2, elapsed=0.2), 1, False),
        (Pace(launch=0.2, elapsed=0.2, recording=0.2, position=1e-6), 13, True),
        (Pace(launch=0.2, elapsed=0.2, recording=0.2, position=19e-5), 13, False),  # 0.19 s of the device each
        (Pace(launch=0.2, elapsed=0.2, recording=0.2, position=19e-5), 31, True),
        (Pace(launch=0.2, elapsed=0.24), 31, False),  # the device is slower, which a graph does not change
        (Pace(launch=0.2, elapsed=0.24, recording=0.01, position=1e-6), 31, False),
    ],
)
def test_micro_batches_are_recorded_if_that_pays(pace, left, pays):
    assert pace.pays(left, positions=1000) == pays


def refusal(rank, world_size, store, model_dir, config):
    with pytest.raises(InputError) as caught:
        start_trainer(model_dir, config, RankSpec(rank=rank, world_size=world_size, store=store))
    return str(caught.value)


def test_graphs_that_cannot_be_recorded_are_refused_with_all_reasons(model_dir):
    config = configuration(megatron=MegatronConfig(cuda_graphs=True, recompute="layers"))
    mine = PolicyConfig.model_validate({"loss": {"type": "custom", "function": "mine.py:loss"}})
    (message,) = run_ranks(1, refusal, model_dir, config.model_copy(update={"policy": mine}))
    reasons = ("Transformer Engine", "recompute = 'layers'", "train.policy.loss is code of your own")
    assert all(word in message for word in ("cuda_graphs = true", *reasons))
