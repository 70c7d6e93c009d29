"""Tables and manifests to store in tests."""

from datetime import UTC, datetime

import numpy as np
import pyarrow as pa

from storage import schema
from storage.manifest import Manifest, Part
from storage.parts import read_table
from storage.schema import REWARD, ROLLOUT
from storage.turns import of_each_token, one_turn
from tasks.stages.names import Stage

TIME = datetime(2026, 1, 1, tzinfo=UTC)


def manifest(stage: Stage = Stage.ROLLOUT, iteration: int = 1, parts: tuple[Part, ...] = (), **fields) -> Manifest:
    given = {"run": "run", "config_digest": "c0", "code_version": "1", "started": TIME, "finished": TIME, **fields}
    return Manifest(stage=stage, iteration=iteration, parts=parts, **given)


def read_stored_table(root, manifest: Manifest, columns=None) -> pa.Table:
    """The table of a stage, of which its first part says which one it is."""
    with pa.ipc.open_file(root.read_buffer(manifest.tables[0].key)) as file:
        name = file.schema.metadata[b"table"].decode()
    return read_table(root, manifest, vars(schema)[name.upper()], columns)


def list_column(lengths, kind, random) -> pa.Array:
    offsets = np.concatenate(([0], np.cumsum(lengths))).astype(np.int32)
    values = random.integers(0, 1000, offsets[-1]).astype(kind)
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(values))


def rollout_table(groups: int = 4, samples: int = 3, seed: int = 0, iteration: int = 1, version: int = 0) -> pa.Table:
    """A rollout table with groups p0, p1, ... whose responses have 1 to 9 tokens."""
    random, rows = np.random.default_rng(seed), groups * samples
    lengths = random.integers(1, 10, rows)
    columns = {
        "run": pa.array(["run"] * rows),
        "iteration": pa.array([iteration] * rows, pa.int32()),
        "prompt_id": pa.array([f"p{row // samples}" for row in range(rows)]),
        "sample_id": pa.array([row % samples for row in range(rows)], pa.int32()),
        "prompt_tokens": list_column(np.full(rows, 5), np.int32, random),
        "response_tokens": list_column(lengths, np.int32, random),
        "logprobs": list_column(lengths, np.float32, random),
        "position": pa.array([row // samples for row in range(rows)]),
        "again": pa.array([0] * rows, pa.int32()),
        "turns": one_turn(lengths, pa.repeat("stop", rows)),
        "seed": pa.array(range(rows), pa.int64()),
        "temperature": pa.array([1.0] * rows, pa.float32()),
        "top_p": pa.array([1.0] * rows, pa.float32()),
        "top_k": pa.array([0] * rows, pa.int32()),
        "min_p": pa.array([0.0] * rows, pa.float32()),
        "max_tokens": pa.array([9] * rows, pa.int32()),
        "routes": pa.nulls(rows, pa.large_binary()),
    }
    columns |= {
        "sampled": of_each_token(columns["response_tokens"], pa.scalar(True)),
        "weight_version": of_each_token(columns["response_tokens"], pa.scalar(version, pa.int32())),
    }
    return pa.Table.from_arrays([columns[name] for name in ROLLOUT.names], schema=ROLLOUT)


def scored_table(names: pa.Table, rewards, status=None) -> pa.Table:
    """A reward table for the rows of a table with prompt_id and sample_id."""
    rows = names.num_rows
    columns = {
        "prompt_id": names["prompt_id"].combine_chunks(),
        "sample_id": names["sample_id"].combine_chunks(),
        "reward": pa.array(rewards, pa.float32()),
        "status": pa.array(["ok"] * rows if status is None else status),
        "detail": pa.repeat("", rows),
    }
    empty = {field.name: pa.nulls(rows, field.type) for field in REWARD}
    return pa.Table.from_arrays([{**empty, **columns}[name] for name in REWARD.names], schema=REWARD)
