"""Micro-batches of one shape, launched as one CUDA graph each instead of kernel by kernel.

A small model computes faster than a host can launch its kernels. The graph is recorded in each pass, so nothing
in it outlives the tensors that it names.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch

from storage.errors import RatchetError
from trainer_core.model.micro_batch import MicroBatch
from trainer_core.telling import told

FEWEST = 4
"""Micro-batches for which recording, which takes as long as one or two of them, is worth its time."""

Report = Mapping[str, torch.Tensor]
"""What a pass keeps of a micro-batch."""
Run = Callable[[Sequence[MicroBatch]], list[Report]]
"""Takes micro-batches through the model."""
Record = Callable[[Callable[[], list[Report]]], tuple[list[Report], Callable[[], None]]]
"""Returns what the work returns, without its values, and a function that does it again and fills in the values."""


def record(work: Callable[[], list[Report]]) -> tuple[list[Report], Callable[[], None]]:
    """Record the kernels that `work` launches on the current stream, which must not be the device's default.

    Raises:
        RatchetError: something in it waits for the device, or allocates outside torch.
    """
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    try:
        # other threads, such as autograd's, launch on the same stream
        with torch.cuda.graph(graph, stream=torch.cuda.current_stream(), capture_error_mode="thread_local"):
            results = work()
    except (torch.AcceleratorError, RuntimeError) as error:
        raise RatchetError(
            f"the kernels of a micro-batch cannot be recorded as a CUDA graph: {error}. Set "
            "train.megatron.cuda_graphs = false"
        ) from error
    return results, graph.replay


def replayed(batches: Sequence[MicroBatch], run: Run, recorder: Record) -> list[Report]:
    """Take all micro-batches of a pass, of one shape, through the model by recording one of them.

    The first runs as it is: what is made once, such as plans of kernels and tables of rotations, is made there.
    """
    waiting = iter(told(batches, "micro-batches"))
    reports = run([next(waiting)])
    held = _copied(batches[1])
    (recorded,), again = recorder(lambda: run([held]))
    for batch in waiting:
        for own, given in zip(_tensors(held), _tensors(batch), strict=True):
            own.copy_(given)
        again()
        reports.append({name: value.clone() for name, value in recorded.items()})
    return reports


def _tensors(batch: MicroBatch) -> list[torch.Tensor]:
    """All that differs between micro-batches of one shape."""
    fixed = (batch.tokens, batch.positions, batch.predicting, batch.targets, batch.weights, batch.count)
    return [*fixed, batch.packing.cu_seqlens_q, batch.segments.lengths, *batch.values.values()]


def _copied(batch: MicroBatch) -> MicroBatch:
    ends = batch.packing.cu_seqlens_q.clone()
    return replace(
        batch,
        tokens=batch.tokens.clone(),
        positions=batch.positions.clone(),
        packing=replace(batch.packing, cu_seqlens_q=ends, cu_seqlens_kv=ends),
        filling=None,  # only routers read it, and models with experts are not recorded
        predicting=batch.predicting.clone(),
        targets=batch.targets.clone(),
        segments=replace(batch.segments, lengths=batch.segments.lengths.clone()),
        weights=batch.weights.clone(),
        count=batch.count.clone(),
        values={name: value.clone() for name, value in batch.values.items()},
    )
