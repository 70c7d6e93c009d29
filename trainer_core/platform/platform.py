"""Bring torch, Megatron and its bridge up on the requested device: the only place that knows their import order."""

import contextlib
import importlib
import importlib.util
import io
import logging
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch

from storage.errors import InputError
from trainer_core.config import Device
from trainer_core.platform import te_absent

_process_wide = contextlib.ExitStack()  # what `prepare` installed stays for the life of the process
_prepared: dict[Device, "Platform"] = {}


@dataclass(frozen=True)
class Platform:
    device: torch.device  # device of the tensors
    backend: str  # backend of torch.distributed
    transformer_engine: bool  # True if layers are built from Transformer Engine's modules


def prepare(device: Device, local_rank: int = 0) -> Platform:
    """Import Megatron so that it runs on `device`; call it once, before anything imports megatron. Raises InputError if
    a GPU is requested and there is none, or another kind of device was prepared before."""
    if device in _prepared:
        return _prepared[device]
    if _prepared:
        raise InputError(f"this process already trains on {next(iter(_prepared))}; use another process for {device}")
    _prepared[device] = _prepare_cuda(local_rank) if device == "cuda" else _prepare_cpu()
    return _prepared[device]


def import_for(device: Device) -> None:
    """Import Megatron as `prepare` does, in a process that learns later which card it has."""
    if device == "cuda":
        _import_megatron()
    else:
        prepare(device)


def use_deterministic_kernels() -> None:
    """Restrict torch in this process to kernels whose results do not depend on timing; operations without one raise.
    cuBLAS, NCCL and Transformer Engine take this setting from the environment, Megatron from the model's configuration.
    """
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False


def _prepare_cuda(local_rank: int) -> Platform:
    if not torch.cuda.is_available():
        raise InputError('the trainer\'s device is "cuda", but torch sees no GPU; use device = "cpu"')
    torch.cuda.set_device(local_rank)
    torch.cuda.set_stream(torch.cuda.Stream())  # kernels on the default stream cannot be recorded as CUDA graphs
    _import_megatron()
    return Platform(torch.device("cuda", local_rank), "nccl", transformer_engine=not te_absent.is_absent())


def _prepare_cpu() -> Platform:
    from trainer_core.platform import cpu_platform  # never imported where a GPU trains

    torch.set_num_threads(1)  # several ranks share the cores, and sums then do not depend on the number of threads
    with quietly(), _without_wandb():
        _process_wide.enter_context(cpu_platform.installed())
    _import_megatron()
    return Platform(torch.device("cpu"), "gloo", transformer_engine=False)


def _import_megatron() -> None:
    te_absent.install()
    warnings.filterwarnings("ignore", module=r"megatron\.")  # advice on packages and flags that are ours to choose
    with quietly(), _without_wandb():
        importlib.import_module("megatron.core")
        importlib.import_module("megatron.bridge")
    if importlib.util.find_spec("modelopt") is None:
        # the bridge looks for it at each conversion of a weight; this spares the search through all folders
        sys.modules["modelopt.torch.opt.dynamic"] = cast(Any, None)


@contextlib.contextmanager
def _without_wandb() -> Iterator[None]:
    """Megatron imports wandb where it is installed, which makes two folders that a killed process leaves."""
    if "wandb" in sys.modules:
        yield
        return
    sys.modules["wandb"] = cast(Any, None)
    try:
        yield
    finally:
        del sys.modules["wandb"]  # a user's own loss may import it


@contextlib.contextmanager
def quietly() -> Iterator[None]:
    """Megatron and its bridge print, warn and log about optional packages and defaults that do not concern us."""
    disabled = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(disabled)
