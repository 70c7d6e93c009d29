"""Seconds of the viewer's search over a generated run: `python -m infra.bench.search FOLDER [ITERATIONS]`.

The folder gets a run of ITERATIONS (by default 100) times 10 parts of 1,000 samples of 100 tokens, unless it has one.
Seconds are of processor and of the clock: the least and the most of four searches with nothing in memory, and of the
same search right after each. The files are in the system's cache.
"""

import logging
import resource
import sys
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import numpy as np
import pyarrow as pa

from flows.viewer.search import Columns, Query, search
from storage import layout
from storage.backends.root import Root, open_root
from storage.manifest import Manifest, Part, commit, find
from storage.parts import PartWriter
from storage.schema import REWARD, ROLLOUT
from storage.turns import one_turn
from tasks.stages.names import Stage

RUN, GROUP, ROWS, PARTS, PROMPT, TOKENS = "million", 16, 1000, 10, 16, 100
CONDITIONS = (
    "", "reward > 1", "status = 'ok' and reward > 2", "prompt_id = 'prompt-000010'", "finish_reason = 'length'",
    "oldest_version > 50", "components.right > 2", "length(response_tokens) > 99",
)  # fmt: skip
REPEATS = 4


def main() -> None:
    """Make the run where it is not there, and measure."""
    logging.basicConfig(format="%(message)s", level=logging.INFO)
    root, iterations = open_root(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 100
    root.put_if_absent(layout.run_config_key(RUN), b"{}")
    for iteration in range(1, iterations + 1):
        if find(root, RUN, iteration, Stage.REWARD) is None:
            _make(root, iteration)
    for where in CONDITIONS:
        taken: list[list[tuple[float, float]]] = [[], []]
        for _ in range(REPEATS):
            columns = Columns()
            for seconds in taken:
                began = time.process_time(), time.perf_counter()
                found = search(root, Query(RUN, where), columns).found
                seconds.append((time.process_time() - began[0], time.perf_counter() - began[1]))
        first, later = map(_span, taken)
        most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
        logging.info("%-40r first %s | later %s | %d found, at most %d MiB", where, first, later, found, most)


def _span(seconds: list[tuple[float, float]]) -> str:
    kinds = zip(("processor", "clock"), zip(*seconds, strict=True), strict=True)
    return ", ".join(f"{kind} {min(taken):.2f} to {max(taken):.2f} s" for kind, taken in kinds)


def _make(root: Root, iteration: int) -> None:
    """Commit the rollout and the scores of an iteration."""
    rollout, rewards = (PartWriter(root, RUN, iteration, stage) for stage in (Stage.ROLLOUT, Stage.REWARD))
    tables = list(_tables(iteration))
    parts = [rollout.write_table(f"groups-{at:05d}.arrow", one, ROLLOUT) for at, (one, _) in enumerate(tables)]
    sampled = commit(root, _manifest(iteration, Stage.ROLLOUT, tuple(parts), {}))
    scores = rewards.write_table("rewards.arrow", pa.concat_tables([scores for _, scores in tables]), REWARD)
    commit(root, _manifest(iteration, Stage.REWARD, (scores,), {"rollout": sampled.digest}))


def _manifest(iteration: int, stage: Stage, parts: tuple[Part, ...], inputs: dict[str, str]) -> Manifest:
    now = datetime.now(UTC)
    return Manifest(
        run=RUN, iteration=iteration, stage=stage, parts=parts, inputs=inputs, config_digest="bench",
        code_version="bench", started=now, finished=now,
    )  # fmt: skip


def _tables(iteration: int) -> Iterator[tuple[pa.Table, pa.Table]]:
    """Parts of a rollout, each with its scores."""
    random = np.random.default_rng(iteration)
    for begin in range(0, PARTS * ROWS, ROWS):
        places = np.arange(begin, begin + ROWS)
        reasons = pa.array(np.where(random.random(ROWS) < 0.8, "stop", "length"))
        columns: dict[str, Any] = {
            "run": pa.repeat(RUN, ROWS), "iteration": np.full(ROWS, iteration), "sample_id": places % GROUP,
            "prompt_id": [f"prompt-{place // GROUP:06d}" for place in places], "position": places // GROUP,
            "again": np.zeros(ROWS), "seed": random.integers(0, 1 << 40, ROWS), "temperature": np.ones(ROWS),
            "top_p": np.ones(ROWS), "top_k": np.zeros(ROWS), "min_p": np.zeros(ROWS),
            "max_tokens": np.full(ROWS, 128), "routes": pa.nulls(ROWS, pa.large_binary()),
            "turns": one_turn(np.full(ROWS, TOKENS), reasons),
            "prompt_tokens": _lists(random.integers(0, 32_000, ROWS * PROMPT)),
            "response_tokens": _lists(random.zipf(1.3, ROWS * TOKENS) % 32_000),
            "sampled": _lists(np.ones(ROWS * TOKENS, bool)),
            "logprobs": _lists(-random.exponential(0.7, ROWS * TOKENS)),
            "weight_version": _lists(np.full(ROWS * TOKENS, iteration - 1)),
        }  # fmt: skip
        rewards = random.normal(size=ROWS)
        scores = {
            "prompt_id": columns["prompt_id"], "sample_id": columns["sample_id"], "reward": rewards,
            "status": pa.repeat("ok", ROWS), "detail": pa.nulls(ROWS), "reason": pa.nulls(ROWS),
            "components": [[("right", reward), ("length", 1.0)] for reward in rewards],
        }  # fmt: skip
        yield _table(columns, ROLLOUT), _table(scores, REWARD)


def _table(columns: dict[str, Any], schema: pa.Schema) -> pa.Table:
    plain = {name: one if isinstance(one, pa.Array | list) else pa.array(one) for name, one in columns.items()}
    arrays = [pa.array(one, field.type) if isinstance(one, list) else one.cast(field.type)
              for field in schema for one in [plain[field.name]]]  # fmt: skip
    return pa.table(arrays, schema=schema)


def _lists(values: np.ndarray) -> pa.ListArray:
    """A list column of ROWS lists of one length."""
    return pa.ListArray.from_arrays(pa.array(np.arange(ROWS + 1) * (len(values) // ROWS), pa.int32()), pa.array(values))


if __name__ == "__main__":
    main()
