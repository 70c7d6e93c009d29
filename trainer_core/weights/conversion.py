"""Megatron's live tensors and the bridge's own mappings that make Hugging Face tensors of them, on the rank that holds
them: no pipeline or expert group is asked.

Everything here is made for one update and dropped after it. A mapping that is kept remembers shapes, types and
owners of an earlier moment; receivers that are sized by them take garbage without an error."""

import contextlib
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from types import SimpleNamespace
from typing import Any, cast

import torch
from megatron.bridge.models.conversion.model_bridge import WeightConversionTask
from megatron.bridge.models.conversion.param_mapping import MegatronParamMapping
from megatron.bridge.models.conversion.utils import unwrap_model

from storage.errors import SyncMismatch
from trainer_core.model.adapters import Adapter, Adapters, Factor, names_of
from trainer_core.model.model import Model
from trainer_core.weights.exchange import Shards, group_of
from trainer_core.weights.mappings import Known, Names, Settings, absent, is_known, replaced
from trainer_core.weights.packing import Packing
from trainer_core.weights.plan import PlannedTensor, Row
from trainer_core.weights.whole import Exported, Held, named

Gather = Callable[[torch.Tensor], list[torch.Tensor]]
Tensors = dict[str, torch.Tensor]  # by Hugging Face name
_Task = WeightConversionTask[Any]


@dataclass(frozen=True)
class Conversion(Held):
    """One parameter or buffer of this rank, and what it becomes."""

    gathers: bool  # True if the shards of the tensor-parallel ranks are put together
    views: bool  # True if it becomes nothing but views of itself
    convert: Callable[[torch.Tensor], Tensors]
    """The live tensor -> whole tensors by Hugging Face name, inside `gathered_by`."""
    adapter: Adapter | None  # which is added to the tensor

    @cached_property
    def live(self) -> torch.Tensor:
        """Detached tensor; the same object each time, by which its shards are found."""
        return self.tensor.detach() if self.adapter is None else self.adapter.forward(self.tensor).detach()

    def forget(self) -> None:
        vars(self).pop("live", None)


def conversions(model: Model, adapted: bool = True) -> tuple[list[Conversion], list[Exported]]:
    """All weights and persistent buffers of this rank, inside `model.weights`: those that its own mappings convert, and
    the others, which only the bridge's whole export converts. Weights have their adapters added if they are `adapted`.
    Raises SyncMismatch if a weight has no Hugging Face name, or is not in memory now."""
    source = _Source(model, model.adapters if adapted else {})
    found = [source.conversion(*place) for place in _named(model)]
    converted = [one for one in found if isinstance(one, Conversion)]
    return converted, [one for one in found if isinstance(one, Exported)]


def factors(model: Model) -> list[Conversion]:
    """The factors of this rank's adapters, inside `model.weights`, whole and under peft's names. Raises SyncMismatch if
    one is not in memory now."""
    source = _Source(model, model.adapters)
    linears = (place for place in _named(model) if place[3] == "weight" and place[2] in model.adapters)
    return [one for stage, name, linear, _ in linears for one in source.factors(stage, name, model.adapters[linear])]


def gathered_by(gather: Gather) -> contextlib.AbstractContextManager[None]:
    """Mappings get the shards of the tensor-parallel ranks from `gather` instead of exchanging them one by one."""
    # of the class, as mappings make others, which must get them too
    return replaced(MegatronParamMapping, gather_from_tp_ranks=lambda _, tensor: gather(tensor))


