"""Comparing two runs bit for bit, in the order of work: manifests, tables, metrics and train states."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from reprlib import Repr
from typing import cast

import pyarrow as pa
from pydantic import BaseModel, computed_field

from flows.views.history import evaluation_due
from storage import layout
from storage.backends.root import Root
from storage.manifest import Manifest, find
from storage.ownership.scratch import scratch
from storage.parts import materialize, read_parts, read_table
from storage.schema import EVALUATION, REWARD, ROLLOUT, TRAINER
from storage.unfinished import read_piece
from tasks.stages.names import WORKFLOW, Stage
from tasks.stages.views import TRAINER_TABLE

_TABLES = {Stage.ROLLOUT: ROLLOUT, Stage.REWARD: REWARD, Stage.EVALUATE: EVALUATION}
_OF_ENGINES = (Stage.WEIGHT_SYNC, Stage.EVALUATE)
_OF_ONE_PROCESS = ("seconds", "per_second", "_s")  # name endings of metrics that measure the work and not its result
_OF_INTERRUPTIONS = ("sampled_again", "environment_failures", "base_bytes")
"""Name beginnings of metrics that count what interrupted the work: a call that was open at a kill is a failure, and an
engine in place of a killed one gets the frozen weights again."""
_SHORT = Repr(maxstring=300, maxlist=20, maxdict=20)


class Difference(BaseModel, frozen=True, extra="forbid"):
    iteration: int
    stage: Stage
    what: str  # name of the tensor, metric, column or fact, and both values

    def __str__(self) -> str:
        return f"{self.stage} of iteration {self.iteration}: {self.what}"


class Counts(BaseModel, frozen=True, extra="forbid"):
    manifests: int = 0  # committed stages, by the identity of their content
    states: int = 0  # train states, and their tensors of weights and of the optimizer
    weights: int = 0
    optimizer: int = 0
    rng: int = 0  # states of random generators in them
    rows: int = 0  # rows of the tables of rollouts, rewards and evaluations
    metrics: int = 0  # figures of the stages, without those that measure time

    @computed_field
    @property
    def tensors(self) -> int:
        return self.weights + self.optimizer


class Comparison(Counts, frozen=True, extra="forbid"):
    differences: tuple[Difference, ...] = ()


@dataclass(frozen=True)
class Pair:
    """The same run in two roots."""

    left: Root
    right: Root
    run: str
    engines: bool = True
    """Compare what engines computed after the rollouts, too: the probes of weight updates, and evaluations."""

    def compare(self, iterations: int, evaluated_every: int, plant: int | None = None) -> Comparison:
        """Compare the iterations from 0 to `iterations`. With `plant`, a seed, one bit is flipped in the right run's
        last state as it is read, so that there is something to find. Raises DigestMismatch if a stored file is
        damaged."""
        tally, differences = Counter[str](), list[Difference]()
        for iteration in range(iterations + 1):
            due = evaluation_due(iteration, iterations, evaluated_every)
            for stage in map(Stage, WORKFLOW.stages_of(iteration)):
                if stage != Stage.EVALUATE or due:
                    planted = plant if iteration == iterations else None
                    found = self._stage(iteration, stage, tally, planted)
                    differences += [Difference(iteration=iteration, stage=stage, what=what) for what in found]
        return Comparison(**tally, differences=tuple(differences))

    def _stage(self, iteration: int, stage: Stage, tally: Counter[str], plant: int | None) -> Iterator[str]:
        left, right = (find(root, self.run, iteration, stage) for root in (self.left, self.right))
        if stage == Stage.REWARD and left is None and right is None:  # a run that only distils
            return
        if left is None or right is None:
            yield "it is not committed in " + ("either run" if left is right else "one of the runs")
            return
        tally.update(manifests=1)
        yield from _facts(left, right)
        if stage in _OF_ENGINES and not self.engines:
            return
        if stage in _TABLES:
            yield from self._tables(left, right, tally)
        parts = [(self.left, part) for part in left.parts] + [(self.right, part) for part in right.parts]
        both = left.parts and right.parts  # a state that is made again has none
        if stage == Stage.TRAIN and both and all(root.exists(part.key) for root, part in parts):  # retention
            yield from self._states(left, right, tally, plant)
            if iteration:
                yield from self._by_token(left, right)
        yield from _metrics(left, right, tally)
        if left.digest != right.digest:
            yield f"the manifest's identity is {left.digest} against {right.digest}"

    def _tables(self, left: Manifest, right: Manifest, tally: Counter[str]) -> Iterator[str]:
        schema = _TABLES[Stage(left.stage)]
        ours, theirs = read_table(self.left, left, schema), read_table(self.right, right, schema)
        tally.update(rows=ours.num_rows)
        if ours.num_rows != theirs.num_rows:
            yield f"{ours.num_rows} rows against {theirs.num_rows}"
            return
        for name in schema.names:
            yield from column_difference(name, ours[name].combine_chunks(), theirs[name].combine_chunks())

    def _by_token(self, left: Manifest, right: Manifest) -> Iterator[str]:
        pairs = ((self.left, left), (self.right, right))
        ours, theirs = (read_parts(root, [one.part(TRAINER_TABLE)], TRAINER) for root, one in pairs)
        for name in TRAINER.names:
            yield from column_difference(
                f"{name} of the trainer", ours[name].combine_chunks(), theirs[name].combine_chunks()
            )

    def _states(self, left: Manifest, right: Manifest, tally: Counter[str], plant: int | None) -> Iterator[str]:
        from trainer_core.state.comparison import compare_states  # imports torch

        with scratch() as place:
            folders = [
                materialize(root, manifest, place / side, layout.STATE)
                for side, root, manifest in (("left", self.left, left), ("right", self.right, right))
            ]
            found = compare_states(*folders, plant=plant)
        tally.update(states=1, weights=found.weights, optimizer=found.optimizer, rng=found.rng)
        yield from found.differences


def lend_rollouts(source: Root, target: Root, run: str) -> None:
    """Give a run the rollout pieces of the other run, as if an earlier process of its own had generated them.

    They are used only if the run arrives at the same weights that generated them."""
    for key in filter(layout.is_piece, source.keys(layout.manifest_folder(run))):
        place = layout.place_of(key)
        if place is not None and place[1] == Stage.ROLLOUT:
            part = read_piece(source, key)
            target.put_if_absent(part.key, source.read_buffer(part.key))
            target.put_if_absent(key, source.read_bytes(key))


def column_difference(name: str, left: pa.Array, right: pa.Array) -> Iterator[str]:
    """The first difference, if there is one, between a column of both runs, which have as many rows."""
    if left.equals(right):
        return
    unequal = [row for row in range(len(left)) if not left.slice(row, 1).equals(right.slice(row, 1))]
    first = unequal[0]
    where, *both = _innermost(f"row {first}", left[first].as_py(), right[first].as_py())
    ours, theirs = map(_SHORT.repr, both)
    yield f"column {name}: {len(unequal)} of {len(left)} rows differ, first {where}: {ours} against {theirs}"


def _innermost(where: str, ours: object, theirs: object) -> tuple[str, object, object]:
    """The first two values that differ within values of a row, and where they are."""
    if isinstance(ours, list) and isinstance(theirs, list) and len(ours) == len(theirs):
        pairs = enumerate(zip(cast(list[object], ours), cast(list[object], theirs), strict=True))
        for place, (one, other) in pairs:
            if repr(one) != repr(other):
                return _innermost(f"{where}, element {place}", one, other)
    return where, ours, theirs


def _metrics(left: Manifest, right: Manifest, tally: Counter[str]) -> Iterator[str]:
    ours, theirs = ({name: value for name, value in one.metrics.items() if _of_result(name)} for one in (left, right))
    tally.update(metrics=len(ours))
    for name in sorted({*ours, *theirs}):
        if repr(ours.get(name)) != repr(theirs.get(name)):  # repr: a NaN equals a NaN
            yield f"metric {name}: {ours.get(name)!r} against {theirs.get(name)!r}"


def _of_result(name: str) -> bool:
    return not name.endswith(_OF_ONE_PROCESS) and not name.startswith(_OF_INTERRUPTIONS)


def _facts(left: Manifest, right: Manifest) -> Iterator[str]:
    for name in sorted({*left.facts, *right.facts}):
        if left.facts.get(name) != right.facts.get(name):
            yield f"{name}: {left.facts.get(name)!r} against {right.facts.get(name)!r}"
