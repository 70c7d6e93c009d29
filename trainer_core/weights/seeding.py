"""What the mappings of the bridge's export ask other pipeline stages for, found without them and told to all at once.

A mapping that is new asks the stage that holds a weight for its type and shape, for the kind of its layer, for the
number of experts: one or two collectives of pickled objects for each question, thousands in all. Here each rank tries
the conversion of what it holds, without data, and notes what it would answer. The notes of all ranks travel in the one
exchange of the plan. In the export each new mapping then finds the answers where it would remember them. They are
used once: the mappings and the answers are dropped with the update.
"""

import contextlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from megatron.bridge.models.conversion.model_bridge import WeightConversionTask
from megatron.bridge.models.conversion.param_mapping import MegatronParamMapping

from trainer_core.weights.hollow import (
    UNTRIED,
    Settings,
    Untried,
    by_settings,
    hollow,
    replaced,
    spec_of,
    without_communication,
)
from trainer_core.weights.packing import element_type
from trainer_core.weights.table import Seed, Spec

Told = Mapping[str, Sequence[Sequence[Seed] | None]]
"""By Megatron's name, for each rank of the pipeline what it tells; None if it does not hold the weight."""
_UNREMEMBERED = "seeded"  # where an answer is put that a mapping would not remember


class Recorder:
    """Tries conversions on the rank that holds the weights."""

    def __init__(self, settings: Settings) -> None:
        self._settings, self._digest = settings, settings.digest()
        self._name, self._seeds = "", list[Seed]()

    def recorded(self, tasks: Iterable[WeightConversionTask[Any]]) -> list[tuple[Seed, ...] | None]:
        """For each task, with a mapping that is new, what it asks for; None if only the whole export can tell."""
        with _asking(self._tensor, self._value), by_settings(self._settings), without_communication():
            return [self._tried(task) for task in tasks]

    def _tried(self, task: WeightConversionTask[Any]) -> tuple[Seed, ...] | None:
        self._name, self._seeds = task.global_param_name, []
        try:
            task.mapping.megatron_to_hf(hollow(cast(torch.Tensor, task.param_weight)), task.megatron_module)
        except UNTRIED:
            return None
        return tuple(self._seeds)

    def _tensor(self, mapping: Any, tensor: torch.Tensor, cache_key: str | None = None) -> torch.Tensor:
        self._note(mapping, Seed(key=cache_key, tensor=spec_of(tensor)))
        return tensor

    def _value(self, mapping: Any, value: Any, cache_key: str | None = None) -> Any:
        if value is self._settings:
            self._note(mapping, Seed(key=cache_key, config=self._digest))
        elif isinstance(value, str | int):
            self._note(mapping, Seed(key=cache_key, value=value))
        else:
            raise Untried(f"{self._name} asks for a {type(value).__name__}")
        return value

    def _note(self, mapping: Any, seed: Seed) -> None:
        if mapping.megatron_param != self._name:
            raise Untried(f"{self._name} is converted as {mapping.megatron_param}")
        self._seeds.append(seed)


class Answers:
    """What the new mappings of one export get instead of asking."""

    def __init__(self, told: Told, settings: Settings) -> None:
        self.problem: str | None = None
        """The first weight that is not as it was told; the export went on, as all ranks take part, with zeros."""
        self._told, self._settings, self._digest = told, settings, settings.digest()
        self._asked: Counter[str] = Counter()
        every = vars(MegatronParamMapping)
        self._broadcast, self._ask = every["broadcast_from_pp_rank"], every["broadcast_obj_from_pp_rank"]

    @contextlib.contextmanager
    def given(self) -> Iterator[None]:
        """In here mappings are answered, and tensors travel."""
        with _asking(self._tensor, self._value), by_settings(self._settings):
            yield

    @contextlib.contextmanager
    def given_without_data(self) -> Iterator[None]:
        """In here mappings are answered, and nothing travels: tensors of other ranks have a type and a shape."""
        with _asking(self._outline, self._value), by_settings(self._settings), without_communication():
            yield

    def _tensor(self, mapping: Any, tensor: torch.Tensor | None, cache_key: str | None = None) -> Any:
        if mapping.pp_size == 1:
            return tensor
        specs = [None if seed is None else seed.tensor for seed in self._next(mapping, cache_key, of_tensor=True)]
        if tensor is not None and (live := spec_of(tensor)) != (own := specs[mapping.pp_rank]):
            self.problem = self.problem or f"{mapping.megatron_param} is {live} now, but other ranks were told {own}"
            first = next(spec for spec in specs if spec is not None)
            tensor = tensor.new_zeros(first.shape, dtype=element_type(first.dtype))
        key = cache_key or _UNREMEMBERED
        mapping._tensor_spec_output_cache[key] = [None if spec is None else _as_told(spec) for spec in specs]
        return self._broadcast(mapping, tensor, key)

    def _outline(self, mapping: Any, tensor: torch.Tensor | None, cache_key: str | None = None) -> torch.Tensor | None:
        if mapping.pp_size == 1:
            return tensor
        seeds = self._next(mapping, cache_key, of_tensor=True)
        first = next(seed.tensor for seed in seeds if seed is not None and seed.tensor is not None)
        return torch.empty(first.shape, dtype=element_type(first.dtype), device="meta") if tensor is None else tensor

    def _value(self, mapping: Any, value: Any, cache_key: str | None = None) -> Any:
        if mapping.pp_size == 1:
            return value
        first = next(seed for seed in self._next(mapping, cache_key, of_tensor=False) if seed is not None)
        if first.config not in (None, self._digest):
            raise Untried(f"pipeline stages convert {mapping.megatron_param} by different configurations")
        key = cache_key or _UNREMEMBERED
        mapping._broadcast_obj_cache[key] = first.value if first.config is None else self._settings
        return self._ask(mapping, value, key)

    def _next(self, mapping: Any, key: str | None, *, of_tensor: bool) -> list[Seed | None]:
        """What each rank of the pipeline told for the next question about a weight."""
        name = mapping.megatron_param
        turn = self._asked[name]
        self._asked[name] += 1
        found = [None if seeds is None else seeds[turn : turn + 1] for seeds in self._told.get(name, ())]
        given = [seed for seeds in found if seeds is not None for seed in seeds]
        if not given or any((seed.key, seed.tensor is not None) != (key, of_tensor) for seed in given):
            raise Untried(f"{name} is converted otherwise than it was tried")
        return [seeds[0] if seeds else None for seeds in found]


def _as_told(spec: Spec) -> tuple[torch.Size, torch.dtype, bool | None, int | None]:
    """As a mapping remembers it."""
    return torch.Size(spec.shape), element_type(spec.dtype), spec.divided, spec.dimension


def _asking(tensor: Callable[..., Any], value: Callable[..., Any]) -> contextlib.AbstractContextManager[None]:
    """Mappings call these where they would ask other pipeline stages."""
    return replaced(
        MegatronParamMapping,
        broadcast_from_pp_rank=lambda mapping, found, cache_key=None: tensor(mapping, found, cache_key),
        broadcast_obj_from_pp_rank=lambda mapping, found, cache_key=None: value(mapping, found, cache_key),
    )
