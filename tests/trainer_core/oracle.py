"""megatron-bridge's plain export, with fresh conversion tasks: the reference for every faster way."""

from pathlib import Path
from typing import NamedTuple


class Exported(NamedTuple):
    """One exported tensor, under its Hugging Face name."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    digest: str


def export(trainer, folder):
    """Write all weights into `folder` on rank 0 and return the records; other ranks return []. Collective."""
    import torch
    from safetensors.torch import save_file

    from trainer_core.platform.platform import quietly
    from trainer_core.weights.digest import tensor_digest
    from trainer_core.weights.packing import dtype_name

    model, tensors = trainer._model, {}
    with torch.no_grad(), model.weights("readable"), quietly():
        for name, tensor in model.bridge.export_hf_weights(list(model.chunks), cpu=False, show_progress=False):
            unpadded = tensor[: model.vocab_size] if name in model.vocabulary else tensor
            if trainer._mesh.rank == 0:
                tensors[name] = unpadded.detach().to("cpu", copy=True).contiguous()
    if not tensors:
        return []
    Path(folder).mkdir(parents=True, exist_ok=True)
    save_file(tensors, Path(folder) / "model.safetensors")
    return [
        Exported(name, dtype_name(tensor.dtype), tuple(tensor.shape), tensor_digest(tensor))
        for name, tensor in tensors.items()
    ]
