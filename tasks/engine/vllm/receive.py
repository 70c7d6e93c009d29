"""Runs inside vLLM's worker: one weight update after another, as the engine's process asks for it.

vLLM imports this module because it holds the class named by `worker_extension_cls`; that import also registers the
weight-transfer backend `ratchet` with vLLM's factory.
"""

import dataclasses
import json
from collections.abc import Iterator
from typing import Any, cast

from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

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

BACKEND = "ratchet"


@dataclasses.dataclass
class RatchetInit(WeightTransferInitInfo):
    """Nothing is to be known before an update: each brings its own plan."""


@dataclasses.dataclass
class RatchetUpdate(WeightTransferUpdateInfo):
    """All of the update that was prepared."""


class RatchetTransfer(WeightTransferEngine[RatchetInit, RatchetUpdate]):
    """A worker's part in an update: prepared once, received once, forgotten."""

    init_info_cls = RatchetInit
    update_info_cls = RatchetUpdate
    supports_draft_weight_update = False
    report: Report  # of the last update

    def init_transfer_engine(self, init_info: RatchetInit) -> None:
        """Nothing is held between updates but what the last one reported."""
        self.forget()
        self.reports: dict[Form, Report] = {}  # of the last update of each form
        self._followed: int | None = None  # the layout of which loaders were seen to put every tensor in its place

    def forget(self) -> None:
        """Forget what was prepared."""
        self._survey: Survey | None = None
        self._prepared: tuple[Update | AdapterUpdate, WeightPlan, Channel, int] | None = None

    def survey(self) -> None:
        """Look at the live model; see `EngineProtocol.survey_model`."""
        self.forget()
        self._survey = Survey(self.model)
        if "base" not in self.reports:  # what is next is an adapter
            with without_adapters(self.model):
                self._survey.look()

    def prepare(self, plan: str, channel: str, number: int) -> str:
        """Compare a plan with the live model, and return its digest; see `EngineProtocol.prepare_update`. Plan and
        channel are JSON, `number` is that of this worker among the receivers."""
        survey = self._survey or Survey(self.model)
        self.forget()
        planned, way = WeightPlan.model_validate_json(plan), Channel.model_validate_json(channel)
        manager, config = manager_of(self.model), self._adapter_config
        if (planned.form == "whole") is not (manager is None):
            has = "adds adapters to frozen weights" if manager else "adds no adapters"
            raise SyncMismatch(f"the update brings weights of the form {planned.form!r}, but the engine {has}")
        if planned.form == "adapter" and manager is not None and config is not None:
            update = AdapterUpdate(manager, config, planned)
        else:
            with without_adapters(self.model):
                update = self._update(survey, planned)
        self._prepared = update, planned, way, number
        return text_digest(plan)

    def _update(self, survey: Survey, planned: WeightPlan) -> Update:
        followed = survey.in_place and survey.layout == self._followed
        lane = lane_of(survey, self.vllm_config, tensors_of(planned), followed)
        return Update(survey, self.vllm_config, planned, lane)

    @property
    def _adapter_config(self) -> LoraConfig | None:
        told: Any = self.vllm_config.additional_config
        return None if told.get(ADAPTER) is None else LoraConfig.model_validate(told[ADAPTER])

    @property
    def written(self) -> bool:
        """True if the prepared update has begun to change the model."""
        return self._prepared is not None and self._prepared[0].written

    def changed(self) -> dict[str, str]:
        """Tensors of which this worker holds something else now than after the last update, by name, with the digest of
        that. Seen only where kernels use parameters as they were loaded, or as FP8 numbers and scales.
        """
        changed: dict[str, str] = {}
        for form, report in self.reports.items():
            expected = report.parts | report.quantized
            held = self._held(form, report) if expected else {}
            changed |= {name: digest for name, digest in held.items() if digest != expected[name]}
        return changed

    def _held(self, form: Form, report: Report) -> dict[str, str]:
        manager, config = manager_of(self.model), self._adapter_config
        if form == "adapter" and manager is not None and config is not None:
            return landed_digests(manager, config, report.parts)
        with without_adapters(self.model):
            layers = named_layers(self.model)
            landing = landing_of(layers)
            return {} if landing is None else found(layers, landing, report.parts) | Fp8Layers(layers).held()

    def start_weight_update(self) -> None:
        """See vLLM."""
        if self._prepared is None:
            raise SyncMismatch("a weight update was received that was not prepared; sync the weights again")

    def receive_weights(self, update_info: RatchetUpdate) -> None:
        """Receive, load and verify everything; see `EngineProtocol.receive_update`."""
        if self._prepared is not None:
            update, plan, channel, number = self._prepared
            opened = receiving(channel, plan, number, self.device)
            if isinstance(update, AdapterUpdate):
                self.reports["adapter"] = self.report = update.receive(opened)
                return
            with without_adapters(self.model):
                self.report = update.receive(opened)
            self.reports, self._followed = {plan.form: self.report}, update.followed

    def finish_weight_update(self) -> None:
        """Forget the update; its report stays until the next."""
        self._prepared = None

    def shutdown(self) -> None:
        """Nothing is held open between updates."""

    @staticmethod
    def trainer_send_weights(iterator: Iterator[Any], trainer_args: dict[str, Any] | Any) -> None:
        """Not used: the trainer sends as trainer_core/weights/transports does."""
        raise NotImplementedError("trainer ranks send through trainer_core.weights.transports")


class WorkerExtension:
    """Mixed into vLLM's worker class; reached through `collective_rpc`.

    What is wrong with an update is returned, not raised: an error would lose its type on the way from another process.
    """

    weight_transfer_engine: RatchetTransfer
    rank: int

    def survey_model(self) -> None:
        with paused():
            self.weight_transfer_engine.survey()

    def prepare_update(self, plan: str, channel: str, first: int) -> dict[str, Any]:
        """See `RatchetTransfer.prepare`: the digest, or why the update is refused."""
        try:
            with paused():
                return {"digest": self.weight_transfer_engine.prepare(plan, channel, first + self.rank)}
        except RatchetError as refusal:
            return {"refused": str(refusal)}

    def receive_update(self) -> str:
        """Receive what was prepared: a dumped `Report`, or why it failed and whether the model was changed.

        As JSON: of anything else, vLLM's messages describe the type of every value.
        """
        worker, transfer = cast(Any, self), self.weight_transfer_engine
        try:
            with paused():
                worker.start_weight_update()
                worker.update_weights({})
        except RatchetError as refusal:
            return json.dumps({"refused": str(refusal), "written": transfer.written})
        worker.finish_weight_update()
        report = transfer.report
        told = {key: vars(report)[key] for key in ("digests", "landed", "bytes", "seconds", "quantized")}
        return json.dumps(told | {"written": True})

    def changed_tensors(self) -> dict[str, str]:
        return self.weight_transfer_engine.changed()

    def take_routes(self, counts: dict[str, int]) -> list[bytes]:
        """See `tasks.engine.vllm.routes`."""
        return cast(Any, self).model_runner.take_routes(counts)

    def forget_update(self) -> None:
        """Forget what was prepared."""
        self.weight_transfer_engine.forget()


def _register() -> None:
    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, RatchetTransfer)


_register()
