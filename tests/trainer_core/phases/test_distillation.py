"""On-policy distillation by a teacher model: its scores against float64 on every layout, and what training makes of
them."""

import dataclasses

import numpy as np
import pytest

from storage.errors import InputError
from tests.trainer_core.models import make_family, places_of, random_samples
from tests.trainer_core.ranks import run_ranks, run_trainers
from trainer_core.config import OptimizerConfig, ParallelConfig, PolicyConfig, TrainerConfig
from trainer_core.lora import LoraConfig
from trainer_core.objectives.losses import distilled
from trainer_core.objectives.objective_config import DistillConfig

TEMPERATURE = 0.8
LAYOUTS = {
    "single": ParallelConfig(),
    "tp2": ParallelConfig(tensor=2),
    "tp2-sp-pp2": ParallelConfig(tensor=2, pipeline=2, sequence=True),
    "pp2-vpp2": ParallelConfig(pipeline=2, virtual_pipeline=2),
    "cp2-dp2": ParallelConfig(context=2, data=2),
}
QUICK = [name if name == "single" else pytest.param(name, marks=pytest.mark.slow) for name in LAYOUTS]
"""Of this file: in `test_distilling_top.py` the ranks of a quick test divide the teacher."""
DISTILL = DistillConfig(teacher="given")
TOP = DistillConfig(teacher="given", top_k=8, coefficient=0.7)


def settings(layout="single", **more):
    optimizer, policy = OptimizerConfig(learning_rate=2e-3), PolicyConfig(distill=DISTILL)
    given = {"parallel": LAYOUTS[layout], "optimizer": optimizer, "policy": policy, "max_length": 64}
    return TrainerConfig(**given | more, micro_batch_size=4)


def make_teacher(rank, world_size, store, directory):
    """Write a teacher of another family and other sizes than the student."""
    make_family(rank, world_size, store, directory, "llama", 8, 5, hidden_size=96)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Folders of a student and of its teacher."""
    student, teacher = (tmp_path_factory.mktemp(name) for name in ("student", "teacher"))
    run_ranks(1, make_family, str(student), "qwen3")
    run_ranks(1, make_teacher, str(teacher))
    return str(student), teacher


SAMPLES = random_samples(3, turns=True)
COUNTED = SAMPLES.per_response_token(SAMPLES.usable)


def in_double(rank, world_size, store, directory):
    """Log-probabilities of the policy's tokens by transformers in float64."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float64).eval()
    found = []
    for row, sequence in enumerate(np.split(SAMPLES.tokens, np.cumsum(SAMPLES.lengths)[:-1])):
        tokens, places = torch.from_numpy(sequence.astype(np.int64)), places_of(SAMPLES, row)
        with torch.no_grad():
            everything = (model(tokens[None]).logits[0, :-1] / TEMPERATURE).log_softmax(-1)
        found.append(everything[places - 1].gather(-1, tokens[places, None])[:, 0].numpy())
    return np.concatenate(found)


@pytest.fixture(scope="module")
def expected(models):
    """Log-probabilities by the student and by the teacher."""
    return [run_ranks(1, in_double, str(folder))[0] for folder in models]


def walk(trainer, teacher, folder):
    """Scores, and the report and the identity of an update with scores that were given, and found right before it."""
    trainer.import_model()
    with pytest.raises(InputError, match=r"train.policy.distill needs the teacher's log-probabilities"):
        trainer.train_policy(SAMPLES, TEMPERATURE)
    score = lambda: trainer.teacher_scores(teacher, SAMPLES, TEMPERATURE).logprobs  # noqa: E731
    scores, ends = score(), []
    for found in (lambda: scores, score):
        trainer.import_model()
        samples = dataclasses.replace(SAMPLES, teacher_logprobs=found())
        ends.append((trainer.train_policy(samples, TEMPERATURE), trainer.save(f"{folder}/{len(ends)}").identity))
    return scores, ends


@pytest.mark.parametrize("layout", QUICK)
def test_the_teacher_scores_as_in_float64_and_disturbs_nothing(models, expected, tmp_path, layout):
    own, teacher = expected
    for scores, ends in run_trainers(models[0], settings(layout), walk, models[1], str(tmp_path)):
        np.testing.assert_allclose(scores[COUNTED], teacher[COUNTED], rtol=0, atol=1e-5)
        assert not scores[~COUNTED].any()
        assert ends[0] == ends[1]
        assert np.abs(own - teacher)[COUNTED].mean() > 0.5  # the two are not easily taken for each other
        change = (teacher - own)[COUNTED]
        assert ends[0][0]["kl_teacher"] == pytest.approx((np.exp(change) - 1 - change).mean(), rel=1e-4)


def learn(trainer, teacher, distance):
    """Distances to the teacher before each of some updates, on fixed samples."""
    trainer.import_model()
    scores = trainer.teacher_scores(teacher, SAMPLES, TEMPERATURE)
    samples = dataclasses.replace(SAMPLES, teacher_logprobs=scores.logprobs, teacher_top=scores.top)
    return [trainer.train_policy(samples, TEMPERATURE)[distance] for _ in range(25)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("more", "distance"),
    [({}, "kl_teacher"), ({"lora": LoraConfig(rank=8)}, "kl_teacher"), ({"policy": PolicyConfig(distill=TOP)}, "loss")],
    ids=["weights", "lora", "top"],
)
def test_the_policy_moves_towards_the_teacher(models, more, distance):
    (distances,) = run_trainers(models[0], settings(**more), learn, models[1], distance)
    assert distances[-1] < distances[0] / 4


def test_advantages_are_those_of_a_loop():
    generator = np.random.default_rng(0)
    teacher, own, rewarded = (generator.normal(-2, 1, 40).astype(np.float32) for _ in range(3))
    counted = generator.random(40) < 0.7
    teacher[~counted] = own[~counted] = np.nan
    teacher[np.flatnonzero(counted)[0]] = -60  # beyond the limit of log-ratios
    found = distilled(
        DistillConfig(teacher="given", coefficient=0.3, reward_weight=0.7), rewarded * counted, teacher, own, counted
    )
    for place in range(40):
        reverse = max(-20.0, min(20.0, float(own[place]) - float(teacher[place]))) if counted[place] else 0.0
        value = 0.7 * float(rewarded[place]) - 0.3 * reverse if counted[place] else 0.0
        assert found[place] == pytest.approx(value, abs=1e-6)
