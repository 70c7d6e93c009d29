"""Cost of the run store on this machine: `ratchet bench storage [--json]`.

All rates are per second of CPU time of this process, limited to one thread, so that other load on the machine does not
count; they are medians. The data are synthetic rollouts: token ids drawn from a Zipf distribution, log-probabilities of
which 43 % are close to zero, prompts that repeat within their group. MB are 10^6 bytes of the table in memory.
"""

import argparse
import gc
import json
import os
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from storage.backends.root import Root, open_root
from storage.errors import InputError, RatchetError
from storage.layout import part_key
from storage.manifest import Manifest, commit
from storage.parts import PartWriter, flat, read_table
from storage.schema import ROLLOUT
from storage.turns import one_turn
from storage.upkeep.archive import SAMPLES, write_tables
from storage.upkeep.catalog import contents
from tasks.stages.names import Stage

GROUP = 16
PROMPT_TOKENS, RESPONSE_TOKENS, VOCABULARY = 64, 1024, 32_000
BASELINE_SAMPLES = 1024  # of the data, for JSONL and torch.save of lists: the whole would take minutes
LISTS = ("prompt_tokens", "response_tokens", "logprobs")


def rollout_table(samples: int, seed: int = 0) -> pa.Table:
    """Synthetic rollouts: `samples` rows with about RESPONSE_TOKENS response tokens each."""
    random = np.random.default_rng(seed)
    lengths = random.integers(RESPONSE_TOKENS // 2, RESPONSE_TOKENS * 3 // 2, samples)
    offsets = np.concatenate(([0], np.cumsum(lengths))).astype(np.int32)
    total = int(offsets[-1])
    logprobs = -random.exponential(0.7, total)
    logprobs[random.random(total) < 0.43] *= 1e-3
    prompts = random.zipf(1.3, (-(-samples // GROUP), PROMPT_TOKENS)) % VOCABULARY
    prompt_offsets = np.arange(samples + 1, dtype=np.int32) * PROMPT_TOKENS
    prompt_tokens = np.repeat(prompts, GROUP, axis=0)[:samples].reshape(-1).astype(np.int32)
    columns: dict[str, Any] = {
        "run": ["bench"] * samples,
        "iteration": np.ones(samples, np.int32),
        "prompt_id": [f"prompt-{row // GROUP:06d}" for row in range(samples)],
        "sample_id": np.arange(samples, dtype=np.int32) % GROUP,
        "prompt_tokens": pa.ListArray.from_arrays(pa.array(prompt_offsets), pa.array(prompt_tokens)),
        "response_tokens": list_array(offsets, (random.zipf(1.3, total) % VOCABULARY).astype(np.int32)),
        "logprobs": list_array(offsets, logprobs.astype(np.float32)),
        "position": np.arange(samples) // GROUP,
        "again": np.zeros(samples, np.int32),
        "sampled": list_array(offsets, np.ones(total, np.bool_)),
        "weight_version": list_array(offsets, np.zeros(total, np.int32)),
        "turns": one_turn(lengths, pa.repeat("stop", samples)),
        "seed": random.integers(0, 1 << 62, samples),
        "temperature": np.ones(samples, np.float32),
        "top_p": np.ones(samples, np.float32),
        "top_k": np.zeros(samples, np.int32),
        "min_p": np.zeros(samples, np.float32),
        "max_tokens": np.full(samples, 2048, np.int32),
        "routes": pa.nulls(samples, pa.large_binary()),
    }
    return pa.Table.from_arrays([pa.array(columns[field.name], field.type) for field in ROLLOUT], schema=ROLLOUT)


def list_array(offsets: np.ndarray, values: np.ndarray) -> pa.Array:
    """A list column from its offsets and values."""
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(values))


def cpu_seconds(work: Callable[[int], object], repeats: int) -> float:
    """Median CPU time of `work`, which gets the number of the repetition."""
    taken = []
    for repeat in range(repeats):
        before = time.process_time()
        result = work(repeat)
        taken.append(time.process_time() - before)
        del result
    return statistics.median(taken)


def written(root: Root, table: pa.Table, iteration: int, compression: str | None) -> Manifest:
    """A rollout manifest with the table as its part, as the rollout stage leaves it, but not committed."""
    part = PartWriter(root, "bench", iteration, Stage.ROLLOUT).write_table("groups.arrow", table, ROLLOUT, compression)
    return manifest(iteration, (part,))


def manifest(iteration: int, parts: tuple[Any, ...] = (), stage: Stage = Stage.ROLLOUT) -> Manifest:
    """A manifest like those that stages commit."""
    now = datetime.now(UTC)
    return Manifest(
        run="bench",
        iteration=iteration,
        stage=stage,
        parts=parts,
        inputs={"prepare": "0" * 32, "weights": "1" * 32},
        config_digest="2" * 32,
        code_version="bench",
        metrics={f"metric_{number}": number / 7 for number in range(10)},
        started=now,
        finished=now,
    )


def tensor_views(table: pa.Table) -> list[tuple[torch.Tensor, ...]]:
    """One tensor per sample for each list column, a view of the column's memory."""
    views = []
    for name in LISTS:
        for chunk in table[name].chunks:
            values, offsets = flat(pa.chunked_array([chunk]))
            views.append(torch.from_numpy(values).split(np.diff(offsets).tolist()))
    return views


def tensors_of(records: list[dict[str, Any]]) -> list[list[torch.Tensor]]:
    """Arrays of a trainer from records with Python lists."""
    kinds = {"logprobs": torch.float32}
    return [[torch.tensor(record[name], dtype=kinds.get(name, torch.int32)) for name in LISTS] for record in records]


def read_jsonl(path: Path) -> list[list[torch.Tensor]]:
    """The tensors of a JSONL file."""
    with path.open("rb") as file:
        return tensors_of([json.loads(line) for line in file])


def commit_milliseconds(root: Root, count: int) -> float:
    """Median wall time of committing a manifest with 16 parts; as in a run, those of an iteration share a folder."""
    writer = PartWriter(root, "bench", 0, Stage.ROLLOUT)
    parts = tuple(writer.write_bytes(f"groups-{number:05d}.arrow", bytes([number + 1])) for number in range(16))
    taken = []
    stages = list(Stage)
    for number in range(count):
        iteration, stage = 10_000 + number // len(stages), stages[number % len(stages)]
        keys = (part_key("bench", iteration, stage, part.name, part.digest) for part in parts)
        own = tuple(part.model_copy(update={"key": key}) for part, key in zip(parts, keys, strict=True))
        one = manifest(iteration, own, stage)
        before = time.perf_counter()
        commit(root, one)
        taken.append(time.perf_counter() - before)
    return statistics.median(taken) * 1e3


def flush_milliseconds(folder: Path, count: int) -> float:
    """Median wall time of writing 4 kB to a new file and flushing it to the disk: the disk's own share."""
    taken = []
    for number in range(count):
        with (folder / f"flush-{number}").open("wb", buffering=0) as file:
            file.write(bytes(4096))
            before = time.perf_counter()
            os.fsync(file.fileno())
            taken.append(time.perf_counter() - before)
    return statistics.median(taken) * 1e3


def measure(folder: Path, samples: int, repeats: int) -> dict[str, float]:
    """All figures."""
    root, table = open_root(str(folder / "root")), rollout_table(samples)
    megabytes = table.nbytes / 1e6
    # a new iteration each time: an existing part would not be written
    write = cpu_seconds(lambda repeat: written(root, table, repeat, "zstd"), repeats)
    write_raw = cpu_seconds(lambda repeat: written(root, table, 100 + repeat, None), repeats)
    raw, packed = written(root, table, 100, None), written(root, table, 0, "zstd")
    read = cpu_seconds(lambda _: tensor_views(read_table(root, raw, ROLLOUT)), repeats)
    read_packed = cpu_seconds(lambda _: tensor_views(read_table(root, packed, ROLLOUT)), repeats)
    jsonl, lists = baselines(folder, table.slice(0, min(BASELINE_SAMPLES, samples)), repeats)
    return {
        "samples": samples,
        "table_mb": megabytes,
        "zstd_mb": packed.parts[0].bytes / 1e6,
        "archive_mb": archive_bytes(folder, table) / 1e6,
        "write_zstd_mb_per_cpu_s": megabytes / write,
        "write_uncompressed_mb_per_cpu_s": megabytes / write_raw,
        "read_views_mb_per_cpu_s": megabytes / read,
        "read_zstd_mb_per_cpu_s": megabytes / read_packed,
        "read_vs_jsonl": megabytes / read / jsonl,
        "read_vs_torch_save_lists": megabytes / read / lists,
        "commit_ms": commit_milliseconds(root, 40 * repeats),
        "commit_in_memory_ms": in_memory_commit_milliseconds(40 * repeats),
        "disk_flush_ms": flush_milliseconds(folder, 40 * repeats),
    }


def baselines(folder: Path, table: pa.Table, repeats: int) -> tuple[float, float]:
    """MB of the table per CPU-second at which JSONL, and torch.save of records with lists, become tensors."""
    records, megabytes = table.select(LISTS).to_pylist(), table.nbytes / 1e6
    (folder / "data.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    torch.save(records, folder / "data.pt")
    jsonl = cpu_seconds(lambda _: read_jsonl(folder / "data.jsonl"), repeats)
    lists = cpu_seconds(lambda _: tensors_of(torch.load(folder / "data.pt", weights_only=False)), repeats)
    return megabytes / jsonl, megabytes / lists


def archive_bytes(folder: Path, table: pa.Table) -> int:
    """Size of the Parquet archive of the table."""
    unscored = [pa.nulls(table.num_rows, field.type) for field in list(SAMPLES)[len(ROLLOUT) :]]
    path = folder / "archive.parquet"
    write_tables(path, iter([pa.table([*table.columns, *unscored], schema=SAMPLES)]))
    return path.stat().st_size


def in_memory_commit_milliseconds(count: int) -> float:
    """The commit on a filesystem in memory: our own code's share."""
    shared = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=shared if shared.is_dir() else None) as folder:
        return commit_milliseconds(open_root(folder), count)


def durability(root: Root, run: str) -> dict[str, float]:
    """Cost of durability in a run: shares of the time of an RL iteration's stages, and the time of a resume.

    Returns:
        durability_share: the stages waited for it, reading included: storage, and ranks that wrote their state.
            Median of the iterations.
        durability_behind_share: uploads that ran while the next stages worked; also a median.
        resume_to_first_gradient_s: from the start of a process that resumed to the end of its first training; median,
            absent if none did.

    Raises:
        InputError: the run's stages do not record it.
    """
    done: dict[int, list[dict[str, float]]] = {}
    for one in contents(root, run).newest:
        if one.iteration and "storage_seconds" in one.metrics:
            figures = {name: value for name, value in one.metrics.items() if value is not None}
            done.setdefault(one.iteration, []).append(figures)
    if not done:
        raise InputError(
            f"no RL iteration of run {run!r} in {root.url} records its time in the store: run one with this version"
        )

    def share(*names: str) -> float:
        return statistics.median(
            sum(stage.get(name, 0.0) for stage in stages for name in names) / sum(stage["seconds"] for stage in stages)
            for stages in done.values()
        )

    shares = {
        "durability_share": share("storage_seconds", "save_seconds"),
        "durability_behind_share": share("upload_seconds"),
    }
    every = [stage for stages in done.values() for stage in stages]
    resumed = [stage["process_to_gradient_s"] for stage in every if "process_to_gradient_s" in stage]
    return shares | ({"resume_to_first_gradient_s": statistics.median(resumed)} if resumed else {})


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="the last line of standard output is one JSON object")
    parser.add_argument("--repeats", type=int, default=5, help="measurements of each figure; the median counts")
    parser.add_argument("--samples", type=int, default=16_384, help="samples in the table")
    parser.add_argument("--folder", help="where to write; a temporary folder by default")
    parser.add_argument("--run", help="also report the cost of durability in this run")
    parser.add_argument("--root", default="file://./runs", help="storage root of that run")
    options = parser.parse_args()
    gc.freeze()  # the collector visits all objects of torch at random times, which is not part of the measurement
    pa.set_cpu_count(1)
    pa.set_io_thread_count(1)
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
    try:
        of_run = durability(open_root(options.root), options.run) if options.run else {}
    except RatchetError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code
    with tempfile.TemporaryDirectory(prefix="ratchet-bench-", dir=options.folder) as folder:
        figures = measure(Path(folder), options.samples, options.repeats) | of_run
    if options.json:
        sys.stdout.write(json.dumps(figures) + "\n")
    else:
        sys.stdout.write("".join(f"{name:<34}{value:>12,.3f}\n" for name, value in figures.items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
