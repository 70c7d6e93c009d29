"""Live adapters: vLLM's layers of LoRA beside frozen weights, in a worker. Imports torch and vLLM.

There is one slot, and every token is computed with the adapter in it: requests name none. Each update brings an adapter
with an id of its own, so that nothing which vLLM keeps by id belongs to another one."""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from itertools import count
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from vllm.lora.layers import BaseLayerWithLoRA, LoRAMapping
from vllm.lora.lora_model import LoRAModel
from vllm.lora.lora_weights import LoRALayerWeights
from vllm.lora.model_manager import LoRAModelManager
from vllm.v1.worker.lora_model_runner_mixin import LoRAModelRunnerMixin

from storage.errors import SyncMismatch
from tasks.engine.vllm.survey import named_digests
from tasks.engine.vllm.update import Report, check_layout
from trainer_core.lora import LoraConfig, factor_name, is_target, module_of
from trainer_core.weights.digest import tensor_digest
from trainer_core.weights.packing import tensors_of, views
from trainer_core.weights.plan import WeightPlan
from trainer_core.weights.transports.ends import Receiver

_FIRST = 1000  # id of an engine's first adapter; those before are of vLLM's warm-up


class Slot(NamedTuple):
    """Places of the two factors of one projection in the live layers."""

    a: torch.Tensor  # (largest rank, in); rows beyond the adapter's rank are zeros
    b: torch.Tensor  # (out, largest rank), with the scale of the adapter

    def of(self, name: str) -> torch.Tensor:
        """Place of the factor that peft calls so."""
        return self.b if name.endswith(".lora_B.weight") else self.a


class ServesOne(LoRAModelRunnerMixin):
    """A model runner that computes all tokens with the adapter in the slot."""

    @property
    def served(self) -> int:
        """Id of that adapter; 0 if there is none, as before the first update."""
        return cast(Any, self.lora_manager)._adapter_manager.lora_index_to_id[0] or 0

    def set_active_loras(
        self,
        input_batch: Any,
        num_scheduled_tokens: np.ndarray,
        num_sampled_tokens: np.ndarray | None = None,
        *_kind: Any,
    ) -> None:
        """See vLLM, whose first runner would ask each request for its adapter."""
        sampled = len(num_scheduled_tokens) if num_sampled_tokens is None else int(num_sampled_tokens.sum())
        self._set_active_loras((self.served,) * sampled, (self.served,) * int(num_scheduled_tokens.sum()), set())

    def _set_active_loras(
        self, prompt_lora_mapping: tuple[int, ...], token_lora_mapping: tuple[int, ...], lora_requests: Any, *kind: Any
    ) -> None:
        """See vLLM, which would look up adapters on the disk; those of its warm-up are named."""
        if lora_requests:
            super()._set_active_loras(prompt_lora_mapping, token_lora_mapping, lora_requests, *kind)
        else:
            mapping = LoRAMapping(token_lora_mapping, prompt_lora_mapping, is_prefill=True)
            cast(Any, self.lora_manager)._adapter_manager.set_adapter_mapping(mapping)


def manager_of(model: torch.nn.Module) -> LoRAModelManager | None:
    """vLLM's manager of the adapters of a model; None if the engine adds none."""
    return vars(model).get("lora_manager")


@contextmanager
def without_adapters(model: torch.nn.Module) -> Iterator[None]:
    """Block in which the model has the layers of its checkpoint in place of those that add adapters to them."""
    manager = manager_of(model)
    wrapped: Mapping[str, BaseLayerWithLoRA] = {} if manager is None else manager.modules
    for name, layer in wrapped.items():
        _put(model, name, cast(Any, layer).base_layer)
    try:
        yield
    finally:
        for name, layer in wrapped.items():
            _put(model, name, layer)


def _put(model: torch.nn.Module, name: str, layer: torch.nn.Module) -> None:
    parent, _, own = name.rpartition(".")
    model.get_submodule(parent)._modules[own] = layer


def slots_of(manager: LoRAModelManager, config: LoraConfig) -> dict[str, Slot]:
    """Places of the factors by Hugging Face name of the module, of those that the configuration names."""
    found: dict[str, Slot] = {}
    for name, layer in manager.modules.items():
        stacked = cast(Any, layer)
        for place, part in enumerate(manager.packed_modules.get(name, [name])):
            if is_target(part, config.targets):
                found[part] = Slot(stacked.lora_a_stacked[place][0, 0], stacked.lora_b_stacked[place][0, 0])
    return found


