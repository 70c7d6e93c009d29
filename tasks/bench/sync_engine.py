"""An engine of the sync bench: the product's, with the stock ways in. Imports without vLLM or torch."""

import pickle
from pathlib import Path
from typing import Any, cast

from tasks.bench.waiting import wait_for
from tasks.engine.engine import Engine


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


def receive_handles(worker: Any, directory: str) -> None:
    """Runs in vLLM's worker: what its `update_weights` does with the backend `ipc`."""
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
    Path(directory, "loaded").touch()
