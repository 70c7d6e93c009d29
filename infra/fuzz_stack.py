"""Kills processes of a run of the real stack at random moments, and compares it with a run that nothing interrupts.

    python -m infra.fuzz_stack FILE --root FOLDER [--iterations N] [--kills K] [--seed S] [--within SECONDS]
        [--open SHARE] [--second SHARE] [--failures F] [--set SETTING ...]

Each kill is a SIGKILL of the driver, of Ray's node, of an engine, of a trainer rank or of a process that waits for the
place of one, whichever chance takes of those that live, a random time of at most `--within` seconds after a stage was
committed or, for a share of the kills, after an increment was stored. After a share of the kills that the driver
outlives, `--second`, another one comes within that time whatever is stored: while what died is replaced. The report is
that of `ratchet prove-resume`, which kills at named points, and before it a line for each kill, with the tokens that
increments of open responses had at the kill, those with which an engine went on, and those that it sampled again; and a
line with the counts below. The exit code is 0 only if both runs have the same bits, no draw of a prompt is skipped or
repeated, and no stored token is sampled again. FOLDER keeps both runs; with another seed the undisturbed one is used
again.
"""

import argparse
import itertools
import logging
import random
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np
import psutil

from flows.proof.faults import FLOW, NODE, FaultFolder
from flows.proof.prove import RUN, ProofOrder, judge, start
from flows.views.output import Output
from infra.fuzz import drawn_wrongly, draws
from infra.fuzz_asked import Asked, open_tokens, read_journal
from storage.backends.root import Root, open_root
from storage.errors import StageFailed
from storage.manifest import need
from storage.ownership.scratch import scratch
from storage.upkeep.catalog import names
from storage.upkeep.verify import verify
from tasks.config.document import load_config
from tasks.stages.names import Stage

logger = logging.getLogger("fuzz")
_LOOK_S = 0.2
_FIGURES = (
    "draws",
    "kills_with_open_increments",
    "open_tokens",
    "gone_on_with",
    "compared_samples",  # of stored pieces, sampled again to see whether the engine repeats itself
    "mixed_versions",
)
_ACTOR, _OF_ENGINES = "ray::Host", "VLLM_CPU_OMP_THREADS_BIND"  # title of a worker, and a variable of engines alone


@dataclass(frozen=True)
class Kill:
    """Kill, and what was stored of open responses at that moment."""

    place: str
    """Its time, the victim, and the newest point before it, in words."""
    tokens: dict[str, int]
    """By the key of the piece."""
    asked: int
    """Number of batches that engines were asked for before."""

    def told(self, journal: Sequence[Asked]) -> "Told":
        """Later fate of the tokens; a piece for which no engine was asked again was finished by one that lived."""
        after = {one.piece: one for one in reversed(journal[self.asked :])}
        again = [after[piece] for piece in self.tokens.keys() & after]
        lost = sum(max(0, self.tokens[one.piece] - one.stored) for one in again)
        return Told(
            tokens=sum(self.tokens.values()),
            went_on=sum(one.stored - one.again for one in again),
            again=sum(one.again for one in again) + lost,
        )


class Told(NamedTuple):
    """Tokens that were stored at a kill, or later before an engine was asked again; those with which it went on, and
    those that it sampled again."""

    tokens: int
    went_on: int
    again: int


@dataclass
class Disturbed:
    """A run that is killed again and again."""

    order: ProofOrder
    root: Root
    folder: FaultFolder
    within: float
    """Longest time from the commit of a stage, or from an increment, to a kill, seconds."""
    share: float
    """Share of the kills that wait for an increment."""
    second: float
    """Share of the kills after which another one waits for nothing."""
    failures: int
    """Starts that may fail without a kill, as Ray's do on a machine with too much to do."""
    kills: list[Kill] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._chance, self._clock = random.Random(self.order.seed), time.monotonic()
        self._journal = self.folder.path / "asked.jsonl"
        self._replacing = False  # True if the driver has outlived the last kill

    def journal(self) -> list[Asked]:
        """Batches that engines were asked for."""
        return list(read_journal(self._journal))

    def run(self) -> int:
        """Drive the run to its end despite all kills; returns how often it was started."""
        for starts in itertools.count(1):
            before = len(self.kills)
            program = ("infra.fuzz_asked", str(self._journal), self.root.url)
            process = start(self.order, self.root, self.folder, program)
            while len(self.kills) < self.order.kills and self._moment(process):
                self._kill(process.pid)
            if (code := process.wait()) == 0:
                return starts
            self.failures -= len(self.kills) == before
            if self.failures < 0:
                raise StageFailed(f"the run ended with exit code {code} and was not killed: see its own message above")
        raise AssertionError

    def _moment(self, process: subprocess.Popen[bytes]) -> bool:
        """Wait until one more stage is committed, or one more increment stored, or for neither, and for a random time;
        False if the process ends before."""
        kind = "increments" if self._chance.random() < self.share else "manifests"
        before, wait = self._stored(kind), self._chance.uniform(0, self.within)
        at_once = self._replacing and self._chance.random() < self.second
        while not at_once and process.poll() is None and self._stored(kind) <= before:
            time.sleep(_LOOK_S)
        try:
            process.wait(wait)
        except subprocess.TimeoutExpired:
            return True
        return False

    def _stored(self, kind: str) -> frozenset[str]:
        return frozenset(vars(names(self.root, RUN))[kind])

    def _kill(self, driver: int) -> None:
        victims = {FLOW: driver, **dict(workers(driver))}
        victim = self._chance.choice(sorted(victims))
        psutil.Process(victims[victim]).kill()
        self._replacing = victim != FLOW
        self.folder.note(victim)
        place = f"{time.monotonic() - self._clock:.1f} s, after {self.folder.delivered()[-1]}"
        self.kills.append(Kill(place, open_tokens(self.root, RUN), len(self.journal())))
        logger.info("kill %d: %s", len(self.kills), self.kills[-1].place)


