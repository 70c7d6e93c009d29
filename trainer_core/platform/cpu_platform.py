"""Run Megatron, which names CUDA throughout, on CPU.

megatron-core writes `torch.cuda.current_device()`, `device="cuda"` and similar literals. On a machine without a GPU
each of these few names has a CPU meaning for as long as `installed()` lasts; none of Megatron's own logic is
replaced. On a GPU this module is never imported."""

import contextlib
import functools
import importlib
import itertools
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

_CPU = torch.device("cpu")


@contextlib.contextmanager
def installed() -> Iterator[None]:
    """Give CUDA's names a CPU meaning. Enter it before megatron is first imported; on exit everything is restored."""
    with torch.device("cpu"):
        torch.empty(0)  # torch.device() as a context knows factories by identity, and records them on first use
    with contextlib.ExitStack() as undo:
        for owner, name, value in itertools.chain(_torch_replacements(), _megatron_replacements()):
            undo.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, value)
        yield


def _torch_replacements() -> Iterator[tuple[Any, str, object]]:
    cuda = torch.cuda
    # torch.compile at import time loads inductor and later wants a C++ compiler; jit_fuser only speeds up kernels
    yield torch, "compile", lambda function=None, **options: function or (lambda decorated: decorated)
    # where tensors are created: "the current device"
    yield cuda, "current_device", lambda: _CPU
    # one thread of execution: a stream has nothing to wait for
    yield cuda, "synchronize", lambda *args, **kwargs: None
    yield cuda, "current_stream", lambda device=None: _Stream()
    yield cuda, "stream", lambda stream=None: contextlib.nullcontext()
    yield cuda, "Stream", _Stream
    # the only random generator
    for owner in (cuda, cuda.random):
        yield owner, "get_rng_state", lambda device="cuda": torch.get_rng_state()
        yield owner, "set_rng_state", lambda state, device="cuda": torch.set_rng_state(state)
        yield owner, "manual_seed", lambda seed: torch.manual_seed(seed)  # dynamo refuses two names for one function
    # literals device="cuda" of the optimizers, schedules and checkpoints
    for name in ("tensor", "zeros", "ones"):
        yield torch, name, _on_cpu(getattr(torch, name))
    yield torch.Tensor, "cuda", lambda tensor, *args, **kwargs: tensor
    # string comparisons with 'torch.cuda.FloatTensor' in clip_grads.py and distrib_optimizer.py
    yield torch.Tensor, "type", _type_as_megatron_expects(torch.Tensor.type)


def _megatron_replacements() -> Iterator[tuple[Any, str, object]]:
    # imported here, because importing it needs the names above
    rng = importlib.import_module("megatron.core.tensor_parallel.random")
    # reaches for CUDA's generator objects below torch's public functions
    yield rng, "_set_cuda_rng_state", lambda state, device=-1, graph_safe=False: torch.set_rng_state(state)
    yield rng, "_get_cuda_rng_state", lambda device="cuda", clone=False, graph_safe=False: torch.get_rng_state()
    # makes lists of the numbers of tokens that experts exchange only of those that are on a GPU
    dispatcher = importlib.import_module("megatron.core.transformer.moe.token_dispatcher")
    yield (
        dispatcher,
        "maybe_move_tensor_to_cpu",
        lambda tensor, as_numpy=False, record_stream=False: (
            tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor
        ),
    )
    # gloo exchanges tensors of equal sizes alone, and experts get as many tokens as were chosen for them
    mappings = importlib.import_module("megatron.core.tensor_parallel.mappings")
    uneven = {"_gather_along_first_dim": _gather_uneven, "_reduce_scatter_along_first_dim": _reduce_scatter_uneven}
    for name, exchange in uneven.items():
        yield mappings, name, _where_uneven(getattr(mappings, name), exchange)


class _Stream:
    def __init__(self, *args: object, **kwargs: object) -> None:
        pass

    def synchronize(self, other: object = None) -> None:
        """Do nothing: nothing runs concurrently with the caller."""

    wait_stream = wait_event = synchronize

    def record_event(self) -> "_Stream":
        """An event that has happened: like a stream, it has nothing to wait for."""
        return self


def _where_uneven(even: Callable[..., torch.Tensor], uneven: Callable[..., torch.Tensor]) -> Callable[..., Any]:
    def exchange(tensor: torch.Tensor, group: Any, sizes: Any = None, use_global_buffer: bool = False) -> torch.Tensor:
        if sizes is None or group.size() == 1:
            return even(tensor, group, sizes, use_global_buffer)
        return uneven(tensor, group, [int(size) for size in sizes])

    return exchange


def _gather_uneven(tensor: torch.Tensor, group: Any, sizes: list[int]) -> torch.Tensor:
    """(own size, ...) of each rank -> (sum of sizes, ...)."""
    padded = tensor.new_zeros(max(sizes), *tensor.shape[1:])
    padded[: len(tensor)] = tensor
    parts = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(parts, padded, group=group)
    return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])


def _reduce_scatter_uneven(tensor: torch.Tensor, group: Any, sizes: list[int]) -> torch.Tensor:
    """(sum of sizes, ...) -> the sum over ranks of this rank's part, (own size, ...)."""
    total = tensor.contiguous().clone()
    dist.all_reduce(total, group=group)
    return total.split(sizes)[group.rank()]


def _on_cpu(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(factory)
    def make(*args: Any, **kwargs: Any) -> torch.Tensor:
        device = kwargs.get("device")
        if isinstance(device, str | torch.device) and torch.device(device).type == "cuda":
            kwargs["device"] = _CPU
        kwargs.pop("pin_memory", None)  # which speeds up copies to a GPU, and needs its driver
        return factory(*args, **kwargs)

    return make


def _type_as_megatron_expects(original: Callable[..., Any]) -> Callable[..., Any]:
    def tensor_type(tensor: torch.Tensor, dtype: object = None, *args: Any, **kwargs: Any) -> Any:
        if dtype is not None:
            return original(tensor, dtype, *args, **kwargs)
        caller = sys._getframe(1).f_globals.get("__name__", "")
        name = original(tensor)
        return name.replace("torch.", "torch.cuda.", 1) if caller.startswith("megatron.") else name

    return tensor_type
