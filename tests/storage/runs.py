"""Whole runs as the stages would leave them, small."""

import os
from datetime import UTC, datetime, timedelta

import numpy as np
import pyarrow as pa
from pydantic import BaseModel

from storage import layout, records
from storage.backends.root import Root
from storage.manifest import Manifest, commit, find
from storage.parts import PartWriter
from storage.schema import PROMPTS, REWARD, ROLLOUT
from tasks.stages.names import Stage
from tests.storage.tables import list_column, manifest, rollout_table, scored_table

GROUPS, SAMPLES = 4, 3


class Document(BaseModel):
    """Stands for the configuration of a run."""

    purpose: str = "test"


DOCUMENT = Document()


def make_run(root: Root, run: str = "run", iterations: int = 3) -> dict[tuple[int, Stage], Manifest]:
    """A complete run; returns its manifests by iteration and stage."""
    records.publish(root, layout.run_config_key(run), DOCUMENT)
    for iteration in range(iterations + 1):
        make_iteration(root, run, iteration)
    return {
        (iteration, stage): found
        for iteration in range(iterations + 1)
        for stage in Stage
        if (found := find(root, run, iteration, stage)) is not None
    }


def make_iteration(root: Root, run: str, iteration: int) -> None:
    """Commit the stages of one iteration, made from those of the previous one."""
    if iteration == 0:
        prepared = put(root, run, 0, Stage.PREPARE, {}, table=prompt_table(), schema=PROMPTS)
        trained = put(root, run, 0, Stage.TRAIN, {"prepare": prepared}, data=state(0))
    else:
        prepared = find(root, run, 0, Stage.PREPARE)
        synced = find(root, run, iteration - 1, Stage.WEIGHT_SYNC)
        before = find(root, run, iteration - 1, Stage.TRAIN)
        table = rollout_table(GROUPS, SAMPLES, iteration, iteration, iteration - 1)
        rolled = put(root, run, iteration, Stage.ROLLOUT, {"prepare": prepared, "weights": synced}, table, ROLLOUT)
        inputs = {"prepare": prepared, "rollout": rolled}
        scored = put(root, run, iteration, Stage.REWARD, inputs, reward_table(table), REWARD)
        inputs = {"prepare": prepared, "rollout": rolled, "reward": scored, "state": before}
        trained = put(root, run, iteration, Stage.TRAIN, inputs, data=state(iteration))
    put(root, run, iteration, Stage.WEIGHT_SYNC, {"prepare": prepared, "train": trained})


def put(root, run, iteration, stage, inputs, table=None, schema=None, data=None) -> Manifest:
    writer, parts = PartWriter(root, run, iteration, stage), ()
    if table is not None:
        half = table.num_rows // 2
        halves = (table.slice(0, half), table.slice(half))
        parts = tuple(writer.write_table(f"{stage.value}-{n}.arrow", one, schema) for n, one in enumerate(halves))
    if data is not None:
        parts = (writer.write_bytes("state/0.distcp", data),)
    return commit(
        root,
        manifest(
            stage,
            iteration,
            parts,
            run=run,
            inputs={role: one.digest for role, one in inputs.items()},
            facts={
                "weight_version": iteration - (stage == Stage.ROLLOUT),
                "weights_digest": f"w{iteration}",
                **({"stop_tokens": [2], "left_out_tokens": [2]} if stage == Stage.PREPARE else {}),
            },
            metrics={"seconds": 1.5, "reward_mean": 0.25} if stage == Stage.REWARD else {"seconds": 0.5},
            writer="host:1",
        ),
    )


def state(iteration: int) -> bytes:
    return np.random.default_rng(iteration).bytes(1000)


def prompt_table() -> pa.Table:
    names = [f"p{n}" for n in range(GROUPS)]
    tokens = list_column(np.full(GROUPS, 5), np.int32, np.random.default_rng(0))
    empty = pa.nulls(GROUPS, pa.list_(pa.int32()))
    texts = [pa.array([f"text of {name}" for name in names]), tokens, pa.nulls(GROUPS, pa.string()), empty]
    return pa.Table.from_arrays([pa.array(names), *texts, pa.array(["{}"] * GROUPS)], schema=PROMPTS)


def reward_table(rollouts: pa.Table) -> pa.Table:
    """One score a sample, in another order; the second sample of each group timed out."""
    scored = rollouts.take(np.random.default_rng(1).permutation(rollouts.num_rows))
    ids = scored["sample_id"].to_pylist()
    status = ["timeout" if one == 1 else "ok" for one in ids]
    return scored_table(scored, [None if one == 1 else one / 4 for one in ids], status)


def age(root: Root, key: str, days: float = 2) -> None:
    """Make a local object look that old."""
    past = (datetime.now(UTC) - timedelta(days=days)).timestamp()
    os.utime(root.backend.full(key), (past, past))
