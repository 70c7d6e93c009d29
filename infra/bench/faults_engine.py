"""An engine of the bench of failures: it notes when it has done what, and kills itself in the middle of rollouts."""

import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path

from infra.bench.faults_marks import Plan, note
from infra.bench.loop import ROOT
from storage import layout
from storage.backends.root import Root, open_root
from storage.kill_points import Point
from storage.unfinished import find_increments
from tasks.engine.protocol import Begun, EngineIdentity, EngineSpec, Every, Sampling, TokenIds
from tasks.engine.vllm.engine import Batch, Engine, imported
from trainer_core.user_code import UserFunction

_MORE = 3  # steps after an increment was stored: their tokens are lost


def order_kill(folder: Path, plan: Plan, point: Point, key: str) -> None:
    """Observer of the driver's points: once an increment of a planned iteration is stored, its engine may die."""
    place, piece = layout.place_of(key), layout.piece_of_increment(key)
    if point is not Point.MID_RESPONSE or place is None or piece is None or place[0] not in plan.at:
        return
    if not (order := folder / f"stored-{place[0]}").exists():
        order.write_text(piece)


def failing_engine(folder: Path, spec: EngineSpec, meeting_place: str | None, own: UserFunction | None) -> Engine:
    """`start_engine` of vLLM, with notes."""
    assert own is None
    note(folder, "process")
    imported()
    note(folder, "imported")
    engine = FailingEngine(folder, spec, meeting_place)
    note(folder, "built")
    return engine


class FailingEngine(Engine):
    """vLLM, with notes; it dies a few steps after the driver has stored an increment of a planned iteration."""

    def __init__(self, folder: Path, spec: EngineSpec, meeting_place: str | None) -> None:
        super().__init__(spec, meeting_place)
        self._folder, self._plan, self._root = folder, Plan.of(folder), open_root(str(folder / ROOT))
        self._more = _MORE

    def enqueue(
        self,
        number: int,
        prompts: Sequence[TokenIds],
        seeds: Sequence[int],
        sampling: Sampling,
        begun: Sequence[Begun] = (),
        every: Every | None = None,
        name: str = "",
    ) -> None:
        if name:
            note(self._folder, "begun", *stored_tokens(self._root, name, begun))
        super().enqueue(number, prompts, seeds, sampling, begun, every, name)

    def commit_update(self, version: int, weights_digest: str) -> EngineIdentity:
        served = super().commit_update(version, weights_digest)
        note(self._folder, "loaded")
        return served

    def _step(self, admit: bool = True) -> tuple[int, list[Batch]]:
        pieces = {batch.name for batch, _ in self._running.values() if batch.name} if admit else set[str]()
        if not pieces:  # nothing of a rollout, or what is dropped
            return super()._step(admit)
        time.sleep(self._plan.pause_s)
        done = super()._step(admit)
        note(self._folder, "token")
        self._die(pieces)
        return done

    def _die(self, pieces: set[str]) -> None:
        for order in self._folder.glob("stored-*"):
            claim = order.with_name(order.name.replace("stored", "killed"))
            if order.read_text() not in pieces or claim.exists():
                continue
            self._more -= 1
            if not self._more:
                claim.touch()
                note(self._folder, "killed")
                os.kill(os.getpid(), signal.SIGKILL)


def stored_tokens(root: Root, piece: str, begun: Sequence[Begun]) -> tuple[int, int]:
    """Tokens that are stored of the responses of a piece in progress, and those of them that are not `begun`."""
    ends: dict[int, int] = {}
    for record in find_increments(root, [piece])[0]:
        for row, first, length in zip(record.rows, record.firsts, record.lengths, strict=True):
            ends[row] = max(ends.get(row, 0), first + length)
    known = dict(enumerate(len(one.tokens) for one in begun))
    return sum(ends.values()), sum(max(0, end - known.get(row, 0)) for row, end in ends.items())
