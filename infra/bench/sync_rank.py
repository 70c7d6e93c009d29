"""A trainer rank of the sync bench: the product's, with random weights, the stock ways out, and instruments.

Imports torch and Megatron.
"""

import pickle
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed
from safetensors.torch import save_file

from infra.bench import unseen
from infra.bench.sync_calls import SyncRankProtocol
from infra.bench.sync_engine import StockTensors
from infra.bench.waiting import wait_for
from tasks.workers.cluster import LOOPBACK
from trainer_core.config import RankSpec, TrainerConfig
from trainer_core.platform.platform import Platform, quietly
from trainer_core.protocol import Planned
from trainer_core.trainer import Trainer
from trainer_core.weights.channel import Channel
from trainer_core.weights.packing import dtype_name
from trainer_core.weights.plan import Form, WeightPlan
from trainer_core.weights.transports.shared import SharedArenas
from trainer_core.weights.update import Update

_SPREAD = 0.02  # standard deviation of the weights
# and of routers' biases, which choose a token's experts. Without them the rounding of bf16, different on both sides,
# would choose, and nothing could be compared in a deep model
_BIASES = 2.0
_OBJECT_COLLECTIVES = ("all_gather_object", "broadcast_object_list", "gather_object", "scatter_object_list")


class SyncRank(Trainer, SyncRankProtocol):
    """A rank that holds random weights and no optimizer; `SyncRankProtocol` documents its additional calls."""

    def __init__(self, model_dir: str, config: TrainerConfig, rank: RankSpec, platform: Platform) -> None:
        super().__init__(model_dir, config, rank, platform)
        self._device, self._world = platform.device, rank.world_size
        self._object_collectives = 0
        self._keeps = False
        self._kept: tuple[Planned, Update] | None = None
        self._stock: Any = None  # the group of vLLM's own broadcasts
        for name in _OBJECT_COLLECTIVES:
            setattr(torch.distributed, name, self._counted(getattr(torch.distributed, name)))

    def draw(self, seed: int) -> None:
        """See `SyncRankProtocol.draw`."""
        generator = torch.Generator(self._device).manual_seed(seed * self._world + self._mesh.rank)
        shared = torch.Generator(self._device).manual_seed(seed)  # two stages hold it
        with self._model.weights("writable"), torch.no_grad():
            for module in self._model.modules:
                for parameter in module.parameters():
                    drawn = shared if "shared_embedding" in vars(parameter) else generator
                    parameter.normal_(float(parameter.ndim == 1), _SPREAD, generator=drawn)
                for name, buffer in module.named_buffers():
                    if name.endswith("expert_bias"):
                        buffer.normal_(0.0, _BIASES, generator=generator)
        self._settle()

    def keep_plan(self, keep: bool) -> None:
        """See `SyncRankProtocol.keep_plan`."""
        self._keeps = keep

    def plan_weights(self, version: int, arena_bytes: int, form: Form = "whole") -> Planned:
        """See `TrainerProtocol.plan_weights` and `SyncRankProtocol.keep_plan`."""
        if self._keeps and self._kept is not None:
            planned, self._update = self._kept
            return planned
        planned = super().plan_weights(version, arena_bytes, form)
        assert self._update is not None  # it was just made
        self._kept = planned, self._update
        return planned

    def look(self, seen: bool) -> None:
        """See `SyncRankProtocol.look`."""
        unseen.look(seen)

    def object_collectives(self) -> int:
        """See `SyncRankProtocol.object_collectives`."""
        counted, self._object_collectives = self._object_collectives, 0
        return counted

    def card_bytes(self) -> int:
        """See `SyncRankProtocol.card_bytes`."""
        if self._device.type == "cpu":
            return 0
        self._settle()
        free, whole = torch.cuda.mem_get_info(self._device)
        return whole - free

    def arena_bytes(self) -> int:
        """See `SyncRankProtocol.arena_bytes`."""
        assert self._kept is not None  # a round was made
        return self._kept[1].plan.arena_bytes

    def show_arenas(self, channel: Channel, plan: WeightPlan) -> None:
        """See `SyncRankProtocol.show_arenas`."""
        if self._device.type == "cpu":
            SharedArenas(channel, plan, self._mesh.rank, new=True)
            return
        from trainer_core.weights.transports.card import export_arenas

        export_arenas(channel, plan, self._mesh.rank, self._device)

    def stock_files(self, directory: str) -> None:
        """See `SyncRankProtocol.stock_files`."""
        tensors = {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in self._exported()}
        if self._mesh.rank == 0:
            save_file(tensors, Path(directory, "model.safetensors"))

    def stock_handles(self, directory: str, workers: int) -> None:
        """See `SyncRankProtocol.stock_handles`."""
        from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerSendWeightsArgs, IPCWeightTransferEngine

        if self._mesh.rank >= workers:  # torch never frees an unopened handle: make only the collectives
            handles_of_none = [{} for _ in self._exported()]
            IPCWeightTransferEngine._all_gather_and_merge_handles(handles_of_none)
            IPCWeightTransferEngine._post_send_sync()
            return
        handles, loaded = Path(directory, "handles"), Path(directory, "loaded")

        def send(update: Any) -> None:
            torch.cuda.synchronize()  # the conversion is complete
            written = handles.with_suffix(".new")
            written.write_bytes(pickle.dumps(vars(update)))
            written.rename(handles)
            for worker in range(workers):
                wait_for(loaded.with_suffix(f".{worker}"))

        IPCWeightTransferEngine.trainer_send_weights(self._exported(), IPCTrainerSendWeightsArgs(send_mode=send))

    def stock_tensors(self) -> StockTensors:
        """See `SyncRankProtocol.stock_tensors`."""
        return [(name, dtype_name(tensor.dtype), list(tensor.shape)) for name, tensor in self._exported()]

    def stock_meet(self, port: int, workers: int) -> None:
        """See `SyncRankProtocol.stock_meet`."""
        from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine

        if self._mesh.rank == 0:
            place = {"master_address": LOOPBACK, "master_port": port, "world_size": 1 + workers}
            self._stock = NCCLWeightTransferEngine.trainer_init(place)

    def stock_broadcast(self) -> None:
        """See `SyncRankProtocol.stock_broadcast`."""
        from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerSendWeightsArgs, NCCLWeightTransferEngine

        if self._mesh.rank == 0:
            how = NCCLTrainerSendWeightsArgs(group=self._stock, packed=True)
            NCCLWeightTransferEngine.trainer_send_weights(self._exported(), how)
        else:
            deque(self._exported(), maxlen=0)
        self._settle()

    def _exported(self) -> Iterator[tuple[str, torch.Tensor]]:
        with self._model.weights("readable"), torch.no_grad(), quietly():
            yield from self._model.bridge.export_hf_weights(list(self._model.chunks), cpu=False, show_progress=False)  # pyright: ignore

    def _counted(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*arguments: Any, **options: Any) -> Any:
            self._object_collectives += 1
            return call(*arguments, **options)

        return counted

    def _settle(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize()