class _Source:
    """The bridge, its registry and the checkpoint that the model came from, as one export would use them."""

    def __init__(self, model: Model, adapters: Adapters) -> None:
        self._model, self._adapters = model, adapters
        self._bridge: Any = model.bridge._model_bridge  # pyright: ignore[reportPrivateUsage]  # a new one each time
        self._origin: Any = model.bridge.hf_pretrained
        self._bridge.hf_pretrained = self._origin
        self._registry = self._bridge.mapping_registry()
        alone = SimpleNamespace(size=lambda: 1, rank=lambda: 0)  # of such a group mappings ask nothing else
        groups = SimpleNamespace(pp=alone, ep=alone, tp=group_of(expert=False), expt_tp=group_of(expert=True))
        self._registry.set_process_groups_from_pg_collection(groups)
        self._names = Names(self._registry, cast(Any, unwrap_model(list(model.chunks))), model.config)
        self._present = set(self._origin.state.source.get_all_keys())
        self._tied = bool(self._bridge._share_embeddings_and_output_weights(model.config))
        self._settings = Settings(model.config)
        self._tried_kinds: dict[Hashable, _Tried] = {}

    def conversion(
        self, stage: int, name: str, module: torch.nn.Module, attribute: str
    ) -> Conversion | Exported | None:
        """The conversion of one tensor, here or by the bridge's export; None if it is not exported at all. Raises
        SyncMismatch if it has no Hugging Face name, or is not in memory."""
        tensor = getattr(module, attribute)
        known = self._names.known(stage, name)
        if self._tied and "output_layer" in known.whole:
            return None
        if known.mapping is None:
            raise SyncMismatch(f"megatron-bridge has no Hugging Face name for {known.whole}; use the pinned version")
        if not known.mapping.allow_hf_name_mismatch and not self._present.issuperset(known.names):
            return None  # the model came without it, and the bridge leaves it out
        if (problem := absent(known.whole, tensor)) is not None:
            raise SyncMismatch(problem)
        task = WeightConversionTask(
            name, known.whole, known.mapping, vp_stage=stage, megatron_module=module, param_weight=tensor
        )
        adapter = self._adapters.get(module) if attribute == "weight" else None
        if not is_known(self._bridge, known.mapping) and adapter is None:
            return Exported.of(task, attribute)
        finish = self._finisher(task)
        tried = self._of_its_kind(task, known, tensor)
        found = finish(tried.found)
        if not found:
            return None
        if tried.gathers is None and adapter is None:
            return Exported.of(task, attribute)
        tensors = tuple(named(name, part) for name, part in found.items())
        row = Row(name=known.whole, expert=known.mapping.is_expert, tensors=tensors)
        views = tried.views and adapter is None
        convert: Callable[[torch.Tensor], Tensors] = lambda one: finish(tried.convert(one, module))  # noqa: E731
        return Conversion(row, module, attribute, tensor, bool(tried.gathers), views, convert, adapter)

    def factors(self, stage: int, name: str, adapter: Adapter) -> Iterator[Conversion]:
        known = self._names.known(stage, name)
        ranks = group_of(expert=False).size()
        for factor in adapter.factors():
            tensor, whole = adapter.get_parameter(factor.attribute), f"{known.whole}.{factor.attribute}"
            if (problem := absent(whole, tensor)) is not None:
                raise SyncMismatch(problem)
            shape = [n * (ranks if axis == factor.axis else 1) for axis, n in enumerate(tensor.shape)]
            outline = named(factor.name, tensor.new_empty(shape, device="meta"))
            row = Row(name=whole, expert=False, tensors=(outline,))
            divided = factor.axis is not None and ranks > 1
            convert = partial(_factor, factor, known.mapping if divided else None)
            yield Conversion(row, adapter, factor.attribute, tensor, divided, not divided, convert, None)

    def _of_its_kind(self, task: _Task, known: Known, tensor: torch.Tensor) -> "_Tried":
        """Result of the mapping alone, to learn names, types and shapes. It is tried once for all tensors whose names
        differ in numbers alone, as layers and experts do, and one mapping converts all of them: so mappings choose
        their kind here and not while engines wait."""
        kind = known.kind, type(task.megatron_module), tensor.dtype, tensor.shape
        if kind not in self._tried_kinds:
            self._tried_kinds[kind] = _tried(task, self._settings)
        if (tried := self._tried_kinds[kind]).order is not None:
            return tried.named(known.names)
        own = self._registry.megatron_to_hf_lookup(task.global_param_name)
        return _tried(replace(task, mapping=own), self._settings)

    def _finisher(self, task: _Task) -> Callable[[Tensors], Tensors]:
        """The function that an export applies to the result of a mapping."""
        alias = self._bridge._get_tied_output_hf_name(task, self._registry) if self._tied else None
        alias = alias if alias in self._present else None
        rows, vocabulary = self._model.vocab_size, self._model.vocabulary

        def finish(found: Tensors) -> Tensors:
            found = dict(found)  # to which the bridge may add
            found = dict(self._bridge.maybe_modify_converted_hf_weight(task, found, self._origin.state))
            if alias is not None:
                found[alias] = found[task.mapping.hf_param]
            return {name: part[:rows] if name in vocabulary else part for name, part in found.items()}

        return finish


def _factor(factor: Factor, mapping: Any, shard: torch.Tensor) -> Tensors:
    """A factor of which this rank has a shard, or, without a mapping that gathers, all."""
    whole = shard if mapping is None else torch.cat(mapping.gather_from_tp_ranks(shard), factor.axis or 0)
    return {factor.name: whole}


