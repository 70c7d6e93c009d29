"""Samples of one update, from a rollout with its rewards or a share of a selection, and a teacher's scores of them."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa
from pydantic import JsonValue

from storage.digest import bytes_digest, value_digest
from storage.errors import StorageError
from storage.manifest import Manifest, Part, revisions
from storage.parts import read_parts
from storage.schema import TEACHER, TEACHER_TOP
from storage.selection import SHARE
from storage.unfinished import find_piece, keep_piece
from tasks.stages.context import RunContext
from tasks.stages.names import Stage
from tasks.stages.prepared import other_directory
from tasks.stages.stage import Work
from tasks.stages.views import Rescored, Rewards, Rollouts, Selected, Trained, View
from tasks.workers.interface import TrainerGroup
from trainer_core.batches.reading import read_samples, read_selected
from trainer_core.batches.sequences import Samples, TopTokens, Vector

NAMES = ["prompt_id", "sample_id"]
Teach = Callable[[TrainerGroup, Samples, float], tuple[Samples, tuple[Part, ...]]]  # `taught` of given samples


@dataclass(frozen=True)
class TrainingSet:
    """Samples of one iteration, and what is recorded about them."""

    samples: Samples
    temperature: float  # temperature at which they were drawn
    last: int  # the last iteration of the run
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
    """An iteration's share of a selection, with the scores of `rescored` or those it has; and its table."""
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
    """Samples of the update from the state `before` to `state`, as recorded. Raises StorageError: a record is gone."""
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


def taught(
    work: Work, source: View, names: Callable[[], pa.Table], group: TrainerGroup, samples: Samples, temperature: float
) -> tuple[Samples, tuple[Part, ...]]:
    """The samples with the teacher's log-probabilities, and the table that holds these, which is durable before
    anything is trained on them: a process that does the stage again finds it. The teacher's model is stored with the
    stage `source`, and `names` reads the ids of the samples. Without a teacher nothing is added."""
    if (distill := work.config.train.policy.distill) is None:
        return samples, ()
    schema = TEACHER_TOP if distill.top_k else TEACHER
    given = [source.digest, bytes_digest(samples.tokens.tobytes()), bytes_digest(samples.usable.tobytes()), temperature]
    given += [distill.top_k] if distill.top_k else []
    piece = f"teacher-{value_digest(given)[:16]}"
    if (part := find_piece(work.writer, piece)) is None:
        scores = group.teacher_scores(other_directory(work.context, source, "teacher"), samples, temperature)
        table = by_token(names(), samples, scores.logprobs, TEACHER)
        table = table if scores.top is None else _with_top(table, scores.top)
        part = keep_piece(work.writer, piece, work.writer.write_table("teacher.arrow", table, schema))
    stored = read_parts(work.root, [part], schema, [name for name in schema.names if name not in NAMES])
    flat = {name: stored[name].combine_chunks().flatten().to_numpy() for name in stored.column_names}
    found = dataclasses.replace(samples, teacher_logprobs=flat["logprobs"].astype(np.float32))
    if distill.top_k:
        top = (flat[name].reshape(-1, distill.top_k).copy() for name in ("top_tokens", "top_logprobs"))
        found = dataclasses.replace(found, teacher_top=TopTokens(*top))
    return found, (part,)


def _with_top(table: pa.Table, top: TopTokens) -> pa.Table:
    """The table with the likeliest tokens in place of those that it has log-probabilities of."""
    ends = pa.array(table["logprobs"].combine_chunks().offsets.to_numpy() * top.tokens.shape[1])
    columns = (pa.array(top.tokens.ravel(), pa.int32()), pa.array(top.logprobs.ravel(), pa.float32()))
    lists = (pa.ListArray.from_arrays(ends, one) for one in columns)
    for name, column in zip(("top_tokens", "top_logprobs"), lists, strict=True):
        table = table.append_column(name, column)
    return table.cast(TEACHER_TOP)


def by_token(names: pa.Table, samples: Samples, logprobs: Vector, schema: pa.Schema) -> pa.Table:
    """A table of `schema` with a list for each sample, of its part of the (R,) `logprobs`: of all response tokens that
    count, of other branches before those of its row. A sample has null where they are NaN. `names` has the ids of the
    samples, in their order."""
    ends = np.append(0, np.cumsum(samples.sample_lengths)).astype(np.int32)
    first = np.minimum(ends[1:] - samples.response_lengths[samples.rows], max(len(logprobs) - 1, 0))  # of each row
    without = np.isnan(logprobs[first]) if len(logprobs) else np.ones(names.num_rows, dtype=bool)
    column = pa.ListArray.from_arrays(pa.array(ends), pa.array(logprobs, pa.float32()), mask=pa.array(without))
    return names.select(NAMES).append_column("logprobs", column).cast(schema)
