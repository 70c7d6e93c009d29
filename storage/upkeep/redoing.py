"""Doing a finished stage again: asking for it, and choosing the head. Hold the run's lease for both.

The order is the promise: intent, result, choice. The next process finds an intent without its end and goes on."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import cached_property

from pydantic import JsonValue

from storage.backends.root import Root
from storage.errors import InputError
from storage.ids import Workflow
from storage.manifest import Fence, find
from storage.revisions import Choice, Rerun, Revisions, read_revisions, record_choice, record_rerun
from storage.upkeep.catalog import Names, check_asked, names, stored_states
from storage.upkeep.holes import check_whole


@dataclass(frozen=True)
class Wanted:
    iteration: int
    stage: str
    reason: str
    asked_by: str
    cascade: bool = True
    new_seeds: bool = False
    settings: Mapping[str, JsonValue] = field(default_factory=dict)
    request: str | None = None  # identity of the request; asked again under it, nothing is done twice
    ahead: int = 0  # updates by which the weights that sample may be older than the newest

    def matches(self, rerun: Rerun) -> bool:
        mine = (self.iteration, self.stage, self.cascade, self.new_seeds, dict(self.settings))
        return mine == (rerun.iteration, rerun.stage, rerun.cascade, rerun.new_seeds, rerun.settings)


def ask(root: Root, workflow: Workflow, run: str, wanted: Wanted, fence: Fence) -> Rerun:
    """Record that a finished stage is to be done again, or find the record if it was asked before and is not finished.
    Raises InputError if the stage is not finished, is the start of the run, or needs a state that is not kept; or
    another rerun is not finished; WrongRecord if a stage of the run is lost; LeaseLost from the fence (nothing was
    recorded)."""
    revisions = read_revisions(root, run)
    before = revisions.requested(wanted.request) if wanted.request is not None else None
    if before is not None:
        return before
    begun = unfinished(root, run, revisions)
    if begun is not None and wanted.matches(begun):
        return begun
    if begun is not None:
        raise InputError(
            f"{begun} of run {run!r} is being done again as revision {begun.revision} (requested by {begun.asked_by}: "
            f"{begun.reason}) and is not finished: `ratchet run` finishes it, `ratchet choose {run} "
            f"{begun.parent} --reason TEXT` withdraws it"
        )
    recorded = names(root, run, revisions=revisions)
    check_asked(root, run, recorded)
    check_whole(root, workflow, run, recorded, wanted.ahead)
    _check_wanted(workflow, run, wanted, recorded)
    _check_made_again(root, workflow, run, wanted, recorded)
    rerun = _rerun(workflow, wanted, recorded)
    fence.check()
    # our own write whose answer was lost is found as unfinished; another's is refused or adopted there
    return rerun if record_rerun(root, run, rerun) else ask(root, workflow, run, wanted, fence)


def unfinished(root: Root, run: str, revisions: Revisions) -> Rerun | None:
    """The rerun that a process that drives the run has to finish first: its stage is not done, or not chosen."""
    last = revisions.pending
    if last is None or last.cascade:
        return last
    done = find(root, run, last.iteration, last.stage, revisions.seen(last.revision))
    return None if done is not None else last


def choose(
    root: Root, workflow: Workflow, run: str, revision: int, reason: str, asked_by: str, fence: Fence, ahead: int = 0
) -> Choice:
    """Make a revision the head. What is not done in it is done when the run goes on; its samples come from weights that
    may be `ahead` updates older than the newest. Raises InputError if there is no such revision, its stage is not done,
    or the run cannot go on from it; LeaseLost from the fence (nothing was chosen)."""
    revisions = read_revisions(root, run)
    goes_on = _goes_on(root, run, revisions.seen(revision))
    choice = Choice(revision=revision, goes_on=goes_on, reason=reason, asked_by=asked_by, time=datetime.now(UTC))
    then = replace(revisions, choices=(*revisions.choices, choice))
    recorded = names(root, run, revisions=then)
    check_asked(root, run, recorded)
    done = recorded.newest  # what the head needs next must be kept
    first = next(at for at in range(max(at for at, _ in done) + 2) if (at, workflow.ends_iteration) not in done)
    needed = [first if (first, workflow.holds_state) in done else first - 1]
    # the one after those is sampled by weights that are to be made
    sampled = [at for at in range(first, first + ahead) if at and (at, workflow.samples) not in done]
    needed += [max(0, at - 1 - ahead) for at in sampled]
    for at in needed:
        _check_kept(workflow, run, at, recorded)
    unmade = _Unmade(root, workflow, run, recorded, then.settings())
    if (lacking := unmade.first(needed)) is not None:
        raise unmade.error(lacking, "Do a stage again that follows one of them, or choose another revision")
    fence.check()
    if record_choice(root, run, choice, len(then.choices)):
        return choice
    there = read_revisions(root, run).choices[len(revisions.choices)]
    # compared, because the answer to our own write may have been lost
    return choice if there == choice else choose(root, workflow, run, revision, reason, asked_by, fence, ahead)


def _check_wanted(workflow: Workflow, run: str, wanted: Wanted, recorded: Names) -> None:
    iteration, stage = wanted.iteration, wanted.stage
    if stage == workflow.prepares or (iteration, stage) == (0, workflow.holds_state):
        fact = f"{stage} of iteration {iteration} is what all of run {run!r} is made from"
        raise InputError(f"{fact}: start a new run with another --run instead")
    if stage not in workflow.behind:
        raise InputError(f"{stage} cannot be done again, only {', '.join(sorted(workflow.behind))}")
    if (iteration, stage) not in recorded.newest:
        fact = f"{stage} of iteration {iteration} of run {run!r} is not finished, so it cannot be done again"
        raise InputError(f"{fact}: `ratchet show {run}` lists what is")
    for needed in _needed(workflow, wanted):
        _check_kept(workflow, run, needed, recorded)


def _needed(workflow: Workflow, wanted: Wanted) -> list[int]:
    """Iterations of the train states that the work begins with, or whose weights sample for what is behind it."""
    stage, first, older = wanted.stage, _begins_with(workflow, wanted), range(0)
    if stage == workflow.samples or (wanted.cascade and workflow.leads_on(stage)):
        older = range(max(0, wanted.iteration - (stage == workflow.samples) - wanted.ahead), wanted.iteration)
    return sorted({*older, *([] if first is None else [first])})


def _begins_with(workflow: Workflow, wanted: Wanted) -> int | None:
    """Iteration of the train state that the work begins with; None if there is none: scores alone need no weights."""
    if not wanted.cascade and wanted.stage == workflow.scores:
        return None
    return wanted.iteration - (workflow.holds_state in (wanted.stage, *workflow.behind[wanted.stage]))


def _check_made_again(root: Root, workflow: Workflow, run: str, wanted: Wanted, recorded: Names) -> None:
    """Refuse work on states that are not stored and that its settings could not make again."""
    unmade = _Unmade(root, workflow, run, recorded, {**recorded.revisions.settings(), **wanted.settings})
    if (lacking := unmade.first(_needed(workflow, wanted))) is None:
        return
    places = range(wanted.iteration - 1, 0, -1)
    works = (at for at in places if unmade.first(_needed(workflow, replace(wanted, iteration=at))) is None)
    instead = next(
        (f"{wanted.stage} of iteration {at} again" for at in works), "a stage again that follows one of them"
    )
    raise unmade.error(lacking, f"Do {instead}")


@dataclass(frozen=True)
class _Unmade:
    """States that are not stored (`storage.save_every`), where work under `settings` could not make them again."""

    root: Root
    workflow: Workflow
    run: str
    recorded: Names
    settings: Mapping[str, JsonValue]

    def first(self, iterations: Iterable[int]) -> int | None:
        """The first of some iterations with such a state."""
        if not any(map(self._deciding, (self.settings, *(one.settings for one in self.recorded.revisions.reruns)))):
            return None
        return next((at for at in iterations if not self._made(at)), None)

    def error(self, iteration: int, repair: str) -> InputError:
        return InputError(
            f"the train state of iteration {iteration} of run {self.run!r} is not stored (storage.save_every), and "
            f"other settings could not make it again; those of {self._stored} are. {repair}"
        )

    def _made(self, iteration: int) -> bool:
        """True if the state is stored, or made from a stored one under these settings alone."""
        seen, wanted = self.recorded.revisions, self._deciding(self.settings)
        while iteration > 0 and iteration not in self._stored:
            if self._deciding(seen.seen(seen.of(iteration, self.workflow.holds_state)).settings()) != wanted:
                return False
            iteration -= 1
        return True

    def _deciding(self, settings: Mapping[str, JsonValue]) -> dict[str, JsonValue]:
        return {key: value for key, value in settings.items() if self.workflow.decides_state(key)}

    @cached_property
    def _stored(self) -> list[int]:
        return stored_states(self.root, self.run, self.workflow.holds_state, self.recorded)


def _rerun(workflow: Workflow, wanted: Wanted, recorded: Names) -> Rerun:
    revisions = recorded.revisions
    return Rerun(
        revision=len(revisions.reruns) + 1,
        parent=revisions.head,
        iteration=wanted.iteration,
        stage=wanted.stage,
        behind=workflow.behind[wanted.stage],
        later=workflow.leads_on(wanted.stage),
        cascade=wanted.cascade,
        new_seeds=wanted.new_seeds,
        settings=dict(wanted.settings),
        until=max((at for at, stage in recorded.newest if stage == workflow.ends_iteration), default=0),
        choices=len(revisions.choices),
        reason=wanted.reason,
        asked_by=wanted.asked_by,
        request=wanted.request,
        time=datetime.now(UTC),
    )


def _goes_on(root: Root, run: str, seen: Revisions) -> int:
    """An earlier revision in which the repeated stage has the same digest: what is behind it is done there already. The
    parent if it is one; otherwise the one that was the head last."""
    number = seen.current
    if number == 0 or any(choice.revision == number for choice in seen.choices):
        return seen.goes_on(number)
    rerun = seen.rerun(number)
    mine = find(root, run, rerun.iteration, rerun.stage, seen)
    if mine is None:
        raise InputError(
            f"revision {number} of run {run!r} has no {rerun.stage} of iteration {rerun.iteration} yet: "
            "`ratchet run` finishes it, unless another choice has withdrawn it; then ask again with `ratchet rerun`"
        )
    heads = [choice.revision for choice in reversed(seen.choices)]
    for other in dict.fromkeys([rerun.parent, *heads, *seen.numbers]):
        there = find(root, run, rerun.iteration, rerun.stage, seen.seen(other)) if other < number else None
        if there is not None and there.digest == mine.digest:
            return other
    return number


def _check_kept(workflow: Workflow, run: str, iteration: int, recorded: Names) -> None:
    kept = recorded.kept(workflow.holds_state)
    if iteration not in kept:
        raise InputError(
            f"this needs the train state of iteration {iteration} of run {run!r}, which retention has deleted; those "
            f"of {kept} are kept. Do a stage again that follows one of them, or keep more states "
            "(storage.keep_newest, storage.keep_every)"
        )
