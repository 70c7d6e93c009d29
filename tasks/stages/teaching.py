"""A teacher's part of the stages: its model is stored with the run, and its scores of samples with each train state."""

import dataclasses
from collections.abc import Callable

import numpy as np
import pyarrow as pa

from storage.digest import bytes_digest, value_digest
from storage.manifest import Part
from storage.parts import read_parts
from storage.schema import TEACHER, TEACHER_TOP
from storage.unfinished import find_piece, keep_piece
from tasks.stages.prepared import other_directory
from tasks.stages.stage import Work
from tasks.stages.views import View
from tasks.workers.trainers import TrainerGroup
from trainer_core.batches.sequences import Samples, TopTokens, Vector

NAMES = ["prompt_id", "sample_id"]
Teach = Callable[[TrainerGroup, Samples, float], tuple[Samples, tuple[Part, ...]]]  # `taught` of given samples


def taught(
    work: Work,
    source: View,
    names: Callable[[], pa.Table],
    group: TrainerGroup,
    samples: Samples,
    temperature: float,
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
