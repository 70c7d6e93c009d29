"""Does random operations on a run, killed and not killed, and checks after each what must always hold.

    python -m infra.fuzz [--operations N] [--seed S] [--runs R] [--ahead K] [--most-prompts M]
        [--max-staleness B]

Each operation is done in two roots: in one undisturbed, in the other with kills at random points, other runtime
settings after each, with objects that age by days, with cleaning in between, and with records that are lost, copied,
moved or damaged and then restored. The operations are driving, doing stages again, choosing, retention, cleaning,
archives, retraining with new scores, imports and evaluations on request; over the small workers of `tests/small`. After
each: both roots are sound, each revision is one chain, and both have the same results. While a record is harmed: the
head is the same or is refused, `verify` names the harm, and the other runs are listed and cleaned. The exit code is the
number of findings, at most 100.
"""

import argparse
import itertools
import json
import logging
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import cast

from flows.driving import rerun
from infra.fuzz_harm import digests, draw, restore, state, unnoticed
from storage import kill_points
from storage.backends.root import Root, open_root
from storage.errors import InputError, PartMissing, RatchetError
from storage.manifest import Part
from storage.ownership.lease import hold, unlock
from storage.ownership.process import this_process
from storage.parts import read_parts
from storage.revisions import read_revisions
from storage.schema import ROLLOUT
from storage.upkeep.archive import compact_new
from storage.upkeep.beside import collect_beside
from storage.upkeep.catalog import contents, names, runs
from storage.upkeep.redoing import Wanted, choose
from storage.upkeep.retention import collect
from storage.upkeep.verify import verify
from tasks.config.evaluation import EvaluationSettings
from tasks.config.run import RunConfig
from tasks.forking import begin_retraining, retrain_config
from tasks.importing.rows import ImportOrder
from tasks.importing.samples import import_samples
from tasks.stages.evaluation import evaluation
from tasks.stages.names import WORKFLOW, Stage
from tasks.stages.views import IN_FLIGHT
from tests.small.config import small_config
from tests.small.driving import RUN, Killed, driver, is_renewal
from tests.small.here import context_here
from tests.storage.runs import age

logger = logging.getLogger("fuzz")
_NEVER = 10**9
_CHANGES = {
    "rollout.increments.tokens": (1, 2, 256),
    "engine.count": (1, 2, 3),
    "engine.max_num_seqs": (1, 4, 512),
    "sync.in_flight": ("abort", "wait", "keep"),
}
_REDONE = (Stage.ROLLOUT, Stage.REWARD, Stage.TRAIN, Stage.WEIGHT_SYNC, Stage.EVALUATE)


@dataclass(frozen=True)
class Operation:
    """One operation; the same in both roots."""

    name: str
    number: int
    """Number in the plan."""
    iterations: int
    """Last iteration of the run."""
    at: int = 0
    """An iteration, or the number of a revision."""
    stage: Stage = Stage.ROLLOUT
    cascade: bool = True
    new_seeds: bool = False
    keep: int | None = None
    save_every: int = 1


def plan(chance: random.Random, count: int) -> Iterator[Operation]:
    """A first run of two iterations, then random operations."""
    iterations = 2
    yield Operation("drive", 0, iterations)
    for number in range(1, count):
        kind = chance.choices(
            ["drive", "rerun", "choose", "clean", "rescore", "import", "evaluate"], [25, 30, 18, 10, 5, 4, 8]
        )[0]
        iterations += kind == "drive" and chance.random() < 0.5
        yield Operation(
            name=kind,
            number=number,
            iterations=iterations,
            at=chance.randint(0 if kind == "choose" else 1, iterations),
            stage=chance.choice(_REDONE),
            cascade=chance.random() < 0.7,
            new_seeds=chance.random() < 0.5,
            keep=chance.choice((None, None, 1, 2)) if kind == "drive" else None,
            save_every=chance.choice((1, 1, 2, 3)),
        )


