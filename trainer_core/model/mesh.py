"""Process groups of a trainer, and the collectives that the trainer uses itself."""

import datetime
from dataclasses import dataclass
from typing import cast

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from numpy.typing import NDArray

from storage.errors import InputError
from trainer_core.config import ParallelConfig, RankSpec
from trainer_core.context_parallel import Context
from trainer_core.platform.platform import Platform


@dataclass(frozen=True)
class Mesh:
    """Place of this rank in the layout. Megatron's `parallel_state` holds the groups."""

    rank: int  # global rank
    parallel: ParallelConfig  # layout
    device: torch.device  # device of this rank
    data_rank: int  # number of this rank's share of a batch
    speaks: bool  # this rank contributes the results of its tokens: tensor rank 0 of the last pipeline stage
    context: Context  # share of each sequence that this rank holds

    @property
    def tensor_group(self) -> dist.ProcessGroup:
        """Ranks that hold the other shards of this rank's matrices."""
        return cast(dist.ProcessGroup, parallel_state.get_tensor_model_parallel_group())

    @property
    def context_group(self) -> dist.ProcessGroup | None:
        """Ranks that hold the other shares of the same sequences; None if this rank holds them whole."""
        if self.context.ranks == 1:
            return None
        return cast(dist.ProcessGroup, parallel_state.get_context_parallel_group())

    def wait(self) -> None:
        """Wait until every rank is here. Collective."""
        if self.parallel.world_size > 1:
            dist.barrier()

    def combine(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        """Sum `values` over the ranks with `speaks`; every rank gets the sum. Collective. Ranks own disjoint entries or
        partial sums, so adding the zeros of the others is exact."""
        return self.add(values if self.speaks else np.zeros_like(values))

    def add(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        """Sum `values` over all ranks; every rank gets the sum. Collective."""
        total = torch.from_numpy(values.astype(np.float64)).to(self.device)
        dist.all_reduce(total)
        return total.cpu().numpy()


def join(spec: RankSpec, parallel: ParallelConfig, platform: Platform) -> Mesh:
    """Meet the other ranks and build Megatron's groups. Collective. Raises InputError if the layout has other ranks."""
    if spec.world_size != parallel.world_size:
        fact = f"{spec.world_size} trainer ranks cannot form the layout {parallel}"
        raise InputError(f"{fact}; start {parallel.world_size} of them")
    dist.init_process_group(
        platform.backend,
        init_method=spec.store if "://" in spec.store else f"file://{spec.store}",
        rank=spec.rank,
        world_size=spec.world_size,
        timeout=datetime.timedelta(seconds=spec.timeout_seconds),
        # with a device each of Megatron's twenty groups connects at once, which takes a lone rank 8 GiB of its card
        device_id=platform.device if platform.backend == "nccl" and spec.world_size > 1 else None,
    )
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=parallel.tensor,
        pipeline_model_parallel_size=parallel.pipeline,
        virtual_pipeline_model_parallel_size=parallel.virtual_pipeline,
        context_parallel_size=parallel.context,
        expert_model_parallel_size=parallel.expert,
        expert_tensor_parallel_size=parallel.expert_tensor,
        create_gloo_process_groups=False,  # on CPU every group is gloo anyway, on GPU nothing here needs it
    )
    return Mesh(
        rank=spec.rank,
        parallel=parallel,
        device=platform.device,
        data_rank=parallel_state.get_data_parallel_rank(),
        speaks=parallel_state.is_pipeline_last_stage() and parallel_state.get_tensor_model_parallel_rank() == 0,
        context=Context(parallel.context, parallel_state.get_context_parallel_rank()),
    )


def leave_ended() -> bool:
    """Leave the groups of other ranks that have ended; False if this process is in none."""
    if member := dist.is_initialized():
        leave()
    return member


def leave() -> None:
    """Destroy the process groups; without it the process ends with a warning."""
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()
