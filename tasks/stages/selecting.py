"""From stored rollouts to a selection: joined, filtered, without duplicates, in shares of whole prompt groups.

Only the kept samples of one rollout and of one share are in memory at a time. What grows with the selection are the
names of its parts and sources, eight bytes for each kept sample if duplicates are dropped, and the ids of the prompts
if samples are scored again."""

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import xxhash
from numpy.typing import NDArray

from storage.backends.root import Root, open_root
from storage.errors import InputError
from storage.filters import parse_filter
from storage.manifest import Manifest, find, revisions
from storage.parts import flat, read_parts, row_views
from storage.schema import PROMPTS, SELECTION
from storage.selection import OFFERED, Source, offered, scores_of
from storage.upkeep.catalog import Names, names, require_run
from tasks.config.retrain import Place, RetrainSection, place_of
from tasks.stages.names import WORKFLOW, Stage
from tasks.stages.views import Prepared


@dataclass(frozen=True)
class Rollout:
    """A stored rollout that may be selected from."""

    root: Root
    place: str | None  # URL of its root; None is the run's own
    manifest: Manifest
    reward: Manifest | None
    prepared: Prepared | None  # the prompts that it answers; None if it was imported
    head: int  # the head of its run, from which all of its rollouts are seen


@dataclass(frozen=True)
class _Run:
    """A run that samples are selected from, in the one revision that it has when its first rollout is read."""

    root: Root
    run: str
    recorded: Names
    prepared: Manifest | None

    @classmethod
    def of(cls, root: Root, run: str) -> "_Run":
        recorded = names(root, run)
        return cls(root, run, recorded, find(root, run, 0, Stage.PREPARE, recorded.revisions))

    def rollouts(self, iteration: int, *, every_revision: bool) -> Iterator[Manifest]:
        seen = self.recorded.revisions
        if every_revision:
            yield from revisions(self.root, self.run, iteration, Stage.ROLLOUT, seen)
        elif (head := find(self.root, self.run, iteration, Stage.ROLLOUT, seen)) is not None:
            yield head

    def prompts_of(self, rollout: Manifest) -> Prepared | None:
        """The prompts of a rollout, compared by digest: another run may have the run's name by now."""
        if (made_from := rollout.inputs.get("prepare")) is None:
            return None
        if self.prepared is None or self.prepared.digest != made_from:
            there = "none is there" if self.prepared is None else f"{self.prepared.digest} is there"
            raise InputError(
                f"the rollout of iteration {rollout.iteration} of run {rollout.run!r} in {self.root.url} answers the "
                f"prompts of prepare {made_from}, but {there} now. Restore it from a copy, or leave the run out of "
                "retrain.select"
            )
        return Prepared(self.prepared)


def open_place(own: Root, place: Place) -> Root:
    """The root of a place. Raises InputError: it has no such run."""
    root = own if place.root is None else open_root(place.root)
    require_run(root, place.run)
    return root


def rollouts(own: Root, section: RetrainSection) -> Iterator[Rollout]:
    """The rollouts that a section names, each once: what a fork shares with its parent counts where it comes first. A
    rollout that is not scored yet is among them; `Selecting` leaves it out, unless all are scored again. Raises
    InputError: a run does not exist, none of its rollouts is in the given iterations, or what they answer is gone."""
    seen: set[str] = set()
    known: dict[tuple[str, str], _Run] = {}
    for text in section.select:
        place = place_of(text)
        root = open_place(own, place)
        if (root.url, place.run) not in known:
            known[root.url, place.run] = _Run.of(root, place.run)
        source = known[root.url, place.run]
        for iteration in _wanted(source, place, text):
            for manifest in source.rollouts(iteration, every_revision=section.revisions == "all"):
                origin = manifest.digest if manifest.origin is None else manifest.origin.digest
                late = section.since is None or manifest.finished >= section.since
                if late and origin not in seen:
                    seen.add(origin)
                    seen_as, where = source.recorded.revisions, None if root.url == own.url else root.url
                    reward = scores_of(root, WORKFLOW, manifest, seen_as)
                    yield Rollout(root, where, manifest, reward, source.prompts_of(manifest), seen_as.head)


def _wanted(source: _Run, place: Place, text: str) -> list[int]:
    there = sorted(set(source.recorded.of_stage(Stage.ROLLOUT).values()))
    last = max(there, default=0) if place.last is None else place.last
    if not (wanted := [iteration for iteration in there if place.first <= iteration <= last]):
        span = f"those of iterations {there[0]} to {there[-1]}" if there else "none at all"
        raise InputError(f"retrain.select {text!r}: the run has no such rollouts, only {span}")
    return wanted