@dataclass
class Side:
    """A root, and the disturbance of work in it."""

    root: Root
    scratch: Path
    kills: random.Random | None = None
    """None: undisturbed."""
    ahead: int = 0
    """`rollout.ahead` of the run."""
    most: int = 0
    """`rollout.most_prompts` of the run, if it is not 0."""
    bound: int = 0
    """`rollout.max_staleness` of the run, with updates in flight, if it is not 0."""
    killed: int = 0
    left: int = _NEVER

    def do(self, operation: Operation) -> str:
        """Complete an operation despite any number of kills; returns its outcome, in words."""
        work: dict[str, Callable[[Operation], object]] = {
            "drive": self._drive, "rerun": self._rerun, "choose": self._choose, "clean": lambda _: self.clean(),
            "rescore": self._rescore, "import": self._import, "evaluate": self._evaluate,
        }  # fmt: skip
        try:
            with kill_points.observed(lambda *_: self._reached()):
                self._insist(lambda: work[operation.name](operation))
        except (InputError, PartMissing) as refused:  # the state that it needs is not kept
            return f"refused: {refused}"
        except RatchetError as error:
            return f"{type(error).__name__}: {error}"
        return "done"

    def clean(self) -> None:
        """Clean as `ratchet gc --apply`, and `ratchet maintain` beside a driver, do; and archive."""
        for run in runs(self.root):
            with hold(self.root, run, "gc") as lease:
                collect(self.root, WORKFLOW, run, apply=True, fence=lease)
            collect_beside(self.root, WORKFLOW, run, now=datetime.now(UTC))
        compact_new(self.root, WORKFLOW, RUN)

    def _insist(self, work: Callable[[], object]) -> None:
        while True:
            self.left = self._next_kill()
            try:
                work()
            except Killed:
                self.killed += 1
                self.left = _NEVER
                for run in self.root.folders():  # the process that held it is this one, and lives
                    unlock(self.root, run, this_process("fuzz"), force=True)
                self._go_by()
            else:
                return

    def _next_kill(self) -> int:
        return self.kills.randint(1, 40) if self.kills and self.kills.random() < 0.6 else _NEVER

    def _reached(self) -> None:
        self.left -= not is_renewal()
        if self.left <= 0:
            raise Killed

    def _go_by(self) -> None:
        """Let days pass, perhaps, and clean up, perhaps."""
        assert self.kills is not None
        if self.kills.random() < 0.5:
            for key in self.root.keys(""):
                age(self.root, key)
        if self.kills.random() < 0.5:
            self.clean()

    def _config(self, operation: Operation) -> RunConfig:
        keep = [f"storage.keep_newest={operation.keep}"] if operation.keep else []
        useful = ("rollout.prompts=3", f"rollout.most_prompts={self.most}", "train.policy.leave_out_equal_groups=true")
        more = [f"rollout.ahead={self.ahead}", f"storage.save_every={operation.save_every}", *keep]
        more += [f"{name}={self.kills.choice(values)}" for name, values in _CHANGES.items()] if self.kills else []
        given = [*more, *(useful if self.most else ()), *(in_flight(self.bound) if self.bound else ())]
        return small_config([f"run.iterations={operation.iterations}", "evaluate.every=2", *given])

    def _drive(self, operation: Operation) -> None:
        driver(self.root, self._config(operation), self.scratch).drive()

    def _rerun(self, operation: Operation) -> None:
        new_seeds = operation.new_seeds and operation.stage is Stage.ROLLOUT
        identity = f"{operation}"  # after a kill the same request is made again
        wanted = Wanted(
            operation.at, operation.stage, "fuzz", "fuzz", operation.cascade, new_seeds, {}, identity, self.ahead
        )
        rerun(self.root, RUN, wanted)
        self._drive(operation)

    def _choose(self, operation: Operation) -> None:
        with hold(self.root, RUN, "fuzz") as lease:
            choose(self.root, WORKFLOW, RUN, operation.at, "fuzz", "fuzz", lease)
        self._drive(operation)

    def _rescore(self, operation: Operation) -> None:
        run = f"rescored-{operation.number}"
        given = {"start": f"{RUN}@1", "select": [RUN], "samples": 8, "rescore": True}
        config = retrain_config(self.root, run, given, None, ("reward.function=exact_match",))
        begin_retraining(self.root, run, config)
        driver(self.root, config, self.scratch, run=run).drive()

    def _import(self, operation: Operation) -> None:
        row = {"prompt_tokens": [3, operation.at], "response_tokens": [5, 6], "reward": 1, "logprobs": [-1.0, -0.5]}
        file = self.scratch.parents[1] / "samples.jsonl"  # of both roots: its path is recorded
        file.write_text(f"{json.dumps(row)}\n" * 4)
        import_samples(self.root, ImportOrder((str(file),), f"imported-{operation.number}", {}, 1.0))

    def _evaluate(self, operation: Operation) -> None:
        revisions = read_revisions(self.root, RUN)
        with context_here(self.root, self._config(operation), self.scratch, RUN, revisions=revisions) as context:
            evaluation(context, operation.at, EvaluationSettings(samples=1, prompts_per_part=1))


