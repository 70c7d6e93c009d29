"""Shares of an iteration of the real loop, layout by layout, and the bound from the same run's own figures."""

import copy
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from pydantic import BaseModel

from infra.bench.cases import CASES, CaseName, LayoutName
from storage.backends.root import open_root
from storage.errors import InputError, StageFailed
from storage.manifest import Manifest, find
from tasks.config.document import completed, folder_of, read_document
from tasks.config.environment import Settings, child_python_path
from tasks.config.run import RunConfig
from tasks.stages.names import WORKFLOW, Stage

RUN = "loop"
CONFIG, DIRECT, ROOT = "config.json", "direct.json", "runs"
"""Files and the storage root in the folder of a layout."""
_MEAN_SHARE = 4  # responses have a quarter of the most tokens on average
_PROMPTS: dict[CaseName, int] = {"tiny": 8, "0.75b": 64, "4b": 32}
_CACHE_MIB: dict[CaseName, int] = {"tiny": 64, "0.75b": 24 << 10, "4b": 24 << 10}


class Timed(BaseModel):
    """One committed stage: begin and end in seconds of one clock, and its metrics."""

    iteration: int
    stage: Stage
    begin: float
    end: float
    metrics: dict[str, float | None] = {}

    @classmethod
    def of(cls, manifest: Manifest) -> "Timed":
        """The times that a manifest records."""
        begin, end = manifest.started.timestamp(), manifest.finished.timestamp()
        return cls(iteration=manifest.iteration, stage=Stage(manifest.stage), begin=begin, end=end,
                   metrics=dict(manifest.metrics))  # fmt: skip

    @property
    def seconds(self) -> float:
        """Duration."""
        return self.end - self.begin

    @property
    def updated(self) -> float:
        """End of the updates of a training."""
        return self.end - sum(self.metrics.get(name) or 0.0 for name in ("save_seconds", "state_wait_seconds"))

    @property
    def stored(self) -> float:
        """Seconds of it for durability. Ranks save a state outside this process; an engine goes on while pieces are
        stored, so that only what is beyond the sampling counts in a rollout."""
        stored = (self.metrics.get("storage_seconds") or 0.0) + (self.metrics.get("save_seconds") or 0.0)
        rate, tokens = self.metrics.get("tokens_per_second"), self.metrics.get("tokens")
        beyond = self.seconds - tokens / rate if rate and tokens else self.seconds
        return max(0.0, min(stored, beyond))


class Iteration(BaseModel):
    """Seconds of an iteration, from the end of a weight sync to the end of the next; means over iterations."""

    seconds: float
    """The whole of it."""
    rollout_s: float
    """Stage `rollout` without what is stored; likewise those that follow."""
    reward_s: float
    train_s: float
    sync_s: float
    evaluate_s: float
    durability_s: float
    """Storing and waiting for it, within the stages; of two stages side by side the longer one's counts."""
    orchestration_s: float
    """Time without a stage: Prefect, the driver, publishing of manifests."""
    side_by_side_s: float
    """Time with two stages at once."""
    idle_engines: float
    """Share of the iteration in which no stage uses the engines."""
    idle_trainer: float
    """The same of the trainer ranks."""
    shares: dict[str, float]
    """The above by `seconds`."""
    overhead: float
    """Share of sync, durability and orchestration together."""
    bound_s: float
    """max(rollout, train) + sync, from the figures above."""
    of_bound: float
    """`seconds` by `bound_s`."""


class Layout(BaseModel):
    """One run in one layout."""

    layout: LayoutName
    settings: tuple[str, ...]
    """Changes to the configuration."""
    iterations: int
    """Iterations that are measured: without the first, and without those beside whose training nothing is sampled."""
    tokens: float
    """Response tokens of an iteration; mean."""
    length_share: float
    """Mean response by the longest that is allowed."""
    tokens_per_s: float
    """Rate of the rollouts while they sample; mean."""
    direct_tokens_per_s: float
    """Rate of the same engines called without the loop, right after it: the prompts of the last rollout, alone."""
    train_s: float
    """Stage `train` without what is stored."""
    direct_train_s: float
    """The same trainer called without the loop: one update on the samples of the last rollout."""
    start_s: float
    """From the start of the process to the first rollout."""
    start_to_gradient_s: float
    """From the start of the process to the end of the first update."""
    whole_s: float
    """From the start of the process to its end."""
    peak_gib: float
    """Largest proportional set size of all processes, GiB."""
    iteration: Iteration


class LoopBench(BaseModel):
    """Measurements of all layouts, each in a run of its own."""

    device: str
    cards: int
    layouts: dict[LayoutName, Layout]
    left_out: dict[LayoutName, str]
    """Layouts that were not run, with the reason."""
    ahead_speedup: float | None = None
    """An iteration of the best synchronous layout by one with rollouts ahead."""


