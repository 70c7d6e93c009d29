"""Memory that each switch of `train.memory` frees, its seconds, and a comparison of the updates after it."""

import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import BaseModel

from infra.bench.cases import CASES, Case, CaseName, draw_samples
from storage.ownership.scratch import scratch
from tasks.data.generated import generate_model
from trainer_core.config import Device, MegatronConfig, MemoryConfig, OptimizerConfig, RankSpec, TrainerConfig
from trainer_core.state.facts import StateIdentity

if TYPE_CHECKING:
    from trainer_core.trainer import Trainer

_SAMPLES, _PROMPT, _RESPONSE = 16, 16, 48
_ALL = MemoryConfig(offload_parameters=True, drop_gradients=True, offload_optimizer=True)
_GIB = 2**30


class Switch(BaseModel):
    """One switch."""

    gib: float
    """Memory that it frees: as the device reports it, or on CPU as the trainer counts it."""
    first_s: float
    """Seconds of the first offload, which reserves memory on the host."""
    out_s: float
    """Seconds of each further offload."""
    back_s: float
    """Seconds of the reload."""


class MemoryBench(BaseModel):
    """Measurements on one rank."""

    device: str
    """Name of the device."""
    case: CaseName
    """The model."""
    offload_parameters: Switch
    drop_gradients: Switch
    offload_optimizer: Switch
    rest_gib: float
    """Memory of the device that is still in use with all three switches on: context and other processes; on CPU 0."""
    repeatable: bool
    """True if the device computes the same bits twice."""
    same_updates: bool
    """True if the metrics of the updates behind each switch, and the state after them, are those of a trainer that kept
    everything; meaningless on a device that does not compute the same bits twice."""


@dataclass(frozen=True)
class _Life:
    """Results of a trainer that takes an update, another one behind each switch, and one behind all of them."""

    updates: list[dict[str, float]]
    state: StateIdentity


def bench_memory(case_name: CaseName | None) -> MemoryBench:
    """Let one trainer live three times: with the switches between its updates, and twice without.

    Without a case it is the one that fits the device: "tiny" without a GPU, "0.75b" with one.
    """
    import torch

    device: Device = "cuda" if torch.cuda.is_available() else "cpu"
    name: CaseName = case_name or ("tiny" if device == "cpu" else "0.75b")
    case = CASES[name].model_copy(update={"samples": _SAMPLES, "prompt": _PROMPT, "response": _RESPONSE})
    with tempfile.TemporaryDirectory() as folder, scratch(memory=True) as states:
        generate_model(Path(folder), case.model, seed=0)
        trainer = _trainer(folder, case, device)
        measured = _Measured(trainer, torch.cuda.mem_get_info if device == "cuda" else None)
        try:
            with_switches = _lived(trainer, case, states, measured.between)
            plain, again = (_lived(trainer, case, states, None) for _ in range(2))
        finally:
            trainer.close()
    return MemoryBench(
        device=torch.cuda.get_device_name() if device == "cuda" else "cpu",
        case=name,
        **measured.switches,
        rest_gib=measured.rest_gib,
        repeatable=plain == again,
        same_updates=with_switches == plain,
    )


def _trainer(folder: str, case: Case, device: Device) -> "Trainer":
    from trainer_core.start import start_trainer

    config = TrainerConfig(
        optimizer=OptimizerConfig(learning_rate=1e-4),
        megatron=MegatronConfig(attention="unfused" if device == "cuda" else "auto"),  # it gives the same bits again
        precision=case.precision,
        max_length=case.length,
    )
    return start_trainer(folder, config, RankSpec(rank=0, world_size=1, store=f"{folder}/store", device=device))


def _lived(trainer: "Trainer", case: Case, folder: Path, between: Callable[[str | None], None] | None) -> _Life:
    trainer.import_model()
    updates = [trainer.train_policy(draw_samples(case, mixed=True), 1.0)]
    for number, switch in enumerate((*MemoryConfig.model_fields, None), 1):
        if between is not None:
            between(switch)
        updates.append(trainer.train_policy(draw_samples(case, mixed=True, seed=number), 1.0))
    return _Life(updates, trainer.save(folder).identity)


class _Measured:
    """Figures of the switches, gathered between the updates of a trainer."""

    def __init__(self, trainer: "Trainer", device: Callable[[], tuple[int, int]] | None) -> None:
        self._trainer, self._device = trainer, device
        self.switches: dict[str, Switch] = {}
        self.rest_gib = 0.0

    def between(self, switch: str | None) -> None:
        """Measure a switch, or without one the rest; then free its memory, before the next update."""
        if switch is None:
            self._trainer.release(_ALL)
            self.rest_gib = self._used() / _GIB
            return
        memory = MemoryConfig.model_validate({switch: True})
        self._trainer.release(MemoryConfig())  # the reserve of torch's allocator is not the switch's
        before = self._used()
        counted, first_s = _timed(lambda: self._trainer.release(memory))
        given_up = before - self._used() if self._device else counted
        self._trainer.resume()
        _, out_s = _timed(lambda: self._trainer.release(memory))
        _, back_s = _timed(self._trainer.resume)
        self.switches[switch] = Switch(gib=given_up / _GIB, first_s=first_s, out_s=out_s, back_s=back_s)
        self._trainer.release(memory)

    def _used(self) -> int:
        if self._device is None:
            return 0
        free, total = self._device()
        return total - free


def _timed[R](work: Callable[[], R]) -> tuple[R, float]:
    clock = time.perf_counter()
    result = work()
    return result, time.perf_counter() - clock
