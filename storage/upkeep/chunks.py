"""The archive of a run in chunks of iterations, so that a run that grows is archived without writing it all again.

Each chunk is one Parquet file as `storage.upkeep.archive` writes it. Its name has its iterations. A chunk is written
again if it has more iterations by now, or if one of its stages was committed later than the file.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from itertools import groupby

from storage import layout
from storage.backends.root import Root, Stored
from storage.ids import Workflow
from storage.manifest import load
from storage.upkeep.archive import Archive, Texts, store_archive, without_texts
from storage.upkeep.catalog import Names, names

CHUNK = 100
"""Iterations in a file."""
TABLE = "chunk"


def compact_new(
    root: Root, workflow: Workflow, run: str, texts: Callable[[], Texts] = lambda: without_texts, size: int = CHUNK
) -> tuple[Archive, ...]:
    """Write the chunks that are missing or behind, and remove those that they replace. May be done at any time.
    Iterations that are not scored yet are left out.

    Args:
        texts: makes what turns tokens into texts; called only if there is something to write.
        size: iterations in a chunk.

    Raises:
        DigestMismatch, PartMissing, SchemaMismatch: what a chunk is made from cannot be read.
    """
    # the archive first: what another process has written is not longer than what this one sees committed
    there = [one for one in root.stored(layout.archive_folder(run)) if _span(one)]
    recorded = names(root, run)
    committed = {one.key: one.modified for one in root.stored(layout.manifest_folder(run))}
    revisions = {one.key: one.modified for one in root.stored(layout.revision_folder(run))}
    _, choices = layout.revision_numbers(revisions)
    chosen = [revisions[key] for key in choices.values()]  # an older chunk is of another head
    written: list[Archive] = []
    places = list(_places(recorded, workflow, size))
    numbers = {place.number for place in places}
    for one in there:
        if _number(one, size) not in numbers:  # of a former head, which had more iterations
            root.remove(one.key)
    for place in places:
        own = [one for one in there if place.number == _number(one, size)]
        current = [
            one for one in own if _span(one) == place.span and one.modified > max([place.changed(committed), *chosen])
        ]
        if not current:
            pairs = [(load(root, key), load(root, place.rewards[at])) for at, key in place.rollouts.items()]
            written.append(store_archive(root, run, TABLE, pairs, texts()))
        kept = current[-1].key if current else written[-1].key
        for one in own:  # as listed before: another process may have written a newer one since
            if one.key != kept:
                root.remove(one.key)
    return tuple(written)


@dataclass(frozen=True)
class _Place:
    """The scored iterations of one chunk."""

    number: int
    rollouts: Mapping[int, str]
    """Key of the manifest of each iteration's samples, in order."""
    rewards: Mapping[int, str]
    """That of their scores."""

    @property
    def span(self) -> tuple[int, int]:
        """First and last iteration."""
        iterations = list(self.rollouts)
        return iterations[0], iterations[-1]

    def changed(self, committed: Mapping[str, datetime]) -> datetime:
        """Time of the last commit of one of its stages."""
        return max(committed[key] for key in (*self.rollouts.values(), *self.rewards.values()))


def _places(recorded: Names, workflow: Workflow, size: int) -> Iterator[_Place]:
    newest = recorded.newest
    both = sorted(
        iteration for iteration, stage in newest if stage == workflow.samples and (iteration, workflow.scores) in newest
    )
    for number, some in groupby(both, lambda iteration: (iteration - 1) // size):
        chosen = list(some)
        rollouts = {iteration: newest[iteration, workflow.samples] for iteration in chosen}
        yield _Place(number, rollouts, {iteration: newest[iteration, workflow.scores] for iteration in chosen})


def _span(one: Stored) -> tuple[int, int] | None:
    found = layout.archive_span(one.key)
    return found[1:] if found is not None and found[0] == TABLE else None


def _number(one: Stored, size: int) -> int | None:
    span = _span(one)
    return None if span is None else (span[0] - 1) // size
