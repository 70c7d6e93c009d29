"""An export as it is asked for: which weights, into which folder, in which form. Imports no torch."""

import hashlib
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, cast

import fsspec
import xxhash
from fsspec.implementations.local import LocalFileSystem
from pydantic import JsonValue, model_validator

from storage.backends.objects import url_errors
from storage.backends.root import Root, check_slashes
from storage.errors import InputError, StorageError, StorageUnavailable
from storage.manifest import Manifest
from storage.upkeep.catalog import Contents, contents, require_run
from tasks.config.credentials import has_credentials, shown_text
from tasks.config.environment import resolve, without_secrets
from tasks.config.evaluation import ASKED, EXACT, PASS, SCORED_BY
from tasks.config.section import Section
from tasks.stages.names import Stage
from trainer_core.config import Precision

BEST, PASSES = "best", "pass"
_METRICS = {PASSES: "pass_rate", "reward": "reward_mean"}

_LAST = "config.json"
_MARK = ".unfinished-export"  # present from the first write to the last

_WEIGHTS = re.compile(r"(adapter_)?model.*\.safetensors(\.index\.json)?")
_BLOCK = 1 << 20


@dataclass(frozen=True)
class Chosen:
    run: str
    iteration: int
    recorded: Contents
    why: str = ""  # measure and iterations by which it is the best; empty if it was not chosen as the best

    def manifest(self, stage: Stage, iteration: int | None = None) -> Manifest:
        """The manifest of a stage, by default of the chosen iteration. Raises InputError: there is none."""
        at = self.iteration if iteration is None else iteration
        if (found := self.find(stage, at)) is None:
            raise InputError(f"run {self.run!r} has no {stage} of iteration {at}: let it get that far first")
        return found

    def find(self, stage: Stage, iteration: int) -> Manifest | None:
        """The manifest of a stage in the run's head, if there is one."""
        return _by_iteration(self.recorded, stage).get(iteration)


def choose(root: Root, which: str) -> Chosen:
    """Resolve `RUN`, `RUN@ITERATION`, `RUN@best` or `RUN@best.MEASURE`. The best iteration has the highest value of
    those whose states are kept, and that the reward function of the newest evaluation has scored; of equal ones the
    first. MEASURE is `pass` (held-out pass rate, the default), `reward` (held-out mean reward) or the name of a
    component of the reward. Raises InputError: there is no such run or iteration, its state is not kept, or nothing was
    evaluated by the measure."""
    run, at, wanted = which.partition("@")
    require_run(root, run)
    recorded = contents(root, run)
    if not (kept := _kept(recorded)):
        fact = f"run {run!r} has no complete iteration yet"
        raise InputError(f"{fact}: let it finish iteration 0 first. Imported samples have no weights")
    if not at:
        return Chosen(run, kept[-1], recorded)
    best, _, measure = wanted.partition(".")
    if best == BEST:
        return _best(recorded, run, kept, measure or PASSES)
    if not (wanted.isascii() and wanted.isdigit()):
        raise InputError(f"{which!r} is not of the form RUN, RUN@ITERATION or RUN@{BEST}[.MEASURE]")
    if (iteration := int(wanted)) not in kept:
        complete = iteration in _by_iteration(recorded, _last_stage(recorded))
        fact = "is not kept (storage.save_every, storage.keep_newest)" if complete else "is not there"
        state = f"the state of iteration {iteration} of run {run!r}"
        raise InputError(f"{state} {fact}; those of {kept} are. Choose one of them as {run}@ITERATION")
    return Chosen(run, iteration, recorded)


def _kept(recorded: Contents) -> list[int]:
    """Complete iterations whose states are stored and kept, ascending."""
    synced, states = _by_iteration(recorded, _last_stage(recorded)), _by_iteration(recorded, Stage.TRAIN)
    return sorted(at for at, state in states.items() if state.parts and state.key in recorded.kept and at in synced)