@dataclass
class Fuzz:
    """The operations of one seed."""

    seed: int
    folder: Path
    ahead: int = 0
    most: int = 0
    bound: int = 0
    findings: list[str] = field(default_factory=list)
    done: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.chance = random.Random(self.seed)
        kills = random.Random(self.seed + 1)
        self.calm, self.wild = (
            Side(open_root(str(folder / "runs")), folder / "scratch", chance, self.ahead, self.most, self.bound)
            for folder, chance in ((self.folder / "calm", None), (self.folder / "wild", kills))
        )

    def run(self, count: int) -> None:
        """Do that many operations, or those before the roots differ."""
        for number, operation in enumerate(plan(self.chance, count), 1):
            one, other = self.calm.do(operation), self.wild.do(operation)
            self.done[f"{operation.name} {one.partition(':')[0]}"] += 1
            ends = [text.partition(":")[0] for text in (one, other)]
            if ends[0] != ends[1] or ends[0] not in ("done", "refused"):
                self._found(f"{operation}: {one} | {other}")
            self._look(operation)
            if _results(self.calm.root) != _results(self.wild.root):
                self._found(f"{operation}: the roots differ in {_differing(self.calm.root, self.wild.root)}")
                return
            for _ in range(self.chance.randint(0, 2)):
                self._harm(f"after {number} operations")

    def _found(self, text: str) -> None:
        self.findings.append(text)
        logger.info("seed %d: %s", self.seed, text)

    def _look(self, operation: Operation) -> None:
        for side in (self.calm, self.wild):
            for run in runs(side.root):
                bad = [one for one in verify(side.root, run).findings if not one.is_harmless]
                if bad:
                    self._found(f"{operation}: {run} is not sound: {bad[:2]}")
            for wrong in drawn_wrongly(side.root):
                self._found(f"{operation}: {wrong}")
            for broken in _broken_chains(side.root):
                self._found(f"{operation}: {broken} was made from what its revision does not have")

    def _harm(self, when: str) -> None:
        """Harm one record, look, and restore it."""
        root = self.wild.root
        before = {run: state(root, run) for run in runs(root)}
        kept = {key: root.read_bytes(key) for key in root.keys("") if "/parts/" not in key}
        what, harm = draw(self.chance, root, sorted(kept))
        harm()
        self.done[f"harm {what.partition(' ')[0]}"] += 1
        for text in unnoticed(root, before, kept):
            self._found(f"{when}: {what}: {text}")
        try:
            if ".pieces/" not in what:  # the part of a piece without its record may go
                self.wild.clean()
        except RatchetError:
            self.done["refused while harmed"] += 1
        restore(root, kept)
        for run, was in before.items():
            if state(root, run) != was:
                self._found(f"{when}: {what}: run {run} is another once the record is restored")


def _results(root: Root) -> dict[str, dict[tuple[int, str], str]]:
    return {run: digests(root, run) for run in runs(root)}


def _differing(one: Root, other: Root) -> list[tuple[str, tuple[int, str]]]:
    here, there = _results(one), _results(other)
    return [
        (run, place)
        for run in sorted({*here, *there})
        for place in sorted({*here.get(run, {}), *there.get(run, {})})
        if here.get(run, {}).get(place) != there.get(run, {}).get(place)
    ][:4]