def bench_loop(
    path: str | None,
    overrides: Sequence[str],
    layouts: Sequence[LayoutName],
    iterations: int,
    told: Callable[[str], object],
) -> LoopBench:
    """Run real iterations in each layout, one run after the other.

    Args:
        path: a configuration; by default random weights, "tiny" on CPU and "0.75b" on cards.
        told: called with each layout's figures as soon as they are there.

    Raises:
        InputError: there are too few iterations, or the configuration cannot be used.
        StageFailed: a run failed; its own message says why.
    """
    if iterations < 3:
        raise InputError(
            f"{iterations} iterations leave none to measure between the first and the last: give 3 or more"
        )
    settings = Settings.from_environment()
    device = settings.device("auto")
    cards = 0 if device == "cpu" else len(settings.gpus)
    tables = default_tables("tiny" if device == "cpu" else "0.75b") if path is None else read_document(path)
    folder = None if path is None else folder_of(path)
    found, left_out = dict[LayoutName, Layout](), dict[LayoutName, str]()
    for layout in layouts:
        if (reason := left_out_of(layout, cards)) is not None:
            left_out[layout] = reason
            continue
        changes = layout_settings(layout, cards)
        config = completed(
            copy.deepcopy(tables), [*changes, *overrides, f"run.iterations={iterations}"], folder, "the bench"
        )
        with tempfile.TemporaryDirectory(prefix="ratchet-loop-") as place:
            found[layout] = measured(layout, changes, config, Path(place))
        told(found[layout].model_dump_json())
    synchronous = [one.iteration.seconds for name, one in found.items() if name != "ahead"]
    ahead = found["ahead"].iteration.seconds if "ahead" in found and synchronous else None
    return LoopBench(device=device, cards=cards, layouts=found, left_out=left_out,
                     ahead_speedup=None if ahead is None else min(synchronous) / ahead)  # fmt: skip