def _last_stage(recorded: Contents) -> Stage:
    """Stage that completes an iteration: a run on stored samples serves no weights."""
    return Stage.TRAIN if _by_iteration(recorded, Stage.SELECT) else Stage.WEIGHT_SYNC


def _best(recorded: Contents, run: str, kept: list[int], measure: str) -> Chosen:
    found = _by_iteration(recorded, Stage.EVALUATE)
    if not (evaluated := {at: found[at] for at in kept if at in found}):
        fact = f"run {run!r} has no evaluation of an iteration whose state is kept ({kept})"
        raise InputError(f"{fact}: choose one as {run}@ITERATION")
    newest, metric = evaluated[max(evaluated)], _METRICS.get(measure, f"reward/{measure}")
    alike = {at: one for at, one in evaluated.items() if _judged_by(one, measure) == _judged_by(newest, measure)}
    values = {at: value for at, one in alike.items() if (value := one.metrics.get(metric)) is not None}
    if not values or (measure == PASSES and _by_chance(newest, evaluated.values())):
        raise InputError(_no_measure(run, measure, newest))
    best = max(sorted(values), key=lambda at: values[at])
    name = f"held-out pass rate ({newest.facts.get(PASS)})" if measure == PASSES else f"held-out {metric}"
    others = sorted(evaluated.keys() - values.keys())
    apart = f"; {others} are judged by another reward function or condition, and not compared" if others else ""
    return Chosen(run, best, recorded, f"the best of {sorted(values)} by {name}: {values[best]:.4g}{apart}")


def _no_measure(run: str, measure: str, newest: Manifest) -> str:
    parts = sorted(name.removeprefix("reward/") for name in newest.metrics if name.startswith("reward/"))
    others = [f"{run}@{BEST}.reward for the mean reward", *(f"{run}@{BEST}.{part}" for part in parts)]
    why = "has no pass rate, because it is not known which answers pass" if measure == PASSES else f"has no {measure}"
    repair = '. For a pass rate set evaluate.pass, as in "right >= 1"' if measure == PASSES else ""
    return f"run {run!r} {why}, so it has no best by that: name another measure, as {', '.join(others)}{repair}"


def _judged_by(evaluated: Manifest, measure: str) -> list[JsonValue]:
    """Facts of an evaluation that make its figures comparable: equal for the same reward, prompts and condition."""
    return [evaluated.facts.get(name) for name in (SCORED_BY, ASKED, *([PASS] if measure == PASSES else []))]


def _by_chance(newest: Manifest, evaluated: Iterable[Manifest]) -> bool:
    """True if a reward that can take other values than 0 and 1 took only these in the newest evaluation."""
    by = newest.facts.get(SCORED_BY)
    return newest.facts.get(PASS) == EXACT and any(
        one.facts.get(SCORED_BY) == by and one.facts.get(PASS) is None for one in evaluated
    )


def _by_iteration(recorded: Contents, stage: Stage) -> dict[int, Manifest]:
    return {manifest.iteration: manifest for manifest in recorded.newest if manifest.stage == stage}


