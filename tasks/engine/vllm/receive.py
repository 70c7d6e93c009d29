"""Runs inside vLLM's worker: one weight update after another, as the engine's process asks for it. vLLM imports this
module because it holds the class named by `worker_extension_cls`."""

import json
from functools import cached_property
from typing import Any, cast

import torch

from storage.errors import RatchetError, SyncMismatch
from tasks.engine.vllm import (
    ADAPTER,
    inside,  # noqa: F401 - prepares the process of a worker
)
from tasks.engine.vllm.adapters import AdapterUpdate, landed_digests, manager_of, without_adapters
from tasks.engine.vllm.landing import landing_of, named_layers
from tasks.engine.vllm.loading import lane_of
from tasks.engine.vllm.quantized import Fp8Layers
from tasks.engine.vllm.survey import Survey, found
from tasks.engine.vllm.update import Report, Update
from trainer_core.collector import paused
from trainer_core.lora import LoraConfig
from trainer_core.weights.channel import Channel
from trainer_core.weights.packing import tensors_of
from trainer_core.weights.plan import Form, WeightPlan, text_digest
from trainer_core.weights.transports.ends import receiving


class Updates:
    """A worker's part in updates: each is prepared once, received once, and forgotten."""

    def __init__(self, worker: Any) -> None:
        self._config, self._device, self._model = worker.vllm_config, worker.device, worker.get_model()
        self._reports: dict[Form, Report] = {}  # of the last update of each form
        self._followed: int | None = None  # the layout of which loaders were seen to put every tensor in its place
        self.forget()

    def forget(self) -> None:
        """Forget what was prepared."""
        self._survey: Survey | None = None
        self._prepared: tuple[Update | AdapterUpdate, WeightPlan, Channel, int] | None = None

    def survey(self) -> None:
        """Look at the live model; see `EngineProtocol.survey_model`."""
        self.forget()
        self._survey = Survey(self._model)
        if "base" not in self._reports:  # what is next is an adapter
            with without_adapters(self._model):
                self._survey.look()

    def prepare(self, plan: str, channel: str, number: int) -> str:
        """Compare a plan with the live model, and return its digest; see `EngineProtocol.prepare_update`. Plan and
        channel are JSON, `number` is that of this worker among the receivers."""
        survey = self._survey or Survey(self._model)
        self.forget()
        planned, way = WeightPlan.model_validate_json(plan), Channel.model_validate_json(channel)
        manager, config = manager_of(self._model), self._adapter_config
        if (planned.form == "whole") is not (manager is None):
            has = "adds adapters to frozen weights" if manager else "adds no adapters"
            raise SyncMismatch(f"the update brings weights of the form {planned.form!r}, but the engine {has}")
        if planned.form == "adapter" and manager is not None and config is not None:
            update = AdapterUpdate(manager, config, planned)
        else:
            with without_adapters(self._model):
                followed = survey.in_place and survey.layout == self._followed
                lane = lane_of(survey, self._config, tensors_of(planned), followed)
                update = Update(survey, self._config, planned, lane)
        self._prepared = update, planned, way, number
        return text_digest(plan)

    @property
    def _adapter_config(self) -> LoraConfig | None:
        told: Any = self._config.additional_config
        return None if told.get(ADAPTER) is None else LoraConfig.model_validate(told[ADAPTER])

    @property
    def written(self) -> bool:
        """True if the prepared update has begun to change the model."""
        return self._prepared is not None and self._prepared[0].written

    def changed(self) -> dict[str, str]:
        """Tensors of which this worker holds something else now than after the last update, by name, with the digest of
        that. Seen only where kernels use parameters as they were loaded, or as FP8 numbers and scales."""
        changed: dict[str, str] = {}
        for form, report in self._reports.items():
            expected = report.parts | report.quantized
            held = self._held(form, report) if expected else {}
            changed |= {name: digest for name, digest in held.items() if digest != expected[name]}
        return changed

    def _held(self, form: Form, report: Report) -> dict[str, str]:
        manager, config = manager_of(self._model), self._adapter_config
        if form == "adapter" and manager is not None and config is not None:
            return landed_digests(manager, config, report.parts)
        with without_adapters(self._model):
            layers = named_layers(self._model)
            landing = landing_of(layers)
            return {} if landing is None else found(layers, landing, report.parts) | Fp8Layers(layers).held()

    def receive(self) -> Report:
        """Receive, load and verify everything; see `EngineProtocol.receive_update`."""
        if self._prepared is None:
            raise SyncMismatch("a weight update was received that was not prepared; sync the weights again")
        update, plan, channel, number = self._prepared
        opened = receiving(channel, plan, number, self._device)
        if isinstance(update, AdapterUpdate):
            report = self._reports["adapter"] = update.receive(opened)
        else:
            with without_adapters(self._model):
                report = update.receive(opened)
            self._reports, self._followed = {plan.form: report}, update.followed
        torch.accelerator.synchronize()
        self._prepared = None
        return report


class WorkerExtension:
    """Mixed into vLLM's worker class; reached through `collective_rpc`. What is wrong with an update is returned, not
    raised: an error would lose its type on the way from another process."""

    rank: int

    @cached_property
    def weight_updates(self) -> Updates:
        """Those of this worker, which has loaded its model by then."""
        return Updates(self)

    def survey_model(self) -> None:
        with paused():
            self.weight_updates.survey()

    def prepare_update(self, plan: str, channel: str, first: int) -> dict[str, Any]:
        """See `Updates.prepare`: the digest, or why the update is refused."""
        try:
            with paused():
                return {"digest": self.weight_updates.prepare(plan, channel, first + self.rank)}
        except RatchetError as refusal:
            return {"refused": str(refusal)}

    def receive_update(self) -> str:
        """Receive what was prepared: a dumped `Report`, or why it failed and whether the model was changed. As JSON: of
        anything else, vLLM's messages describe the type of every value."""
        try:
            with paused():
                report = self.weight_updates.receive()
        except RatchetError as refusal:
            return json.dumps({"refused": str(refusal), "written": self.weight_updates.written})
        told = {key: vars(report)[key] for key in ("digests", "landed", "bytes", "seconds", "quantized")}
        return json.dumps(told | {"written": True})

    def changed_tensors(self) -> dict[str, str]:
        return self.weight_updates.changed()

    def take_routes(self, counts: dict[str, int]) -> list[bytes]:
        """See `tasks.engine.vllm.routes`."""
        return cast(Any, self).model_runner.take_routes(counts)

    def forget_update(self) -> None:
        """Forget what was prepared."""
        self.weight_updates.forget()
