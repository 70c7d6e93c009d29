"""Ratchet's training step against the plain one of megatron-core, in one process on one device."""

import resource
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from pydantic import BaseModel

from infra.bench.cases import CASES, Case, CaseName, draw_samples, floating_point_operations
from storage.errors import InputError
from storage.ownership.scratch import scratch
from tasks.data.generated import generate_model
from trainer_core.batches.sequences import Samples
from trainer_core.config import Device, OptimizerConfig, PolicyConfig, RankSpec, TrainerConfig

if TYPE_CHECKING:
    from infra.bench.sides import Sides

_STEPS = 4  # with other widths each

PEAK_FLOPS = {"H100": 989e12, "H200": 989e12}
"""Dense bf16 operations a second, from the vendor's data sheets, by a part of the device's name."""


class TrainBench(BaseModel):
    """Measurements. Rates are medians over pairs; on CPU they are per second of processor time."""

    device: str
    """Name of the device."""
    case: CaseName
    """Name of the case."""
    fp8: bool
    """True if the linear layers multiply FP8 numbers (`train.fp8`)."""
    transformer_engine: bool
    """True if the layers are Transformer Engine's."""
    pairs: int
    """Times that each side was measured, in turns."""
    tokens: int
    """Positions of an iteration in which all samples have the most tokens."""
    tokens_per_s: float
    """Rate of Ratchet's step: one update, scored and reported."""
    plain_tokens_per_s: float
    """Rate of the plain step, with micro-batches of equally many tokens."""
    ratio: float
    """Median over pairs of the first by the second."""
    ratio_spread: float
    """Largest minus smallest ratio of a pair."""
    packed_tokens_per_s: float
    """Rate of Ratchet's step, with responses of mixed lengths; positions without padding."""
    packed_plain_tokens_per_s: float
    """Rate of the plain step, which pads each micro-batch to its longest row."""
    packed_ratio: float
    """Median over pairs of the first by the second."""
    mfu: float | None
    """Share of the device's peak rate that Ratchet's step uses; None if the peak is not known."""
    peak_gib: float
    """Most memory while Ratchet's step ran: of the device, or of the process on CPU."""
    plain_peak_gib: float
    """Most memory while the plain step ran."""
    save_critical_s: float
    """Seconds for which saving a state holds up the next stage: identifying it and copying it into files in shared
    memory, as from the second save of a process on. The median of three, by the wall clock."""
    save_gib: float
    """Bytes of that state."""
    step_time_drift: float
    """Time for a token in the later half of the steps by that in the first, with widths that vary from step to step."""
    memory_growth_gib: float
    """Memory held after the later half of these steps, above that after the first half: reserved on the device, or by
    the process on CPU."""


@dataclass(frozen=True)
class Race:
    """Times of both sides for the same samples, and the most memory that each used."""

    ours: list[float]
    plain: list[float]
    peak_gib: float
    plain_peak_gib: float

    @property
    def ratios(self) -> list[float]:
        """Plain time by ours, for each pair."""
        return [plain / ours for ours, plain in zip(self.ours, self.plain, strict=True)]


def bench_train(case_name: CaseName | None, pairs: int, fp8: bool = False) -> TrainBench:
    """Measure both sides in turns, `pairs` times each after one round that does not count; with `fp8` both multiply FP8
    numbers.

    Without a case it is the one that fits the device: "tiny" without a GPU, "0.75b" with one.

    Raises:
        InputError: if `pairs` is below 1, or `fp8` is asked for without a card.
    """
    if pairs < 1:
        raise InputError(f"{pairs} pairs measure nothing: give at least 1")
    import torch

    device: Device = "cuda" if torch.cuda.is_available() else "cpu"
    if fp8 and device == "cpu":
        raise InputError("--fp8 takes a card with FP8 units, and none is visible: leave it out")
    name: CaseName = case_name or ("tiny" if device == "cpu" else "0.75b")
    case = CASES[name]
    with tempfile.TemporaryDirectory() as folder:
        generate_model(Path(folder), case.model, seed=0)
        sides = _sides(folder, case, device, fp8)
        try:
            alike, mixed = (_race(sides, case, draw_samples(case, mixed), pairs) for mixed in (False, True))
            endurance = _endurance(sides, case)
            saving = _saving(sides)
        finally:
            sides.close()
    return TrainBench.model_validate(
        {**_rates(name, case, sides, alike, mixed, pairs), "fp8": fp8, **endurance, **saving}
    )