@dataclass(frozen=True)
class Answered:
    """The prompts of one run of which answers were selected."""

    root: Root
    prepared: Prepared
    ids: set[str] = field(default_factory=set)

    def read(self) -> pa.Table:
        """Their table, in the schema PROMPTS."""
        table = read_parts(self.root, [self.prepared.manifest.part("train.arrow")], PROMPTS)
        return table.filter(pc.is_in(table["prompt_id"], value_set=pa.array(sorted(self.ids), pa.string())))  # pyright: ignore[reportAttributeAccessIssue]


@dataclass
class Selecting:
    """A selection in progress. Each rollout is given to `add`, and what `shares` yields meanwhile is stored."""

    section: RetrainSection
    scored: bool = True  # samples without a score are left out, unless they are to be scored again
    sources: list[Source] = field(default_factory=list)
    answered: dict[str, Answered] = field(default_factory=dict)
    """By the digest of their stage `prepare`, if they are to be scored again."""
    examined: int = 0
    unscored: int = 0  # rollouts that were left out, because they have no scores yet
    duplicates: int = 0
    groups: int = 0
    rows: int = 0

    def __post_init__(self) -> None:
        self._condition = parse_filter(self.section.where, OFFERED) if self.section.where.strip() else None
        self._seen = SeenHashes()
        self._waiting: list[pa.Table] = []

    @property
    def full(self) -> bool:
        """True once the limit is reached: no later group fits."""
        return self.section.limit is not None and self.rows >= self.section.limit

    def add(self, rollout: Rollout) -> Iterator[pa.Table]:
        """Take what is wanted of a rollout; yields the shares that are full, in the schema SELECTION."""
        if rollout.reward is None and self.scored and not self.section.rescore:
            self.unscored += 1
            return
        tables, rows = [], 0
        for table in offered(rollout.root, rollout.manifest, rollout.reward):
            rows += table.num_rows
            tables.append(self._kept(table))
        kept = self._grouped(pa.concat_tables(tables) if tables else OFFERED.empty_table())
        self.examined += rows
        if kept.num_rows:
            self.sources.append(_source(rollout, rows, kept.num_rows))
            self._remember(rollout, kept)
            self.rows += kept.num_rows
            self._waiting.append(kept)
        yield from self._shares(self.section.samples + self.section.samples // 2)

    def rest(self) -> Iterator[pa.Table]:
        """The last shares. None is smaller than half of `samples`, unless all of the selection is."""
        yield from self._shares(self.section.samples + self.section.samples // 2)
        if self._waiting:
            yield pa.concat_tables(self._waiting)
            self._waiting = []

    def _remember(self, rollout: Rollout, kept: pa.Table) -> None:
        if not self.section.rescore:
            return
        if (prepared := rollout.prepared) is None:
            raise InputError(
                f"the samples of run {rollout.manifest.run!r} cannot be scored again, because their prompts' records "
                "are not stored: it was imported. Import them with a score (--map reward=COLUMN), and leave "
                "retrain.rescore false"
            )
        answered = self.answered.setdefault(prepared.digest, Answered(rollout.root, prepared))
        answered.ids.update(pc.unique(kept["prompt_id"]).to_pylist())  # pyright: ignore[reportAttributeAccessIssue]

    def _kept(self, table: pa.Table) -> pa.Table:
        found = table if self._condition is None else table.filter(self._condition)
        if not self.section.deduplicate or not found.num_rows:
            return found
        new = self._seen.add(hashes_of(found))
        self.duplicates += int(np.count_nonzero(~new))
        return found.filter(pa.array(new))

    def _grouped(self, table: pa.Table) -> pa.Table:
        """The rows group by group, as far as the limit allows, with the columns `source` and `group`."""
        codes = table["prompt_id"].combine_chunks().dictionary_encode().indices.to_numpy()
        order = np.argsort(codes, kind="stable")
        if self.section.limit is not None:
            sizes = np.bincount(codes) if len(codes) else np.zeros(0, np.int64)
            fitting = int(np.searchsorted(np.cumsum(sizes), self.section.limit - self.rows, side="right"))
            order = order[: int(sizes[:fitting].sum())]
        groups = codes[order].astype(np.int64) + self.groups
        self.groups += int(codes[order].max(initial=-1)) + 1
        kept = table.take(order)
        columns = {"source": pa.repeat(pa.scalar(len(self.sources), pa.int32()), len(order)), "group": pa.array(groups)}
        every = [columns[name] if name in columns else kept[name] for name in SELECTION.names]
        return pa.table(every, schema=SELECTION)

    def _shares(self, enough: int) -> Iterator[pa.Table]:
        """Shares of whole groups with at least `samples` rows, as long as `enough` rows wait."""
        while sum(table.num_rows for table in self._waiting) >= max(enough, 1):
            table = pa.concat_tables(self._waiting)
            ends = np.append(np.flatnonzero(np.diff(table["group"].to_numpy())) + 1, table.num_rows)
            end = int(ends[np.searchsorted(ends, self.section.samples)])
            # copied: a slice would keep the memory of the whole
            self._waiting = [table.slice(end).take(np.arange(table.num_rows - end))] if end < table.num_rows else []
            yield table.slice(0, end)


class SeenHashes:
    """A set of 64-bit hashes: sorted arrays, merged so that each is at least twice as long as the next. Of 10^7
    different samples two collide with a probability of 3e-6."""

    def __init__(self) -> None:
        self._runs: list[NDArray[np.uint64]] = []

    def add(self, hashes: NDArray[np.uint64]) -> NDArray[np.bool_]:
        """Mask of the hashes that are new; of equal ones the first is new: (N,) -> (N,)."""
        unique, first = np.unique(hashes, return_index=True)
        known = np.zeros(len(unique), np.bool_)
        for run in self._runs:
            places = np.minimum(np.searchsorted(run, unique), len(run) - 1)
            known |= run[places] == unique
        new = np.zeros(len(hashes), np.bool_)
        new[first[~known]] = True
        merged = unique[~known]
        while self._runs and len(self._runs[-1]) < 2 * len(merged):
            merged = np.sort(np.concatenate((self._runs.pop(), merged)))
        if len(merged):
            self._runs.append(merged)
        return new


def hashes_of(table: pa.Table) -> NDArray[np.uint64]:
    """xxh3-64 of each row's prompt and response tokens, (N,)."""
    rows = zip(row_views(table["prompt_tokens"]), row_views(table["response_tokens"]), strict=True)
    # the length keeps apart what is divided elsewhere
    found = (
        xxhash.xxh3_64_intdigest(len(prompt).to_bytes(8) + prompt.tobytes() + response.tobytes())
        for prompt, response in rows
    )
    return np.fromiter(found, np.uint64, table.num_rows)


@dataclass
class Ranges:
    """Ranges over all selected samples."""

    longest: int = 0  # most tokens of a prompt with its response
    largest_token: int = 0
    temperatures: set[float] = field(default_factory=set)
    least_top_p: float = 1.0
    most_top_k: int = 0
    most_min_p: float = 0.0
    without_logprobs: int = 0  # samples whose log-probabilities are not known
    route_bytes: set[int] = field(default_factory=set)  # bytes of the routes of a token; 0 of a sample that has none
    ranked: bool = False  # two samples of a prompt have different scores
    rewards: float = 0.0
    scored: int = 0

    def add(self, table: pa.Table) -> None:
        """Take a share into account."""
        (prompts, starts), (responses, ends) = (flat(table[name]) for name in ("prompt_tokens", "response_tokens"))
        self.largest_token = max(self.largest_token, *(int(one.max(initial=0)) for one in (prompts, responses)))
        self.longest = max(self.longest, int((np.diff(starts) + np.diff(ends)).max(initial=0)))
        self.temperatures |= set(pc.unique(table["temperature"]).to_pylist())  # pyright: ignore[reportAttributeAccessIssue]
        self.least_top_p = min(self.least_top_p, float(table["top_p"].to_numpy().min()))
        self.most_top_k = max(self.most_top_k, int(table["top_k"].to_numpy().max()))
        self.most_min_p = max(self.most_min_p, float(table["min_p"].to_numpy().max()))
        routes = pc.fill_null(pc.binary_length(table["routes"]), 0).to_numpy()  # pyright: ignore[reportAttributeAccessIssue]
        self.route_bytes |= set((routes // np.maximum(np.diff(starts) + np.diff(ends) - 1, 1)).tolist())
        values, offsets = flat(table["logprobs"])
        unknown = np.flatnonzero(~np.isfinite(values.astype(np.float32)))
        self.without_logprobs += len(np.unique(np.searchsorted(offsets, unknown, side="right")))
        spans = table.group_by("group").aggregate([("reward", "min"), ("reward", "max")])
        self.ranked |= bool(pc.any(pc.greater(spans["reward_max"], spans["reward_min"])).as_py())  # pyright: ignore[reportAttributeAccessIssue]
        rewards = table["reward"].drop_null().to_numpy()
        self.rewards += float(rewards.sum(dtype=np.float64))
        self.scored += len(rewards)


def _source(rollout: Rollout, rows: int, selected: int) -> Source:
    manifest, reward = rollout.manifest, rollout.reward
    return Source(
        root=rollout.place,
        run=manifest.run,
        iteration=manifest.iteration,
        revision=manifest.revision,
        key=manifest.key,
        rollout=manifest.digest,
        reward=None if reward is None else reward.digest,
        head=rollout.head,
        prepare=None if rollout.prepared is None else rollout.prepared.digest,
        stop_tokens=None if rollout.prepared is None else rollout.prepared.stop_tokens,
        rows=rows,
        selected=selected,
    )
