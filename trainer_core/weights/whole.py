"""The weights that only the bridge's whole export converts, in which all ranks take part."""

import contextlib
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
import torch.distributed as dist
from megatron.bridge.models.conversion.model_bridge import WeightConversionTask
from megatron.bridge.models.conversion.utils import extract_sort_key
from megatron.core import parallel_state

from storage.errors import SyncMismatch
from trainer_core.model.mesh import Mesh
from trainer_core.model.model import Model
from trainer_core.platform.platform import quietly
from trainer_core.weights.digest import dtype_name
from trainer_core.weights.hollow import UNTRIED, Settings, absent, hollow, spec_of
from trainer_core.weights.seeding import Answers, Recorder
from trainer_core.weights.table import Named, Row, Seed, Spec, Table

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Exported:
    """One parameter or buffer of this rank that only the export converts."""

    task: WeightConversionTask[Any]
    """With a mapping of its own, which has not been used."""
    attribute: str
    """The tensor's name in the module that owns it."""
    spec: Spec
    """The live tensor as it was planned."""

    @classmethod
    def of(cls, task: WeightConversionTask[Any], attribute: str) -> "Exported":
        """As the tensor is now."""
        return cls(task, attribute, spec_of(cast(torch.Tensor, task.param_weight)))

    def changed(self) -> str | None:
        """Why the live tensor is not the one that was planned; None if it is."""
        live, name = getattr(self.task.megatron_module, self.attribute), self.task.global_param_name
        if live is not self.task.param_weight:
            return f"{name} was replaced by another tensor after the update was planned"
        if (now := spec_of(live)) != self.spec:
            return absent(name, live) or f"{name} is {now} now, but was planned as {self.spec}"
        return absent(name, live)


def rows_of(exported: Sequence[Exported], model: Model) -> list[Row]:
    """As the other ranks know them, with what the export will ask for."""
    tasks = [one.task for one in exported]
    divided = parallel_state.get_pipeline_model_parallel_world_size() > 1
    seeds = Recorder(Settings(model.config)).recorded(tasks) if divided else [()] * len(tasks)
    return [
        Row(name=task.global_param_name, expert=task.mapping.is_expert, tensors=(), seeds=told)
        for task, told in zip(tasks, seeds, strict=True)
    ]


class WholeExport:
    """What the ranks told of such weights, and the export of them with tasks and mappings that are new each time."""

    def __init__(self, model: Model, mesh: Mesh, tables: Sequence[Table]) -> None:
        """From the tables of all ranks."""
        self._model, self._mesh = model, mesh
        self._config = Settings(model.config).digest()
        group = cast(dist.ProcessGroup, parallel_state.get_pipeline_model_parallel_group())
        place = {table.place.rank: table for table in tables}
        stages = [
            {row.name: row for row in place[rank].rows if not row.tensors}
            for rank in dist.get_process_group_ranks(group)
        ]
        self._told: dict[str, list[tuple[Seed, ...] | None]] = {
            name: [stage[name].seeds if name in stage else None for stage in stages]
            for name in sorted({name for stage in stages for name in stage}, key=extract_sort_key)
        }
        untried = (row.name for table in tables for row in table.rows if not row.tensors and row.seeds is None)
        self._untried: str | None = next(untried, None)
        """What cannot be exported without data, or why, if this rank knows."""
        self._seeded = self._untried is None

    def changed(self) -> str | None:
        """Why the ranks can no longer convert as they have told each other; None if they can."""
        if self._told and Settings(self._model.config).digest() != self._config:
            return "the model's configuration changed after the update was planned"
        return None

    def outlines(self) -> list[Named]:
        """Names, types and shapes of what `exported` gives, in its order. Collective.

        Found by an export without data if that is possible on every rank, else by one with it. Then `exported` asks
        other stages for each weight too, which is slow and right.
        """
        found = self._outlines() if self._seeded else None
        self._seeded = self._all(found is not None)
        if found is None or not self._seeded:
            logger.warning(
                "weights are exported by megatron-bridge with collectives for each of them, which is slow: a mapping "
                "needs data or other ranks to tell what it makes (%s)",
                self._untried or "another rank says which",
            )
            return [_named(name, tensor) for name, tensor in self.exported()]
        return found

    def exported(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Weights by Hugging Face name, on every rank. Collective, to its end.

        Raises:
            SyncMismatch: at the end, if a weight of this rank was not as it had told the others.
        """
        answers = self._answers()
        with torch.no_grad(), quietly(), answers.given() if self._seeded else contextlib.nullcontext():
            yield from self._export(self._tasks())
        if answers.problem is not None:
            raise SyncMismatch(f"{answers.problem}; plan the update again")

    def _outlines(self) -> list[Named] | None:
        try:
            with torch.no_grad(), quietly(), self._answers().given_without_data():
                tasks = [replace(task, param_weight=_hollow(task.param_weight)) for task in self._tasks()]
                return [_named(name, tensor) for name, tensor in self._export(tasks)]
        except UNTRIED as error:
            self._untried = repr(error)
            return None

    def _answers(self) -> Answers:
        return Answers(self._told, Settings(self._model.config))

    def _tasks(self) -> list[WeightConversionTask[Any]]:
        """New ones: kept ones remember shapes, types and owners."""
        bridge: Any = self._model.bridge._model_bridge  # pyright: ignore[reportPrivateUsage]  # a new one each time
        bridge._cached_param_names = list(self._told)  # what it would gather
        tasks = bridge.build_conversion_tasks(self._model.bridge.hf_pretrained, list(self._model.chunks))
        return [task for task in tasks if task is not None]

    def _export(self, tasks: list[WeightConversionTask[Any]]) -> Iterator[tuple[str, torch.Tensor]]:
        bridge: Any = self._model.bridge
        chunks = list(self._model.chunks)
        # no rank has adapters: their parameters have no Hugging Face name, which ends the planning
        for name, tensor in bridge.export_hf_weights(
            chunks, cpu=False, show_progress=False, conversion_tasks=tasks, merge_adapter_weights=False
        ):
            yield name, tensor[: self._model.vocab_size] if name in self._model.vocabulary else tensor

    def _all(self, done: bool) -> bool:
        undone = torch.tensor([not done], dtype=torch.int32, device=self._mesh.device)
        if dist.get_world_size() > 1:
            dist.all_reduce(undone)
        return not int(undone.item())


def _hollow(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return None if tensor is None else hollow(tensor)


def _named(name: str, tensor: torch.Tensor) -> Named:
    return Named(name=name, dtype=dtype_name(tensor.dtype), shape=tuple(tensor.shape))