class AdapterUpdate:
    """One update of a worker's adapter."""

    followed = None
    _ids = count(_FIRST)

    def __init__(self, manager: LoRAModelManager, config: LoraConfig, plan: WeightPlan) -> None:
        """Compare a plan with the live layers; nothing is written. Raises SyncMismatch: it is not what they need."""
        check_layout(plan)
        self._manager, self._config, self._plan = manager, config, plan
        self._slots = slots_of(manager, config)
        _check(plan, self._slots, config)
        self.written = False  # True if the previous adapter is gone

    def receive(self, opened: AbstractContextManager[Receiver]) -> Report:
        """Receive the adapter, put it into the slot and compare; raises as `EngineProtocol.receive_update`."""
        began, planned, arrived = time.perf_counter(), tensors_of(self._plan), dict[str, torch.Tensor]()
        with opened as receiver, torch.no_grad():
            for bucket in self._plan.buckets:
                arena = receiver.arena(bucket)
                arrived |= {name: tensor.clone() for name, tensor in views(planned[bucket.number], arena)}
                receiver.release(bucket)
            got = time.perf_counter()
            digests, held = named_digests(arrived), named_digests(self._scaled(arrived))
            hashed = time.perf_counter()
            self.written = True
            rank, alpha = self._config.rank, cast(int, self._config.alpha)
            loras = {
                module: LoRALayerWeights(
                    module, rank, alpha, arrived[factor_name(module, "A")], arrived[factor_name(module, "B")].clone()
                )
                for module in sorted({module_of(name) for name in arrived})
            }
            adapter = LoRAModel(next(self._ids), rank, loras)
            for old in list(self._manager.list_adapters()):
                self._manager.remove_adapter(old)
            self._manager.add_adapter(adapter)
            self._manager.activate_adapter(adapter.id)
            loaded = time.perf_counter()
            self._check_landed(held)
        digest = hashed - got + time.perf_counter() - loaded
        seconds = {"wait": got - began, "load": loaded - hashed, "digest": digest, "finish": 0.0}
        return Report(digests, len(held), self._plan.nbytes, seconds, held, {})

    def _scaled(self, arrived: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Contents that the slot must have: the factors, B multiplied by alpha / rank, in the engine's type."""
        scale = self._config.alpha / self._config.rank
        factors = {name: one * scale if name.endswith(".lora_B.weight") else one for name, one in arrived.items()}
        return {name: one.to(self._slots[module_of(name)].of(name).dtype) for name, one in factors.items()}

    def _check_landed(self, held: Mapping[str, str]) -> None:
        for name, landed in landed_digests(self._manager, self._config, held).items():
            if landed != held[name]:
                fact = f"tensor {name} was loaded otherwise than it arrived: digest {held[name]} is to be served"
                raise SyncMismatch(f"{fact}, and {landed} is in the slot of the adapter. Sync the weights again")


def landed_digests(
    manager: LoRAModelManager, config: LoraConfig, names: Sequence[str] | Mapping[str, object]
) -> dict[str, str]:
    """Digests of the factors that the slot holds now, by peft's names."""
    slots, rank = slots_of(manager, config), config.rank
    found: dict[str, str] = {}
    for name in names:
        place, axis = slots[module_of(name)].of(name), int(name.endswith(".lora_B.weight"))
        cut, rest = place.tensor_split([rank], dim=axis)
        found[name] = "other rows are not zero" if rest.any() else tensor_digest(cut.contiguous())
    return found


def _check(plan: WeightPlan, slots: Mapping[str, Slot], config: LoraConfig) -> None:
    """Refuse a plan that does not fill the slots."""
    planned = {tensor.name: tensor.shape for tensor in plan.tensors}
    wanted: dict[str, tuple[int, ...]] = {}
    for module, slot in slots.items():
        wanted[factor_name(module, "A")] = (config.rank, slot.a.shape[1])
        wanted[factor_name(module, "B")] = (slot.b.shape[0], config.rank)
    for name in sorted(planned.keys() | wanted.keys()):
        if planned.get(name) != wanted.get(name):
            fact = f"the update of the adapter sends {name} with the shape {planned.get(name)}, and the engine needs"
            repair = "(None: not at all): trainer and engine must have the same [train.lora]"
            raise SyncMismatch(f"{fact} {wanted.get(name)} {repair}")
