"""An engine of the sync bench: the product's, with the stock ways in. Imports without vLLM or torch."""

import pickle
import time
from pathlib import Path
from typing import Any, cast

from infra.bench.waiting import wait_for
from tasks.engine.vllm.engine import Engine
from trainer_core.weights.channel import Channel
from trainer_core.weights.plan import WeightPlan

StockTensors = list[tuple[str, str, list[int]]]
"""Name, type and shape of tensors."""

_COPIES = 10  # of an arena, for the speed of the link


class SyncEngine(Engine):
    """An engine that can also be filled as vLLM's users do it."""

    def stock_files(self, directory: str) -> None:
        """vLLM's layer-wise reload from the safetensors files of a folder."""
        self.drop()
        self._core.workers("reload_weights", weights_path=directory)
        self._core.forget_prompts()

    def stock_handles(self, directory: str) -> None:
        """vLLM's own transfer of CUDA IPC handles."""
        self.drop()
        self._core.workers(cast(Any, receive_handles), directory=directory)
        self._core.forget_prompts()

    def stock_meet(self, port: int, workers: int) -> None:
        """vLLM's own group for broadcasts, with the trainer's rank 0 as the first."""
        self._core.workers(cast(Any, meet), port=port, workers=workers)

    def stock_broadcast(self, tensors: StockTensors) -> None:
        """vLLM's own broadcasts, packed."""
        self.drop()
        self._core.workers(cast(Any, receive_broadcasts), tensors=tensors)
        self._core.forget_prompts()

    def look(self, seen: bool) -> None:
        """Compute digests from now on, or none."""
        self._core.workers(cast(Any, look), seen=seen)

    def card_bytes(self) -> int:
        """Memory of the workers' cards in use, by all processes."""
        return sum(self._core.workers(cast(Any, used_bytes)))

    def copy_seconds(self, channel: Channel, plan: WeightPlan) -> list[float]:
        """Seconds of a plain copy of an arena of the sender of each bucket to the first worker."""
        return self._core.workers(
            cast(Any, timed_copies), channel=channel.model_dump_json(), plan=plan.model_dump_json()
        )[0]


def receive_handles(worker: Any, directory: str) -> None:
    """Do what vLLM's `update_weights` does with the backend `ipc`; runs in vLLM's worker."""
    import torch
    from vllm.config import WeightTransferConfig
    from vllm.distributed.weight_transfer.ipc_engine import IPCWeightTransferEngine, IPCWeightTransferUpdateInfo

    model = worker.model_runner.model
    transfer = IPCWeightTransferEngine(WeightTransferConfig(backend="ipc"), worker.vllm_config, worker.device, model)
    handles = Path(directory, "handles")
    wait_for(handles)
    update = IPCWeightTransferUpdateInfo(**pickle.loads(handles.read_bytes()))
    transfer.start_weight_update()
    transfer.receive_weights(update)
    transfer.finish_weight_update()
    torch.cuda.synchronize()
    Path(directory, f"loaded.{worker.rank}").touch()


def meet(worker: Any, port: int, workers: int) -> None:
    """Join the group of vLLM's backend `nccl`; runs in vLLM's worker."""
    from vllm.config import WeightTransferConfig
    from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine, NCCLWeightTransferInitInfo

    model = worker.model_runner.model
    transfer = NCCLWeightTransferEngine(WeightTransferConfig(backend="nccl"), worker.vllm_config, worker.device, model)
    transfer.init_transfer_engine(
        NCCLWeightTransferInitInfo(master_address="127.0.0.1", master_port=port, rank_offset=1, world_size=1 + workers)
    )
    worker.stock_transfer = transfer


def receive_broadcasts(worker: Any, tensors: StockTensors) -> None:
    """Do what vLLM's `update_weights` does with the backend `nccl`; runs in vLLM's worker."""
    import torch
    from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferUpdateInfo

    names, types, shapes = (list(column) for column in zip(*tensors, strict=True))
    transfer = worker.stock_transfer
    transfer.start_weight_update()
    transfer.receive_weights(NCCLWeightTransferUpdateInfo(names, types, shapes, packed=True))
    transfer.finish_weight_update()
    torch.cuda.synchronize()


def look(worker: Any, seen: bool) -> None:
    """Switch digests off or on; runs in vLLM's worker."""
    from infra.bench import unseen

    unseen.look(seen)


def used_bytes(worker: Any) -> int:
    """Memory in use on the worker's card; runs in vLLM's worker."""
    import torch

    torch.cuda.synchronize()
    free, whole = torch.cuda.mem_get_info(worker.device)
    return whole - free


def timed_copies(worker: Any, channel: str, plan: str) -> list[float]:
    """Seconds of a plain copy of an arena of the sender of each bucket; runs in vLLM's worker."""
    import torch

    device, way, planned = worker.device, Channel.model_validate_json(channel), WeightPlan.model_validate_json(plan)
    own = torch.empty(planned.arena_bytes, dtype=torch.uint8, device=device)

    def seconds(arena: torch.Tensor, times: int) -> float:
        begun = time.perf_counter()
        for _ in range(times):
            own.copy_(arena)
        if device.type == "cuda":
            torch.cuda.synchronize()
        return (time.perf_counter() - begun) / times

    arenas = [opened(way, planned, bucket.sender, device) for bucket in planned.buckets]
    for arena in arenas:
        seconds(arena, 1)  # touches every page
    return [seconds(arena, _COPIES) for arena in arenas]


def opened(channel: Channel, plan: WeightPlan, sender: int, device: Any) -> Any:
    """A sender's first arena, in a worker."""
    if device.type == "cpu":
        from trainer_core.weights.transports.shared import HostOpener

        return HostOpener(channel, plan, device).open(sender)[0][0]
    from trainer_core.weights.transports import card

    return card.CardOpener(channel, plan, device).open(sender)[0][0]
