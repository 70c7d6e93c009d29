"""Engines' processes beyond an engine: those that wait for its model, and those that it has started."""

import re
from collections.abc import Iterator, Mapping
from typing import Any

import psutil
import ray

from tasks.config.environment import engine_environment
from tasks.engine.start import import_engine
from tasks.workers.actors import fresh_names, living, spawn
from trainer_core.config import Device


class Expected:
    """Processes that import what an engine needs while its model is not known yet."""

    def __init__(self) -> None:
        self._waiting: dict[str, Any] = {}  # by the engine's name

    def begin(self, run: str, device: Device, cards: Mapping[str, tuple[str, ...]]) -> None:
        """Start one for each engine that has none, without waiting. `cards` has those of each engine, by its name."""
        self._waiting = living(self._waiting)
        for name, own in cards.items():
            if name not in self._waiting:
                environment = engine_environment(device, own, local=True)
                (actor,) = spawn(fresh_names(f"{run}/{name}", 1), [environment], detached=False)
                actor.make.remote(import_engine, ())
                self._waiting[name] = actor

    def take(self, name: str) -> list[Any]:
        """Hand over the one of an engine; none if it has none that lives."""
        self._waiting = living(self._waiting)
        return [self._waiting.pop(name)] if name in self._waiting else []

    def end(self) -> None:
        """End them."""
        for actor in self._waiting.values():
            ray.kill(actor)
        self._waiting = {}


def inside(process: int, place: int, tensor: int) -> Iterator[tuple[str, int]]:
    """Process ids of what the engine at that place has started: its scheduler `core-PLACE`, if that is apart, and the
    workers of a `tensor` above 1, `worker-NUMBER`, counted over all engines.
    """
    try:
        titles = {one.pid: " ".join(one.cmdline()) for one in psutil.Process(process).children(recursive=True)}
    except psutil.Error:  # it has just ended
        return
    for started, title in titles.items():
        if "VLLM::EngineCore" in title:
            yield f"core-{place}", started
        elif found := re.search(r"VLLM::Worker_TP(\d+)", title):
            yield f"worker-{place * tensor + int(found[1])}", started
