"""History of a run, its next iteration, and signs that it cannot learn: from its manifests alone."""

import bisect
import itertools
import statistics
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from enum import StrEnum

from pydantic import BaseModel

from flows.views.table import Row, row_of
from storage.backends.root import Root
from storage.ids import Workflow
from storage.manifest import Manifest, find, load
from storage.parallel import each
from storage.revisions import Revisions, read_revisions
from storage.upkeep.catalog import Names, names
from tasks.config.evaluation import PASS
from tasks.config.run import RunConfig
from tasks.stages.names import ITERATION, RETRAINING, WORKFLOW, Stage
from tasks.stages.views import Selected

Metrics = Mapping[str, Mapping[str, float | None]]

_WHOLE = 1.0
PLOT = "curves.png"
_SELECTING = (Stage.SELECT, Stage.RESCORE)  # of a run on stored samples only
_UNSCORED = ("errors", "timeouts", "non_finite")
_READERS = 16
_WARM = 3  # first iteration that counts for the median duration: earlier ones also start processes and fill caches


class Trouble(StrEnum):
    """A sign that an iteration teaches nothing."""

    EQUAL_GROUPS = "equal-groups"
    ZERO_GRADIENT = "zero-gradient"
    TRUNCATED = "truncated"
    NEVER_STOPPED = "never-stopped"  # of a run: every iteration was truncated


EXPLANATIONS = {
    Trouble.EQUAL_GROUPS: "in every group all rewards are equal, so no sample has an advantage and nothing is learned. "
    "Check the reward function (ratchet samples shows what it was given), take other prompts, or raise rollout.samples "
    "or rollout.temperature",
    Trouble.ZERO_GRADIENT: "the gradient is zero, so nothing is learned. Check the rewards and the learning rate",
    Trouble.TRUNCATED: "every response was cut off at rollout.max_tokens. Raise it, or check that the model ends its "
    "answers",
    Trouble.NEVER_STOPPED: "no response has ever ended with a stop token. Check the stop tokens of the model, or raise "
    "rollout.max_tokens",
}  # meaning of each sign, and possible remedies


def troubles_of(metrics: Metrics) -> tuple[Trouble, ...]:
    """The troubles of one iteration. A metric that is not there is no sign of any."""
    found = {
        Trouble.EQUAL_GROUPS: metrics.get(Stage.REWARD, {}).get("equal_groups") == _WHOLE,
        Trouble.ZERO_GRADIENT: metrics.get(Stage.TRAIN, {}).get("grad_norm") == 0,
        Trouble.TRUNCATED: metrics.get(Stage.ROLLOUT, {}).get("truncated") == _WHOLE,
    }
    return tuple(trouble for trouble, there in found.items() if there and metrics.get(Stage.ROLLOUT))


def run_troubles(troubles: Sequence[tuple[int, Sequence[Trouble]]]) -> tuple[str, ...]:
    """The troubles of a run in a line each, given those of each of its RL iterations that has sampled."""
    lines = []
    for trouble in (Trouble.EQUAL_GROUPS, Trouble.ZERO_GRADIENT, Trouble.TRUNCATED):
        numbers = [iteration for iteration, found in troubles if trouble in found]
        never = trouble is Trouble.TRUNCATED and len(numbers) == len(troubles)
        meant = EXPLANATIONS[Trouble.NEVER_STOPPED if never else trouble]
        lines += [f"{len(numbers)} of {len(troubles)} iterations, last {numbers[-1]}: {meant}"] if numbers else []
    return tuple(lines)


