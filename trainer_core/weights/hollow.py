"""A conversion tried without data and without other ranks, which tells names, types and shapes."""

import contextlib
from collections.abc import Iterator
from typing import Any, cast

import torch
from megatron.bridge.models.conversion.param_mapping import MegatronParamMapping

from storage.digest import value_digest
from trainer_core.weights.digest import dtype_name
from trainer_core.weights.table import Spec

_SILENT = ("all_gather", "broadcast")
"""Collectives that leave their result as it is; it has a shape and no data."""
_REFUSED = (
    "all_gather_coalesced", "all_gather_into_tensor", "all_gather_object", "all_reduce", "all_reduce_coalesced",
    "all_to_all", "all_to_all_single", "barrier", "batch_isend_irecv", "broadcast_object_list", "gather",
    "gather_object", "irecv", "isend", "monitored_barrier", "new_group", "recv", "recv_object_list", "reduce",
    "reduce_scatter", "reduce_scatter_tensor", "scatter", "scatter_object_list", "send", "send_object_list",
)  # fmt: skip
_MARKS = ("tensor_model_parallel", "partition_dim")


class Untried(RuntimeError):
    """A conversion needs data or other ranks to tell what it makes. A `RuntimeError`, as torch's own of this kind."""


UNTRIED = (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)
"""What an attempt raises that must have data: torch for most operations, numpy and mappings for others. The export with
data goes on then, and raises what is wrong with the weights themselves."""


class Settings:
    """The model's configuration as mappings read it; without a `__dict__`, which they would copy each time."""

    __slots__ = ("_of",)

    def __init__(self, of: object) -> None:
        self._of = of

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._of, name)

    def wraps(self, config: object) -> bool:
        """Whether it is that configuration."""
        return config is self._of

    def digest(self) -> str:
        """Digest of all plain values, by which ranks compare theirs."""
        plain = {name: value for name, value in vars(self._of).items() if isinstance(value, str | int | float)}
        return value_digest({name: repr(value) for name, value in plain.items()})


def hollow(tensor: torch.Tensor) -> torch.Tensor:
    """Type, shape and Megatron's marks of a tensor, without data."""
    empty = torch.empty_like(tensor, device="meta")
    vars(empty).update({name: mark for name, mark in vars(tensor).items() if name in _MARKS})
    return empty


def spec_of(tensor: torch.Tensor) -> Spec:
    """What sizes a buffer for it."""
    marks = vars(tensor)
    return Spec(
        dtype=dtype_name(tensor.dtype),
        shape=tuple(tensor.shape),
        divided=marks.get("tensor_model_parallel"),
        dimension=marks.get("partition_dim"),
    )


def absent(name: str, tensor: torch.Tensor) -> str | None:
    """Why a tensor cannot be sent; None if it is in memory."""
    if tensor.numel() == 0 or tensor.untyped_storage().nbytes() < tensor.numel() * tensor.element_size():
        return f"{name} is not in memory: it was moved away, and must be brought back before weights are sent"
    return None


@contextlib.contextmanager
def replaced(owner: object, **others: object) -> Iterator[None]:
    """Functions of a class or module are others while this lasts."""
    originals = {name: vars(owner)[name] for name in others}
    for name, other in others.items():
        setattr(owner, name, other)
    try:
        yield
    finally:
        for name, original in originals.items():
            setattr(owner, name, original)


@contextlib.contextmanager
def by_settings(settings: Settings) -> Iterator[None]:
    """Mappings read the model's configuration through `settings`; other configurations they read as ever."""
    original = cast(Any, MegatronParamMapping)._get_config

    def config_of(mapping: object, module: torch.nn.Module) -> object:
        try:
            found = original(mapping, module)
        except ValueError:  # torch's own modules have none; a whole export gives them the model's
            return settings
        return settings if settings.wraps(found) else found

    with replaced(MegatronParamMapping, _get_config=config_of):
        yield


@contextlib.contextmanager
def without_communication() -> Iterator[None]:
    """Collectives of tensors without data do nothing while this lasts, and others raise `Untried`."""

    def refuse(*_: object, **__: object) -> None:
        raise Untried("a conversion asks other ranks for more than shards")

    silent = dict.fromkeys(_SILENT, lambda *_, **__: None)
    with replaced(torch.distributed, **silent, **dict.fromkeys(_REFUSED, refuse)):
        yield