def default_tables(name: CaseName) -> dict[str, Any]:
    """A configuration with random weights; stop tokens give geometric lengths, on average a quarter of the most."""
    case = CASES[name]
    model, most = case.model, case.model.vocabulary
    return {
        "model": {"generate": model.model_dump()},
        "data": {"generate": {}},
        "rollout": {
            "prompts": _PROMPTS[name],
            "max_tokens": case.response,
            "groups_per_part": max(1, _PROMPTS[name] // 8),
            "stop_tokens": list(range(most - most * _MEAN_SHARE // case.response, most)),
        },
        "reward": {"function": "infra.bench.brevity:brevity", "processes": 1 if name == "tiny" else 4},
        "train": {
            "max_length": case.length,
            "precision": case.precision,
            "micro_batch_size": case.rows,
            "optimizer": {"learning_rate": 1e-6},
            "policy": {"old_policy": "behaviour"},
        },
        "sync": {"max_mean_difference": 0.05, "max_difference": 0.5},
        "evaluate": {"every": 0},
        "engine": {
            "max_model_len": case.length,
            "precision": case.precision,
            "kv_cache_mib": _CACHE_MIB[name],
        },
        "storage": {"keep_newest": 1},
    }


def left_out_of(layout: LayoutName, cards: int) -> str | None:
    """The reason why a layout cannot be run on so many cards; 0 are the CPU."""
    if layout == "own" and not cards:
        return "on CPU no process has a card of its own"
    if layout != "shared" and cards == 1:
        return "own cards for engines and trainer need 2 cards, and 1 is visible"
    return None


def layout_settings(layout: LayoutName, cards: int) -> tuple[str, ...]:
    """Settings of a layout: all cards for both, or half of them for each."""
    ahead = f"rollout.ahead={int(layout == 'ahead')}"
    if not cards:
        return (ahead,)
    shared = layout == "shared"
    ranks, engines = (cards, cards) if shared else (cards // 2, cards - cards // 2)
    where = f'engine.cards="{"shared" if shared else "own"}"'
    return (ahead, f"train.parallel.data={ranks}", f"engine.count={engines}", where)


def measured(
    layout: LayoutName,
    settings: tuple[str, ...],
    config: RunConfig,
    folder: Path,
    environment: Mapping[str, str] | None = None,
) -> Layout:
    """One run in a process of its own, whose engines and trainer are called directly before they end. Raises
    StageFailed: it failed."""
    (folder / CONFIG).write_text(config.model_dump_json())
    clock = time.time()
    command = [sys.executable, "-P", "-m", "infra.bench.loop_run", str(folder)]
    done = subprocess.run(command, env=environment or child_python_path(), stdout=subprocess.DEVNULL, check=False)
    whole = time.time() - clock
    if done.returncode:
        raise StageFailed(f"the run in layout {layout} ended with exit code {done.returncode}: see its message above")
    direct = json.loads((folder / DIRECT).read_text())
    stages = read_stages(folder, config.run.iterations)
    found = windows(stages)
    rollouts = [one for one in stages if one.stage == Stage.ROLLOUT and one.iteration > 1]
    first = {one.stage: one for one in stages if one.iteration == 1}
    tokens, lengths, rates = (
        fmean(one.metrics[name] or 0.0 for one in rollouts)
        for name in ("tokens", "response_length", "tokens_per_second")
    )
    iteration = mean_of([figures(*window) for window in found])
    return Layout(
        layout=layout,
        settings=settings,
        iterations=len(found),
        tokens=tokens,
        length_share=lengths / config.rollout.max_tokens,
        tokens_per_s=rates,
        train_s=iteration.train_s,
        start_s=first[Stage.ROLLOUT].begin - clock,
        start_to_gradient_s=first[Stage.TRAIN].updated - clock,
        whole_s=whole,
        iteration=iteration,
        **direct,
    )


def read_stages(folder: Path, iterations: int) -> list[Timed]:
    """The committed stages of the run in a folder."""
    root = open_root(str(folder / ROOT))
    manifests = [
        find(root, RUN, number, stage) for number in range(iterations + 1) for stage in WORKFLOW.stages_of(number)
    ]
    return [Timed.of(one) for one in manifests if one is not None]


def windows(stages: Sequence[Timed]) -> list[tuple[float, float, list[Timed]]]:
    """Begin, end and stages of each iteration after the first in which a rollout was sampled."""
    syncs = {one.iteration: one.end for one in stages if one.stage == Stage.WEIGHT_SYNC}
    spans = [(syncs[number - 1], syncs[number]) for number in sorted(syncs) if number >= 2]
    inside = [(begin, end, [one for one in stages if begin < one.end <= end]) for begin, end in spans]
    return [one for one in inside if any(stage.stage == Stage.ROLLOUT for stage in one[2])]


def figures(begin: float, end: float, stages: Sequence[Timed]) -> Iteration:
    """The figures of one iteration from its stages, which end between `begin` and `end`."""

    def used(*names: Stage) -> float:
        return covered((max(one.begin, begin), one.end) for one in stages if not names or one.stage in names)

    def net(name: Stage) -> float:
        return sum(one.seconds - one.stored for one in stages if one.stage == name)

    seconds, busy = end - begin, used()
    beside = {one.iteration for one in stages if one.stage in (Stage.ROLLOUT, Stage.TRAIN)}
    hidden = shorter(stages) if len(beside) > 1 else None  # a rollout of a later iteration ran beside the training
    parts = {
        "rollout": net(Stage.ROLLOUT), "reward": net(Stage.REWARD), "train": net(Stage.TRAIN),
        "sync": net(Stage.WEIGHT_SYNC), "evaluate": net(Stage.EVALUATE),
        "durability": sum(one.stored for one in stages if one.stage != hidden),
        "orchestration": seconds - busy,
        "side_by_side": sum(one.end - max(one.begin, begin) for one in stages) - busy,
    }  # fmt: skip
    bound = max(parts["rollout"], parts["train"]) + parts["sync"]
    return Iteration(
        seconds=seconds,
        **{f"{name}_s": value for name, value in parts.items()},
        idle_engines=1 - used(Stage.ROLLOUT, Stage.WEIGHT_SYNC, Stage.EVALUATE) / seconds,
        idle_trainer=1 - used(Stage.TRAIN, Stage.WEIGHT_SYNC) / seconds,
        shares={name: value / seconds for name, value in parts.items()},
        overhead=sum(parts[name] for name in ("sync", "durability", "orchestration")) / seconds,
        bound_s=bound,
        of_bound=seconds / bound,
    )


def shorter(stages: Sequence[Timed]) -> Stage:
    """The shorter one of rollout and training."""
    totals = {name: sum(one.seconds for one in stages if one.stage == name) for name in (Stage.ROLLOUT, Stage.TRAIN)}
    return min(totals, key=totals.__getitem__)


def covered(spans: Iterable[tuple[float, float]]) -> float:
    """Length of the union of spans."""
    total, until = 0.0, float("-inf")
    for begin, end in sorted(spans):
        total += max(0.0, end - max(begin, until))
        until = max(until, end)
    return total


def mean_of(found: Sequence[Iteration]) -> Iteration:
    """Means of each figure; ratios are those of the means."""
    rows = [one.model_dump() for one in found]
    means: dict[str, Any] = {name: fmean(row[name] for row in rows) for name in rows[0] if name != "shares"}
    means["shares"] = {name: fmean(row["shares"][name] for row in rows) for name in rows[0]["shares"]}
    means["of_bound"] = means["seconds"] / means["bound_s"]
    return Iteration(**means)