class Hashed:
    """A file that hashes the bytes written to it."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file, self._hash = file, xxhash.xxh3_128()

    def write(self, data: bytes | memoryview) -> None:
        view = memoryview(data).cast("B")
        for start in range(0, len(view), _BLOCK):
            self._hash.update(view[start : start + _BLOCK])
            self._file.write(view[start : start + _BLOCK])

    @property
    def digest(self) -> str:
        """xxh3-128 of the bytes written."""
        return self._hash.hexdigest()


@dataclass
class ExportFolder:
    shown: str  # its name in messages
    fs: Any
    path: str
    digests: dict[str, str] = field(default_factory=dict)  # xxh3-128 of the files written, by name

    @classmethod
    def new(cls, url: str) -> "ExportFolder":
        """Accept the local folder or URL of a folder that does not exist, is empty, or was left by an interrupted
        export. Raises InputError: it holds something else, has credentials in its URL, or cannot be reached."""
        check_slashes(url, "--to")
        url = url if "://" in url or url.startswith("env:") else str(Path(url).expanduser().absolute())
        if has_credentials(url):
            fact = f"--to {shown_text(url)} has credentials in its URL"
            raise InputError(f"{fact}: give it by reference, as env:NAME, and export NAME")
        place = str(resolve(url, "--to"))
        try:
            fs, path = fsspec.core.url_to_fs(place)
            target = cls(url, fs, path)
            there = target.names()
        except url_errors(place) as error:
            raise InputError(f"--to {url} cannot be used: {without_secrets(str(error))}. Give another folder") from None
        if there and _MARK not in there:
            raise InputError(f"--to {url} is not empty: it holds {there[0]}. Give a new folder, or remove this one")
        return target

    def begin(self) -> None:
        """Mark the folder as unfinished, and remove the weights of an interrupted export."""
        self.write(_MARK, b"")
        del self.digests[_MARK]
        for name in self.names():
            if name.endswith(_LAST) or _WEIGHTS.fullmatch(name):
                self.fs.rm_file(f"{self.path}/{name}")

    def finish(self, config: bytes, last: str = _LAST) -> None:
        """Read everything back, write config.json, or the file in its place, and remove the mark. Raises
        StorageError: a file is damaged."""
        self._check(list(self.digests))
        self.write(last, config)
        self._check([last])
        self.fs.rm_file(f"{self.path}/{_MARK}")

    def names(self) -> list[str]:
        """Sorted names in the folder. Raises NotADirectoryError: it is a file."""
        if not self.fs.exists(self.path):
            return []
        if not self.fs.isdir(self.path):
            raise NotADirectoryError("it is a file")
        return sorted(str(name).rstrip("/").rsplit("/", 1)[-1] for name in self.fs.ls(self.path, detail=False))

    @contextmanager
    def file(self, name: str) -> Iterator[Hashed]:
        """Write a file from beginning to end. Raises StorageUnavailable: it cannot be written."""
        try:
            if isinstance(self.fs, LocalFileSystem):  # one that is made here is this user's alone
                Path(self.path).mkdir(mode=0o700, parents=True, exist_ok=True)
            path = f"{self.path}/{name}"
            self.fs.makedirs(path.rpartition("/")[0], exist_ok=True)
            with self.fs.open(path, "wb") as opened:
                hashed = Hashed(cast(IO[bytes], opened))
                yield hashed
        except OSError as error:
            fact = f"{name} cannot be written to {self.shown}: {error}"
            raise StorageUnavailable(f"{fact}. Correct that, and export again") from error
        self.digests[name] = hashed.digest

    def write(self, name: str, data: bytes) -> None:
        with self.file(name) as file:
            file.write(data)

    def _check(self, names: Sequence[str]) -> None:
        for name in names:
            with self.fs.open(f"{self.path}/{name}", "rb") as file:
                found = hashlib.file_digest(file, xxhash.xxh3_128).hexdigest()
            if found != self.digests[name]:
                fact = f"{self.shown}/{name} is damaged: xxh3-128 {found} was read, {self.digests[name]} was written"
                raise StorageError(f"{fact}. Export again to another folder")


class ExportSettings(Section):
    """Content of an exported folder, beside the run and the iteration."""

    precision: Precision | None = None
    """Type of the weights; by default that of the trained state."""
    adapter: bool = False
    """Write the adapters of LoRA alone, as peft loads them."""
    critic: bool = False
    """Write the critic, as train.critic.source of another run takes it."""

    @model_validator(mode="after")
    def _one_model(self) -> "ExportSettings":
        if self.adapter and self.critic:
            raise InputError("adapter and critic name two models: give one of them")
        if self.adapter and self.precision is not None:
            raise InputError("adapter writes factors as they are trained: leave precision out")
        return self