@dataclass(frozen=True)
class _Tried:
    """Results of a mapping for a tensor of its kind, tried without data."""

    found: Tensors  # without data
    gathers: bool | None  # True if it gathers the tensor's shards; None if it gathers something else
    convert: Callable[[torch.Tensor, torch.nn.Module], Tensors]  # the mapping's function; call it inside `gathered_by`
    views: bool  # True if that makes nothing but views of the tensor
    order: tuple[int, ...] | None  # places of the results' names among the mapping's; None if a result has another name

    def named(self, by_mapping: tuple[str, ...]) -> "_Tried":
        """The same for a tensor whose mapping has other names, in the same order."""
        convert = self.convert
        names = [by_mapping[place] for place in self.order or ()]

        def renamed(tensor: torch.Tensor, module: torch.nn.Module) -> Tensors:
            return dict(zip(names, convert(tensor, module).values(), strict=True))

        return replace(self, found=dict(zip(names, self.found.values(), strict=True)), convert=renamed)


def _tried(task: _Task, settings: Settings) -> _Tried:
    _with_settings(task.mapping, settings)
    hollow = torch.empty_like(cast(torch.Tensor, task.param_weight), device="meta")
    asked: list[torch.Tensor] = []

    def gather(shard: torch.Tensor) -> list[torch.Tensor]:
        asked.append(shard)
        return [shard] * task.mapping.tp_size

    with gathered_by(gather):
        found = task.mapping.megatron_to_hf(hollow, task.megatron_module)
    own = len(asked) <= 1 and all(shard is hollow for shard in asked)
    names = names_of(task.mapping)
    order = tuple(map(names.index, found)) if {*found} <= {*names} else None
    storages = {part.untyped_storage()._cdata for part in found.values()}
    views = not asked and storages <= {hollow.untyped_storage()._cdata}
    return _Tried(found, bool(asked) if own else None, task.mapping.megatron_to_hf, views, order)


def _with_settings(mapping: MegatronParamMapping[Any], settings: Settings) -> None:
    mapping._get_config = lambda module: settings
    for child in vars(mapping).values():
        if isinstance(child, MegatronParamMapping):
            _with_settings(child, settings)


def _named(model: Model) -> Iterator[tuple[int, str, torch.nn.Module, str]]:
    """Every parameter and persistent buffer of this rank: chunk, name in it, the module that owns it, name there."""
    seen: set[int] = set()
    for stage, chunk in enumerate(unwrap_model(list(model.chunks))):
        for path, module in chunk.named_modules():
            if isinstance(module, Adapter):
                continue
            passing = module._non_persistent_buffers_set  # pyright: ignore[reportPrivateUsage]
            buffers = {name: buffer for name, buffer in module._buffers.items() if name not in passing}
            for attribute, tensor in {**module._parameters, **buffers}.items():
                if tensor is not None and id(tensor) not in seen:
                    seen.add(id(tensor))
                    yield stage, f"{path}.{attribute}" if path else attribute, module, attribute


class Parcel:
    """A bucket's tensors on this rank, and the conversions of the weights or shards that become them. Those that make
    views of live weights, as most do, may be done before the bucket's turn: the weights are read in it."""

    def __init__(self, planned: Sequence[PlannedTensor], conversions: Sequence[Conversion]) -> None:
        self.planned, self.conversions = planned, conversions
        self._packing: Packing | None = None

    def look(self) -> None:
        """Make the views of live weights before the bucket's turn, inside `torch.no_grad`; raises as `fill`."""
        if self._packing is None:
            self._packing = Packing(self.planned)
            for one in self.conversions:
                if one.views:
                    self._packing.add(one.convert(one.live))

    def fill(self, arena: torch.Tensor, shards: Shards, positions: "Positions") -> None:
        """Convert what is left, and write everything into the bucket's arena, (bytes,) uint8. Nothing of it is kept.
        Raises SyncMismatch if a weight is not as it was planned."""
        self.look()
        assert self._packing is not None
        with gathered_by(shards.of), replaced(torch, arange=positions.arange):
            for one in self.conversions:
                if not one.views:
                    self._packing.add(one.convert(one.live))
        self._packing.write(arena)
        self._packing = None


class Positions:
    """Row indices of mappings, which would make them for each weight: a dozen launches, longer than the rows take. On
    the host it would have to be copied to the card, which waits for all that was launched before."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._make = device, torch.arange
        self._made: dict[tuple[object, ...], torch.Tensor] = {}

    def arange(self, *bounds: Any, **how: Any) -> torch.Tensor:
        """As `torch.arange`, on the device of the model; the same for the same numbers, unless it was changed."""
        asked = (*bounds, *map(type, bounds), *how.items())
        if (made := self._made.get(asked)) is None or made._version:
            made = self._made[asked] = self._make(*bounds, **{"device": self._device, **how})
        return made