class IterationRecord(BaseModel, frozen=True, extra="forbid"):
    """One iteration for people; a figure is None if its stage is not done or does not report it."""

    iteration: int  # 0 is the preparation
    done: tuple[Stage, ...]  # committed stages, in the order of work
    stage_seconds: dict[Stage, float]  # duration of each committed stage, without starts of processes
    start_seconds: float = 0.0  # time in which its stages waited for processes that were just started
    seconds: float  # time spent, including the time between stages, but not the time between two processes
    reward: float | None  # mean reward of the sampled responses
    held_out_reward: float | None
    """Mean reward of greedy answers to held-out prompts, after the weights of this iteration were synced."""
    pass_rate: float | None  # share of these answers that pass; None if it is not known which do
    passing: str | None
    kl: float | None
    """Mean KL divergence of the policy before the step from the one after it, KL(before || after), nat per token. It is
    measured, whether or not a KL to the reference is in the loss."""
    entropy: float | None  # mean entropy of the policy, nat per token
    grad_norm: float | None  # norm of the gradient before clipping
    tokens_per_second: float | None  # response tokens per second while sampling
    turns: float | None = None  # mean number of the policy's answers in a conversation; None without environments
    environment_failures: int = 0  # failures of environments in the rollout, with those that a fresh one made good
    unscored: dict[str, int] = {}
    """Samples that have no reward, by the reason: errors, timeouts, non_finite. Empty if all have one."""
    troubles: tuple[Trouble, ...] = ()  # signs that nothing can be learned from it
    row: Row


def wanted_stages(config: RunConfig, iteration: int) -> tuple[Stage, ...]:
    unscored = () if config.train.policy.needs_rewards else (Stage.REWARD,)
    again = config.retrain is not None and config.retrain.rescore
    without = unscored if again else (*unscored, Stage.RESCORE)
    return tuple(Stage(stage) for stage in workflow_of(config).stages_of(iteration) if stage not in without)


def workflow_of(config: RunConfig) -> Workflow:
    return WORKFLOW if config.retrain is None else RETRAINING


def evaluation_due(iteration: int, iterations: int, every: int) -> bool:
    """True after every `every`-th iteration, and after the last."""
    return every > 0 and (iteration % every == 0 or iteration == iterations)


def last_iteration(root: Root, run: str, config: RunConfig) -> int:
    """The last iteration that a run is to have; 0 for one whose samples are not selected yet."""
    if config.retrain is None:
        return config.run.iterations
    selection = find(root, run, 0, Stage.SELECT)
    return 0 if selection is None else config.retrain.iterations(len(Selected(selection).shares))


def ended_iterations(root: Root, run: str, at_most: int, ends: str = WORKFLOW.ends_iteration) -> int:
    """Number of iterations, counted from 0, whose last stage but the evaluation is committed.

    It takes O(log at_most) look-ups: each such stage is made from the one before it, so there is no gap."""
    head = read_revisions(root, run)
    return bisect.bisect_left(range(at_most), True, key=lambda number: find(root, run, number, ends, head) is None)


def next_iteration(root: Root, run: str, config: RunConfig) -> int:
    """The iteration that a run continues with; one past the last if it is complete. Takes a few look-ups, no listing.

    An iteration is complete if its weights are synced (or its state, on stored samples, is trained) and its evaluation,
    if due, is done. Evaluations that an earlier configuration did not ask for are not done later."""
    last = last_iteration(root, run, config)
    ended = ended_iterations(root, run, last + 2, workflow_of(config).ends_iteration)
    return next_after(ended, last, config, lambda iteration, stage: find(root, run, iteration, stage) is not None)


def next_after(ended: int, last: int, config: RunConfig, done: Callable[[int, Stage], bool]) -> int:
    """The first iteration up to `last` that is not complete; `done` is asked about iteration 0 and the last ended."""
    if ended == 0 or not all(done(0, stage) for stage in wanted_stages(config, 0) if stage in _SELECTING):
        return 0
    newest = ended - 1
    due = newest <= last and evaluation_due(newest, last, config.evaluate.every) and config.retrain is None
    return newest if due and not done(newest, Stage.EVALUATE) else min(ended, last + 1)


def read_history(root: Root, run: str, revisions: Revisions | None = None) -> list[IterationRecord]:
    """All iterations that have begun, from 0. Reads each manifest once; `revisions` as for `read_record`."""
    return history_of(root, names(root, run, revisions=revisions))


