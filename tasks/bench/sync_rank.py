"""A trainer rank of the sync bench: the product's, with random weights, the stock ways out, and instruments.

Imports torch and Megatron.
"""

import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed
from safetensors.torch import save_file

from tasks.bench.sync_calls import SyncRankProtocol
from tasks.bench.waiting import wait_for
from trainer_core.config import RankSpec, TrainerConfig
from trainer_core.platform.platform import Platform, quietly
from trainer_core.protocol import Planned
from trainer_core.trainer import Trainer
from trainer_core.weights.update import Update

_SPREAD = 0.02  # standard deviation of the weights
_OBJECT_COLLECTIVES = ("all_gather_object", "broadcast_object_list", "gather_object", "scatter_object_list")


class SyncRank(Trainer, SyncRankProtocol):
    """A rank that holds random weights and no optimizer; `SyncRankProtocol` documents what is its own."""

    def __init__(self, model_dir: str, config: TrainerConfig, rank: RankSpec, platform: Platform) -> None:
        super().__init__(model_dir, config, rank, platform)
        self._device = platform.device
        self._object_collectives = 0
        self._keeps = False
        self._kept: tuple[Planned, Update] | None = None
        for name in _OBJECT_COLLECTIVES:
            setattr(torch.distributed, name, self._counted(getattr(torch.distributed, name)))

    def draw(self, seed: int) -> None:
        """See `SyncRankProtocol.draw`."""
        generator = torch.Generator(self._device).manual_seed(seed)
        with self._model.weights("writable"), torch.no_grad():
            for module in self._model.modules:
                for parameter in module.parameters():
                    parameter.normal_(float(parameter.ndim == 1), _SPREAD, generator=generator)
                for name, buffer in module.named_buffers():
                    if name.endswith("expert_bias"):
                        buffer.normal_(0.0, _SPREAD, generator=generator)
        self._settle()

    def keep_plan(self, keep: bool) -> None:
        """See `SyncRankProtocol.keep_plan`."""
        self._keeps = keep

    def plan_weights(self, version: int, arena_bytes: int) -> Planned:
        """See `TrainerProtocol.plan_weights` and `SyncRankProtocol.keep_plan`."""
        if self._keeps and self._kept is not None:
            planned, self._update = self._kept
            return planned
        planned = super().plan_weights(version, arena_bytes)
        assert self._update is not None  # it was just made
        self._kept = planned, self._update
        return planned

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

    def stock_files(self, directory: str) -> None:
        """See `SyncRankProtocol.stock_files`."""
        tensors = {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in self._exported()}
        if self._mesh.rank == 0:
            save_file(tensors, Path(directory, "model.safetensors"))

    def stock_handles(self, directory: str) -> None:
        """See `SyncRankProtocol.stock_handles`."""
        from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerSendWeightsArgs, IPCWeightTransferEngine

        handles, loaded = Path(directory, "handles"), Path(directory, "loaded")

        def send(update: Any) -> None:
            torch.cuda.synchronize()  # what was converted is written
            written = handles.with_suffix(".new")
            written.write_bytes(pickle.dumps(vars(update)))
            written.rename(handles)
            wait_for(loaded)

        IPCWeightTransferEngine.trainer_send_weights(self._exported(), IPCTrainerSendWeightsArgs(send_mode=send))

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