def in_flight(bound: int) -> tuple[str, ...]:
    """Settings with which responses of the small engine are older than that bound now and then."""
    return (
        'rollout.updates="in-flight"', "rollout.pause_tokens=2", "rollout.prompts=3", "rollout.open_prompts=9",
        f"rollout.max_staleness={bound}",
    )  # fmt: skip


def draws(root: Root, run: str = RUN) -> list[tuple[int, int]]:
    """Draws of the head as (position, again): those that a rollout has, or has left out as too old, in the order of
    rollouts; and those that the newest one has left in flight."""
    newest = contents(root, run).newest
    head = sorted((one for one in newest if one.stage == Stage.ROLLOUT), key=lambda one: one.iteration)
    found: list[tuple[int, int]] = []
    for one in head:
        found += _places(root, [part for part in one.parts if part.rows is not None])
        found += [(position, again) for position, again in cast(list[list[int]], one.facts.get("left_out", []))]
    return found + _places(root, [part for part in head[-1].parts if part.name == IN_FLIGHT])


def _places(root: Root, parts: Sequence[Part]) -> list[tuple[int, int]]:
    table = read_parts(root, parts, ROLLOUT, ["position", "again"])
    rows = zip(table["position"].to_pylist(), table["again"].to_pylist(), strict=True)
    return [place for place, _ in itertools.groupby(rows)]


def drawn_wrongly(root: Root, run: str = RUN) -> Iterator[str]:
    """Draws of prompts that the head skips or repeats."""
    found = draws(root, run)
    last = dict(sorted(found))  # how often each position was drawn again
    wanted = [(position, again) for position in range(len(last)) for again in range(last.get(position, 0) + 1)]
    if sorted(found) != wanted:
        yield f"the head draws {found}"


def _broken_chains(root: Root) -> Iterator[str]:
    recorded = names(root, RUN)
    every = contents(root, RUN, recorded)
    for number in recorded.revisions.numbers:
        seen = recorded.revisions.seen(number)
        newest = [one for one in every.manifests.values() if one.revision == seen.of(one.iteration, one.stage)]
        there = {one.digest for one in newest}
        for one in newest:  # an evaluation on request stays that of the weights that were there
            if one.stage in [*Stage] and not set(one.inputs.values()) <= there:
                yield f"{one.key} in revision {number}"


def fuzz(seed: int, operations: int, ahead: int = 0, most: int = 0, bound: int = 0) -> Fuzz:
    """Do operations in a temporary folder that is removed."""
    with tempfile.TemporaryDirectory(prefix="ratchet-fuzz-") as folder:
        made = Fuzz(seed, Path(folder), ahead, most, bound)
        for side in (made.calm, made.wild):
            side.scratch.mkdir(parents=True)
        made.run(operations)
    return made


def main() -> int:
    """Fuzz and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--operations", type=int, default=100, help="of each seed")
    parser.add_argument("--seed", type=int, default=0, help="the first one")
    parser.add_argument("--runs", type=int, default=1, help="how many seeds")
    parser.add_argument("--ahead", type=int, default=0, help="rollout.ahead of the run")
    parser.add_argument("--most-prompts", type=int, default=0, help="rollout.most_prompts of the run; 0 for none")
    parser.add_argument(
        "--max-staleness",
        type=int,
        default=0,
        help="rollout.max_staleness of the run, with updates in flight; 0: between",
    )
    given = parser.parse_args()
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    logger.setLevel(logging.INFO)
    found = 0
    for seed in range(given.seed, given.seed + given.runs):
        clock = time.process_time()
        made = fuzz(seed, given.operations, given.ahead, given.most_prompts, given.max_staleness)
        found += len(made.findings)
        logger.info(
            "seed %d: %d operations, %d kills, %d findings, %.0f s of processor time; %s",
            seed, given.operations, made.wild.killed, len(made.findings), time.process_time() - clock, dict(made.done),
        )  # fmt: skip
    return min(found, 100)


if __name__ == "__main__":
    sys.exit(main())