def history_of(root: Root, recorded: Names) -> list[IterationRecord]:
    newest = recorded.newest
    places = list(itertools.takewhile(bool, (_places(newest, iteration) for iteration in itertools.count())))
    manifests = iter(each(lambda place: load(root, newest[place]), itertools.chain(*places), _READERS))
    history: list[IterationRecord] = []
    before: Manifest | None = None
    for some in (list(itertools.islice(manifests, len(one))) for one in places):
        history.append(record_of(some, before))
        before = some[-1]
    return history


def read_record(root: Root, run: str, iteration: int, revisions: Revisions | None = None) -> IterationRecord:
    """One iteration that has begun, from its manifests and the last one of the iteration before. `revisions`, seen from
    the one that is asked for, are read by default."""
    seen = read_revisions(root, run) if revisions is None else revisions
    before = names(root, run, iteration - 1, seen).newest if iteration else {}
    last = [load(root, before[place]) for place in _places(before, iteration - 1)[-1:]]
    return record_of(manifests_of(root, names(root, run, iteration, seen), iteration), next(iter(last), None))


def manifests_of(root: Root, recorded: Names, iteration: int) -> list[Manifest]:
    """The committed manifests of one iteration, in the order of work."""
    places = _places(recorded.newest, iteration)
    return each(lambda place: load(root, recorded.newest[place]), places, len(ITERATION))


def _places(newest: Mapping[tuple[int, str], str], iteration: int) -> list[tuple[int, str]]:
    stages = (*WORKFLOW.stages_of(iteration), *_SELECTING)
    return [(iteration, stage) for stage in stages if (iteration, stage) in newest]


def record_of(manifests: Sequence[Manifest], before: Manifest | None) -> IterationRecord:
    metrics = {manifest.stage: manifest.metrics for manifest in manifests}
    seconds = _seconds(manifests, before)
    row = row_of(manifests, seconds)
    stages = (Stage.REWARD, Stage.TRAIN, Stage.EVALUATE, Stage.ROLLOUT)
    rewards, trained, evaluated, sampled = (metrics.get(one, {}) for one in stages)
    took = {Stage(stage): values.get("seconds") for stage, values in metrics.items()}
    return IterationRecord(
        **{name: trained.get(name) for name in ("kl", "entropy", "grad_norm")},
        iteration=manifests[0].iteration,
        done=tuple(Stage(manifest.stage) for manifest in manifests),
        stage_seconds={stage: seconds for stage, seconds in took.items() if seconds is not None},
        start_seconds=sum(values.get("start_seconds") or 0.0 for values in metrics.values()),
        seconds=seconds,
        # stored samples are not scored by their own iteration; iteration 0 holds another run's state
        reward=rewards.get("reward_mean", trained.get("reward_mean") if manifests[0].iteration else None),
        held_out_reward=evaluated.get("reward_mean"),
        pass_rate=evaluated.get("pass_rate"),
        passing=row.texts.get(PASS),
        tokens_per_second=sampled.get("tokens_per_second"),
        turns=sampled.get("turns_mean"),
        environment_failures=int(sampled.get("environment_failures") or 0),
        unscored={name: int(count) for name in _UNSCORED if (count := rewards.get(name))},
        troubles=troubles_of(metrics),
        row=row,
    )


def _seconds(manifests: Sequence[Manifest], before: Manifest | None) -> float:
    total = timedelta()
    for manifest in manifests:
        # time between two stages of one process is part of the work, time between two processes is not
        continued = before if before is not None and before.writer == manifest.writer else None
        total += max(manifest.finished - (manifest.started if continued is None else continued.finished), timedelta())
        # a rollout beside the training before it may have been finished earlier
        before = manifest if before is None or manifest.finished > before.finished else before
    return total.total_seconds()


def seconds_per_iteration(history: Sequence[IterationRecord]) -> float | None:
    """Median duration of the RL iterations after the second, or of all if there are no later ones."""
    rl = [record for record in history if record.iteration and Stage.WEIGHT_SYNC in record.done]
    warm = [record for record in rl if record.iteration >= _WARM] or rl
    return statistics.median(record.seconds for record in warm) if warm else None
