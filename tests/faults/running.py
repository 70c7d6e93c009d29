"""Small runs that are killed and started again, and the results that they leave."""

import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flows.proof.faults import Fault, Reached
from storage import layout
from storage.backends.root import Root, open_root
from storage.errors import StorageError
from storage.manifest import Manifest, Part
from storage.parts import is_intact, read_parts
from storage.schema import ROLLOUT
from storage.upkeep.catalog import Contents, contents
from tasks.stages.names import Stage
from tests.faults.journal import Entry, read_journal
from tests.faults.small_run import RUN, Plan, is_running
from tests.fork_servers import ForkServers

Place = tuple[int, Stage]
_GONE_S = 60.0


class Launcher:
    """Starts runs, one at a time for each calling thread."""

    def __init__(self) -> None:
        self._servers = ForkServers("tests.faults.small_run")

    def start(self, plan: Plan) -> int:
        """Execute a plan; returns the exit code of the process that drove the run."""
        file = Path(plan.folder) / "plan.json"
        file.write_text(plan.model_dump_json())
        return int(self._servers.ask(str(file)))

    def close(self) -> None:
        self._servers.close()


@dataclass(frozen=True)
class Attempt:
    """Record of one process that drove a run."""

    code: int
    messages: str
    journal: list[Entry]
    reached: list[Reached]
    delivered: list[Fault]
    lingering: list[Entry]
    """Processes that still ran some time later."""

    @property
    def bodies(self) -> Counter[Place]:
        """Count the starts of each stage's body."""
        return Counter((entry.number, Stage(entry.name)) for entry in self.journal if entry.what == "body")

    @property
    def sampled(self) -> list[int]:
        """Seeds of the samples that the engine was asked for; an evaluation has none."""
        return [entry.number for entry in self.journal if entry.what == "sampled" and entry.number]

    @property
    def calls(self) -> Counter[str]:
        """Count the calls of workers by method; one to all ranks counts once."""
        return Counter(entry.name for entry in self.journal if entry.what == "called")

    @property
    def pieces(self) -> list[tuple[int, str]]:
        """Pieces that were generated, by iteration and name."""
        return [(entry.number, entry.name) for entry in self.journal if entry.what == "piece"]


class SmallRun:
    """A run in its own folder, and the processes that have driven it."""

    def __init__(self, launcher: Launcher, folder: Path) -> None:
        folder.mkdir(parents=True)
        self._launcher, self._folder, self._attempts = launcher, folder, 0

    @property
    def root(self) -> Root:
        return open_root(str(self._folder / "root"))

    def attempt(self, *faults: Fault, **plan: Any) -> Attempt:
        """Let one process drive the run, to the end or to the fault."""
        self._attempts += 1
        folder = self._folder / str(self._attempts)
        folder.mkdir()
        wanted = Plan(root=str(self.root.folder), folder=str(folder), **plan)
        wanted.faults.plan(list(faults))
        code = self._launcher.start(wanted)
        journal = read_journal(wanted.journal)
        lingering = _lingering([entry for entry in journal if entry.what == "process"])
        messages = wanted.messages.read_text()
        return Attempt(code, messages, journal, wanted.faults.reached(), wanted.faults.delivered(), lingering)

    def finished(self, **plan: Any) -> "Look":
        """Let one process drive the run to its end; what is stored then."""
        attempt = self.attempt(**plan)
        assert attempt.code == 0, attempt.messages
        return self.look()

    def look(self) -> "Look":
        """Read everything that is stored now."""
        return Look(self.root, contents(self.root, RUN), frozenset(self.root.keys("")))


@dataclass(frozen=True)
class Look:
    """Content of the store at one moment."""

    root: Root
    contents: Contents
    keys: frozenset[str]

    @property
    def manifests(self) -> dict[Place, Manifest]:
        return {(one.iteration, one.stage): one for one in self.contents.newest}

    @property
    def digests(self) -> dict[Place, str]:
        """Identities of all committed results."""
        return {place: manifest.digest for place, manifest in self.manifests.items()}

    @property
    def parts(self) -> dict[str, bytes]:
        """Every part that a manifest names, byte by byte."""
        named = {part.key for manifest in self.contents.newest for part in manifest.parts}
        return {key: self.root.read_bytes(key) for key in sorted(named)}

    @property
    def seeds(self) -> set[int]:
        """Seeds of all samples in recorded pieces."""
        parts = list(self.contents.pieces.values())
        return set(read_parts(self.root, parts, ROLLOUT, ["seed"])["seed"].to_pylist()) if parts else set()

    @property
    def pieces(self) -> set[tuple[int, str]]:
        """Recorded pieces of rollouts, by iteration and name."""
        found = set()
        for key in self.contents.pieces:
            place = layout.place_of(key)
            assert place is not None
            found.add((place[0], key.rpartition("/")[2].removesuffix(".json")))
        return found

    def there(self, parts: tuple[Part, ...]) -> list[bool]:
        return [part.key in self.keys for part in parts]


@dataclass
class Watch:
    """Findings of a reader that read the manifests again and again."""

    seen: set[str] = field(default_factory=set)
    wrong: list[str] = field(default_factory=list)


@contextmanager
def watched(root: Root) -> Iterator[Watch]:
    """Read every manifest as soon as it exists, and check that all it names exists too, intact."""
    watch, stop = Watch(), threading.Event()

    def poll() -> None:
        while not stop.is_set():
            _look(root, watch)
        _look(root, watch)

    thread = threading.Thread(target=poll)
    thread.start()
    try:
        yield watch
    finally:
        stop.set()
        thread.join()


def _look(root: Root, watch: Watch) -> None:
    try:
        manifests = contents(root, RUN).manifests
    except StorageError as error:
        watch.wrong.append(str(error))
        return
    known = {manifest.digest for manifest in manifests.values()}
    for key in set(manifests) - watch.seen:
        watch.seen.add(key)
        watch.wrong += [f"{key}: {part.key}" for part in manifests[key].parts if not is_intact(root, part)]
        watch.wrong += [f"{key}: {role}" for role, digest in manifests[key].inputs.items() if digest not in known]


def _lingering(processes: list[Entry]) -> list[Entry]:
    deadline = time.monotonic() + _GONE_S
    while left := [entry for entry in processes if is_running(entry.number)]:
        if time.monotonic() > deadline:
            for entry in left:
                os.kill(entry.number, signal.SIGKILL)
            return left
        time.sleep(0.01)
    return []
