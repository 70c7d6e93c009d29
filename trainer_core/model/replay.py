"""Micro-batches of one shape, launched as one CUDA graph each: a small model computes faster than a host can launch its
kernels. Each pass records its own graph, so that a graph never outlives its tensors."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from storage.errors import RatchetError
from trainer_core.model.micro_batch import MicroBatch
from trainer_core.progress import told

FEWEST = 4  # fewest micro-batches of a pass that records one: recording takes as long as one or two of them
_DEVICE_BOUND = 1.05  # a device that ends so much later than the host was what took the time

Report = Mapping[str, torch.Tensor]  # results of a micro-batch that a pass keeps
Run = Callable[[Sequence[MicroBatch]], list[Report]]  # runs micro-batches through the model
Work = Callable[[], list[Report]]  # runs a single one

_OWN = ("tokens", "positions", "predicting", "targets", "weights", "count")


@dataclass
class Pace:
    """Last measured seconds; 0 is not known yet."""

    launch: float = 0.0  # time of the host to launch a micro-batch kernel by kernel
    elapsed: float = 0.0  # time from that launch to the end of the device's work
    recording: float = 0.0  # time to record a micro-batch
    position: float = 0.0  # time of the device for one position of a recorded micro-batch

    def pays(self, left: int, positions: int) -> bool:
        device = self.position * positions
        if self.elapsed > _DEVICE_BOUND * self.launch:
            device = self.elapsed
        return (self.recording or self.launch) + left * device < left * max(self.launch, device)


class Graphs:
    """CUDA graphs of kernels on the current stream, which must not be the device's default."""

    def __init__(self) -> None:
        self._pace = Pace()
        self._replays: list[tuple[torch.cuda.Event, int]] = []

    def first(self, work: Work) -> list[Report]:
        torch.cuda.synchronize()
        if len(self._replays) > 1:  # of the previous pass of this kind, which has ended
            (first, _), (last, _) = self._replays[0], self._replays[-1]
            self._pace.position = first.elapsed_time(last) / 1e3 / sum(size for _, size in self._replays)
        self._replays = []
        begun, clock = _mark(), time.perf_counter()
        results = work()
        self._pace.launch = time.perf_counter() - clock
        ended = _mark()
        ended.synchronize()
        self._pace.elapsed = begun.elapsed_time(ended) / 1e3
        return results

    def pays(self, left: int, positions: int) -> bool:
        return self._pace.pays(left, positions)

    def record(self, work: Work, positions: int) -> tuple[list[Report], Callable[[], None]]:
        """Record the work; returns its result without values, and a function that repeats it and fills them in. Raises
        RatchetError: something in it waits for the device, or allocates outside torch."""
        graph, clock = torch.cuda.CUDAGraph(), time.perf_counter()
        torch.cuda.synchronize()
        try:
            # other threads, such as autograd's, launch on the same stream
            with torch.cuda.graph(graph, stream=torch.cuda.current_stream(), capture_error_mode="thread_local"):
                results = work()
        except (torch.AcceleratorError, RuntimeError) as error:
            fact = f"the kernels of a micro-batch cannot be recorded as a CUDA graph: {error}"
            raise RatchetError(f"{fact}. Set train.megatron.cuda_graphs = false") from error
        self._pace.recording = time.perf_counter() - clock
        self._replays = [(_mark(), 0)]

        def again() -> None:
            graph.replay()
            self._replays.append((_mark(), positions))

        return results, again


@dataclass(frozen=True)
class Recorders:
    """Recorder of each kind of pass: their times differ."""

    scoring: Graphs  # for passes without gradients
    training: Graphs  # for passes with gradients


def replayed(batches: Sequence[MicroBatch], run: Run, recorder: Graphs) -> list[Report]:
    """Run all micro-batches of a pass, of one shape, and record one of them if that pays. The first runs unrecorded: it
    creates plans of kernels and tables of rotations."""
    waiting = iter(told(batches, "micro-batches"))
    first = next(waiting)
    positions = first.tokens.numel()
    reports = recorder.first(lambda: run([first]))
    if not recorder.pays(len(batches) - 1, positions):
        return reports + [report for batch in waiting for report in run([batch])]
    held = _copied(batches[1])
    (recorded,), again = recorder.record(lambda: run([held]), positions)
    for batch in waiting:
        for own, given in zip(_tensors(held), _tensors(batch), strict=True):
            own.copy_(given)
        again()
        reports.append({name: value.clone() for name, value in recorded.items()})
    return reports


def _mark() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _tensors(batch: MicroBatch) -> list[torch.Tensor]:
    """Tensors that differ between micro-batches of one shape."""
    return [
        *(vars(batch)[name] for name in _OWN),
        batch.packing.cu_seqlens_q,
        batch.segments.lengths,
        *batch.values.values(),
    ]


def _copied(batch: MicroBatch) -> MicroBatch:
    ends = batch.packing.cu_seqlens_q.clone()
    return replace(
        batch,
        packing=replace(batch.packing, cu_seqlens_q=ends, cu_seqlens_kv=ends),
        filling=None,  # only routers read it, and models with experts are not recorded
        segments=replace(batch.segments, lengths=batch.segments.lengths.clone()),
        values={name: value.clone() for name, value in batch.values.items()},
        **{name: vars(batch)[name].clone() for name in _OWN},
    )