def _sides(folder: str, case: Case, device: Device, fp8: bool) -> "Sides":
    from trainer_core.platform.platform import prepare

    platform = prepare(device)
    from infra.bench.sides import Sides  # imports Megatron, which needs the platform prepared

    config = TrainerConfig(
        optimizer=OptimizerConfig(learning_rate=1e-6),
        policy=PolicyConfig(),
        precision=case.precision,
        fp8="tensorwise" if fp8 else None,
        max_length=case.length,
        micro_batch_tokens=case.rows * (case.length - 1),
    )
    rank = RankSpec(rank=0, world_size=1, store=f"{folder}/store", device=device)
    return Sides(folder, config, rank, platform)


def _race(sides: "Sides", case: Case, samples: Samples, pairs: int) -> Race:
    batches = sides.padded(samples, case.rows)
    ours: list[float] = []
    plain: list[float] = []
    peaks = [0.0, 0.0]
    for turn in range(pairs + 1):
        for number, (times, step) in enumerate(
            ((ours, lambda: sides.ours(samples)), (plain, lambda: sides.plain(batches)))
        ):
            seconds, peak = _measured(sides, step)
            if turn:  # the first round compiles, allocates and warms up
                times.append(seconds)
                peaks[number] = max(peaks[number], peak)
    return Race(ours, plain, *peaks)


def _measured(sides: "Sides", step: Callable[[], object]) -> tuple[float, float]:
    """Seconds and the most memory, GiB. On CPU processor time is taken, which other processes do not change much."""
    clock = time.process_time if sides.device.type == "cpu" else time.perf_counter
    sides.settle()
    begun = clock()
    step()
    sides.settle()
    seconds = clock() - begun
    bytes_used = sides.peak_bytes() or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return seconds, bytes_used / 2**30


def _endurance(sides: "Sides", case: Case) -> dict[str, float]:
    """Take steps over other samples each, as many before the middle as after it."""
    for seed in range(_STEPS):  # each width once, so that its caches exist
        sides.ours(draw_samples(case, mixed=True, seed=seed))
    halves: list[float] = []
    held: list[int] = []
    for _ in range(2):
        times = []
        for seed in range(_STEPS):
            samples = draw_samples(case, mixed=True, seed=seed)
            seconds, _ = _measured(sides, partial(sides.ours, samples))
            times.append(seconds / int(samples.positions.sum()))
        halves.append(statistics.median(times))
        held.append(sides.held_bytes())
    return {"step_time_drift": halves[1] / halves[0], "memory_growth_gib": (held[1] - held[0]) / 2**30}


def _saving(sides: "Sides") -> dict[str, float]:
    times: list[float] = []
    with scratch(memory=True) as folder:
        for turn in range(4):
            sides.settle()
            begun = time.perf_counter()
            sides.save(folder)
            if turn:  # the first lays out the files
                times.append(time.perf_counter() - begun)
        size = sum(path.stat().st_size for path in folder.iterdir() if not path.name.endswith(".mapped"))
    return {"save_critical_s": statistics.median(times), "save_gib": size / 2**30}


def _rates(name: CaseName, case: Case, sides: "Sides", alike: Race, mixed: Race, pairs: int) -> dict[str, Any]:
    even, uneven = draw_samples(case, mixed=False), draw_samples(case, mixed=True)
    tokens, packed = int(even.positions.sum()), int(uneven.positions.sum())
    peak = next((flops for part, flops in PEAK_FLOPS.items() if part in sides.name), None)
    work = floating_point_operations(case, even.positions, int(even.response_lengths.sum()))
    return {
        "device": sides.name,
        "case": name,
        "transformer_engine": sides.transformer_engine,
        "pairs": pairs,
        "tokens": tokens,
        "tokens_per_s": tokens / statistics.median(alike.ours),
        "plain_tokens_per_s": tokens / statistics.median(alike.plain),
        "ratio": statistics.median(alike.ratios),
        "ratio_spread": float(np.ptp(alike.ratios)),
        "packed_tokens_per_s": packed / statistics.median(mixed.ours),
        "packed_plain_tokens_per_s": packed / statistics.median(mixed.plain),
        "packed_ratio": statistics.median(mixed.ratios),
        "mfu": None if peak is None else work / statistics.median(alike.ours) / peak,
        "peak_gib": alike.peak_gib,
        "plain_peak_gib": alike.plain_peak_gib,
    }
