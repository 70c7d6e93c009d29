"""The weights that only the bridge's whole export converts, in which all ranks take part, with new tasks and mappings.
It is slow, with collectives for each weight; no supported architecture needs it."""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from megatron.bridge.models.conversion.model_bridge import WeightConversionTask
from megatron.bridge.models.conversion.utils import extract_sort_key
from megatron.core import parallel_state

from trainer_core.model.model import Model
from trainer_core.platform.platform import quietly
from trainer_core.weights.mappings import Settings, absent
from trainer_core.weights.packing import dtype_name
from trainer_core.weights.plan import Named, Row, Table

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Held:
    row: Row  # the tensor as the other ranks know it
    module: torch.nn.Module  # module that owns the tensor
    attribute: str  # the tensor's name there
    tensor: torch.Tensor  # the live parameter or buffer

    def changed(self) -> str | None:
        """The reason why the live tensor is not the one that was planned; None if it is."""
        live = getattr(self.module, self.attribute)
        if live is not self.tensor:
            return f"{self.row.name} was replaced by another tensor after the update was planned"
        return absent(self.row.name, live)


@dataclass(frozen=True)
class Exported(Held):
    """One parameter or buffer of this rank that only the export converts; its row has only the name."""

    planned: Named  # its type and shape in the plan

    @classmethod
    def of(cls, task: WeightConversionTask[Any], attribute: str) -> "Exported":
        tensor, name = cast(torch.Tensor, task.param_weight), task.global_param_name
        row = Row(name=name, expert=task.mapping.is_expert, tensors=())
        return cls(row, cast(torch.nn.Module, task.megatron_module), attribute, tensor, named(name, tensor))

    def changed(self) -> str | None:
        was, now = self.planned, named(self.row.name, self.tensor)
        if (problem := super().changed()) is not None or now == was:
            return problem
        return f"{was.name} is {now.dtype} {list(now.shape)} now, but was planned as {was.dtype} {list(was.shape)}"


class WholeExport:
    """The export of such weights. Nothing of it is kept from one call to the next."""

    def __init__(self, model: Model, tables: Sequence[Table]) -> None:
        self._model = model
        self._config = Settings(model.config).digest()
        stages = set(dist.get_process_group_ranks(cast(Any, parallel_state.get_pipeline_model_parallel_group())))
        names = {row.name for t in tables if t.place.rank in stages for row in t.rows if not row.tensors}
        self._names = sorted(names, key=extract_sort_key)

    def changed(self) -> str | None:
        """The reason why the export would no longer give what was planned; None if it does."""
        if self._names and Settings(self._model.config).digest() != self._config:
            return "the model's configuration changed after the update was planned"
        return None

    def outlines(self) -> list[Named]:
        """Names, types and shapes of what `exported` gives, in its order, found by an export. Collective."""
        logger.warning(
            "megatron-bridge exports %d weights with collectives for each of them, which is slow: this version of "
            "Ratchet does not know their mappings (trainer_core/weights/mappings.py)",
            len(self._names),
        )
        return [named(name, tensor) for name, tensor in self.exported()]

    def exported(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Weights by Hugging Face name, on every rank. Collective, to its end."""
        chunks, bridge = list(self._model.chunks), cast(Any, self._model.bridge)
        with torch.no_grad(), quietly():
            converter = bridge._model_bridge  # a new one each time
            converter._cached_param_names = self._names  # it would gather those of all weights
            tasks = converter.build_conversion_tasks(bridge.hf_pretrained, chunks)
            # no rank has adapters: their parameters have no Hugging Face name, which ends the planning
            for name, tensor in bridge.export_hf_weights(
                chunks,
                cpu=False,
                show_progress=False,
                conversion_tasks=[task for task in tasks if task is not None],
                merge_adapter_weights=False,
            ):
                yield name, tensor[: self._model.vocab_size] if name in self._model.vocabulary else tensor


def named(name: str, tensor: torch.Tensor) -> Named:
    return Named(name=name, dtype=dtype_name(tensor.dtype), shape=tuple(tensor.shape))