def workers(driver: int) -> Iterator[tuple[str, int]]:
    """Process ids of the engines and ranks that live or wait below a driver, by kind and number, and of Ray's node."""
    count = {"engine": itertools.count(), "trainer": itertools.count()}
    for one in psutil.Process(driver).children(recursive=True):
        try:
            if one.name() == "raylet":
                yield NODE, one.pid
            elif one.cmdline()[:1] and one.cmdline()[0].startswith(_ACTOR):
                kind = "engine" if _OF_ENGINES in one.environ() else "trainer"
                yield f"{kind}-{next(count[kind])}", one.pid
        except psutil.Error:  # it has just ended
            continue


def counts(whole: Root, run: Disturbed) -> dict[str, float]:
    """Counts of what must not be there, and the share of responses that several versions of the weights sampled."""
    root, iterations, journal = run.root, run.order.config.run.iterations, run.journal()
    told = [one.told(journal) for one in run.kills]
    for number, (kill, one) in enumerate(zip(run.kills, told, strict=True), 1):
        logger.info("kill %d: %s: %d tokens of %d pieces open; an engine went on with %d, and sampled %d again", number,
            kill.place, one.tokens, len(kill.tokens), one.went_on, one.again)  # fmt: skip
    rollouts = [need(root, RUN, number, Stage.ROLLOUT) for number in range(1, iterations + 1)]
    mixed = [one.metrics.get("mixed_versions") or 0.0 for one in rollouts]
    return {
        "draws": len(draws(root, RUN)),
        "draws_otherwise": float(draws(root, RUN) != draws(whole, RUN)),
        "draws_skipped_or_repeated": len(list(drawn_wrongly(root, RUN))),
        "kills_with_open_increments": sum(one.tokens > 0 for one in told),
        "open_tokens": sum(one.tokens for one in told),
        "gone_on_with": sum(one.went_on for one in told),
        "stored_tokens_sampled_again": sum(one.again for one in (*told, *journal)),
        "compared_samples": sum(one.metrics.get("sampled_again") or 0.0 for one in rollouts),
        "unsound": float(not verify(root, RUN).sound),
        "mixed_versions": float(np.mean(mixed)),
    }


def main() -> int:
    """Disturb a run and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", help="a configuration")
    parser.add_argument("--root", required=True, help="the folder of both runs")
    parser.add_argument("--iterations", type=int, default=8)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0, help="of moments and victims")
    parser.add_argument("--within", type=float, default=8.0, help="longest time from a commit to a kill, seconds")
    parser.add_argument("--open", type=float, default=0.0, help="share of kills that wait for an increment instead")
    parser.add_argument("--second", type=float, default=0.0, help="share of kills after which one comes at once")
    parser.add_argument("--failures", type=int, default=0, help="starts that may fail without a kill, as Ray's may")
    parser.add_argument("--set", action="append", default=[], dest="settings", help="section.key=value")
    given = parser.parse_args()
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    logger.setLevel(logging.INFO)
    config = load_config(given.file, [*given.settings, f"run.iterations={given.iterations}"])
    settings, place = tuple(given.settings), str(Path(given.root).absolute())
    order = ProofOrder(config, given.file, settings, place, given.kills, given.seed, regenerate=True)
    whole, root = (open_root(f"{place}/{name}") for name in ("whole", f"seed-{given.seed}"))
    with scratch() as folder, Output(json=False) as output:
        calm, faults = FaultFolder(folder / "none"), FaultFolder(folder / "faults")
        for one in (calm, faults):
            one.plan([])
        if code := start(order, whole, calm).wait():
            raise StageFailed(f"the undisturbed run ended with exit code {code}: see its own message above")
        run = Disturbed(order, root, faults, given.within, given.open, given.second, given.failures)
        starts = run.run()
        found = counts(whole, run)
        logger.info("%s", ", ".join(f"{name} {value:g}" for name, value in found.items()))
        wrong = [name for name in found if name not in _FIGURES and found[name]]
        return max(judge(order, whole, root, faults, starts, output), bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
