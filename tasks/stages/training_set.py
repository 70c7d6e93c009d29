"""Samples of one update: those of a rollout with their rewards, or a share of a selection."""

from collections.abc import Callable
from dataclasses import dataclass, field

from pydantic import JsonValue

from storage.errors import StorageError
from storage.manifest import Manifest, Part, revisions
from storage.selection import SHARE
from tasks.stages.context import RunContext
from tasks.stages.names import Stage
from tasks.stages.views import Rescored, Rewards, Rollouts, Selected, Trained
from trainer_core.batches.reading import read_samples, read_selected
from trainer_core.batches.sequences import Samples


@dataclass(frozen=True)
class TrainingSet:
    """Samples of one iteration, and what is recorded about them."""

    samples: Samples
    temperature: float
    """Temperature at which they were drawn."""
    last: int
    """The last iteration of the run."""
    facts: dict[str, JsonValue]
    metrics: dict[str, float] = field(default_factory=dict)


def of_rollout(context: RunContext, rollouts: Rollouts, rewards: Rewards | None) -> TrainingSet:
    """All samples of a rollout."""
    samples = read_samples(
        context.root,
        rollouts.manifest,
        None if rewards is None else rewards.manifest,
        context.config.train.experts.replay,
    )
    temperature, last = context.config.rollout.temperature, context.config.run.iterations
    return TrainingSet(samples, temperature, last, {"cursor": rollouts.cursor})


def of_selection(
    context: RunContext, iteration: int, selected: Selected, rescored: Rescored | None, before: Trained
) -> tuple[TrainingSet, Part]:
    """The share of a selection that an iteration trains on, with the scores of `rescored`, or those it has; and its
    table."""
    shares, section, scored = selected.shares, context.config.retrain, context.config.train.policy.needs_rewards
    assert section is not None, "a run without [retrain] has another loop"
    number = section.share(iteration, len(shares), context.config.run.seed)
    scores, replay = None if rescored is None else rescored.of(number), context.config.train.experts.replay
    samples = read_selected(context.root, shares[number], scores, scored, replay)
    usable = samples.rewards[samples.usable]
    metrics = {"reward_mean": float(usable.mean())} if len(usable) and scored else {}
    metrics["epoch"] = float((iteration - 1) // len(shares) + 1)
    facts: dict[str, JsonValue] = {"cursor": before.cursor, SHARE: number}
    return TrainingSet(samples, selected.temperature, section.iterations(len(shares)), facts, metrics), shares[number]


def recorded(context: RunContext, state: Trained, before: Trained) -> TrainingSet:
    """Samples of the update that led from the state `before` to `state`, by the record of its inputs. Raises
    StorageError if a record is gone."""
    manifest = state.manifest

    def given[V](role: str, iteration: int, stage: Stage, view: Callable[[Manifest], V]) -> V:
        for one in revisions(context.root, context.run, iteration, stage, context.revisions):
            if one.digest == manifest.inputs[role]:
                return view(one)
        raise StorageError(
            f"{stage} of iteration {iteration}, from which the state of iteration {manifest.iteration} was made, is "
            "gone: `ratchet verify` shows what is missing"
        )

    if "selection" in manifest.inputs:
        selected = given("selection", 0, Stage.SELECT, Selected)
        rescored = given("reward", 0, Stage.RESCORE, Rescored) if "reward" in manifest.inputs else None
        return of_selection(context, manifest.iteration, selected, rescored, before)[0]
    rollouts = given("rollout", manifest.iteration, Stage.ROLLOUT, Rollouts)
    return of_rollout(context, rollouts, given("reward", manifest.iteration, Stage.REWARD, Rewards))
