"""Driving a run under its lease, from where its manifests end to the last iteration; without Prefect and Ray."""

import logging
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial

import psutil
from pydantic import JsonValue

from flows.iteration import Source, redo, source_of
from flows.preflight import check_holes, check_start
from flows.views.history import last_iteration, next_iteration, read_record, workflow_of
from flows.views.progress import Progress
from storage import layout
from storage.backends.root import Root
from storage.errors import InputError, LeaseHeld, Overtaken
from storage.manifest import Fence
from storage.ownership.lease import Lease, hold
from storage.revisions import Rerun, Revisions, keep_copies, read_revisions
from storage.upkeep.catalog import require_run
from storage.upkeep.redoing import Wanted, ask, choose, unfinished
from storage.upkeep.retention import Retention, catch_up, give_up
from tasks.checks import check_kept, prepared_stage
from tasks.config.document import parse_config
from tasks.config.identity import split_changes, unchangeable, with_settings
from tasks.config.run import RunConfig
from tasks.config.stored import (
    changed_config,
    changed_context,
    check_fixed,
    corrections,
    differs,
    documents,
    read_config,
    record_config,
    stored_config,
)
from tasks.forking import check_followed
from tasks.preflight import check_others
from tasks.stages.context import RunContext, persistent
from tasks.stages.names import WORKFLOW, Stage

logger = logging.getLogger(__name__)

Opener = Callable[[Lease, str], AbstractContextManager[RunContext]]
"""Makes the context that stages work in from the lease and the identity of the recorded configuration; what it starts
ends with the block."""


@dataclass(frozen=True)
class Drive:
    name: str
    root: Root
    config: RunConfig
    progress: Progress
    opener: Opener
    owner: str = "ratchet run"  # driver of the run, for display
    held: Lease | None = None
    """The run's lease, if the caller holds it already and has recorded the configuration under it."""

    def complete(self, one_stage: bool = False) -> None:
        """Record the configuration and do the missing part of the run, both under its lease. With `one_stage` only
        finish the rerun that was requested, if there is one.

        If the process that drove the run before still publishes a stage, with another result, that result counts, and
        the run continues from it."""
        driven = False
        while is_redoing(self.root, self.name) or not (one_stage or is_complete(self.root, self.name, self.config)):
            driven = True
            with self._driven() as context:
                settled = finish_rerun(context, self.progress)
                if not one_stage:
                    first = next_iteration(self.root, self.name, self.config)
                    advance(settled, self.progress, first, source_of(settled.config))
        if not (driven or one_stage):
            tidy_complete(self.root, self.name, self.config, self.owner, self.held)

    @contextmanager
    def _driven(self) -> Iterator[RunContext]:
        """The context of the head, under the run's lease. A result that another process published meanwhile counts."""
        root, name, config = self.root, self.name, self.config
        try:
            with hold(root, name, self.owner) if self.held is None else nullcontext(self.held) as lease:
                keep_copies(root, name)
                # refuses to go on where the record of a rerun is lost
                check_holes(name, root, config)
                digest = self._recorded(lease) if self.held is None else read_config(root, name).digest
                with self.opener(lease, digest) as context:
                    yield on_head(persistent(context, self.progress.say))
        except Overtaken as fact:
            self.progress.say(f"{fact}")

    def _recorded(self, lease: Lease) -> str:
        there = self.root.exists(layout.run_config_key(self.name))
        for line in corrections(self.root, self.name, self.config) if there else []:
            self.progress.say(f"corrected, since nothing was made from it yet: {line}")
        return record_config(self.root, self.name, self.config, lease)


def rerun(root: Root, name: str, wanted: Wanted) -> Rerun:
    """Record that a finished stage is to be done again; `Drive.complete` then does it. Raises as `ask`."""
    with hold(root, name, "ratchet rerun") as lease:
        return ask(root, WORKFLOW, name, wanted, lease)


def person() -> str:
    """Name of the requester in records: user and host of this process."""
    return f"{psutil.Process().username()}@{socket.gethostname()}"


def ask_again(root: Root, run: str, wanted: Wanted, given: Sequence[str] = ()) -> tuple[Rerun, RunConfig]:
    """Record that a stage is to be repeated, unless that is recorded; return the configuration that the run has then.
    Of the settings in `given`, `section.key=value`, those that decide results apply from this stage on. Raises
    InputError if the stage cannot be repeated so, LeaseHeld if another process drives the run."""
    require_run(root, run)
    if not wanted.reason.strip():
        raise InputError("a reason is missing: say why the stage is done again; it is recorded with the result")
    if wanted.stage not in WORKFLOW.behind:
        raise InputError(f"{wanted.stage} is never done again, only {', '.join(WORKFLOW.behind)}: name one of these")
    before = stored_config(root, run)
    if before.retrain is not None:
        raise InputError(f"run {run} trains on stored samples, and its stages are not done again: start a new retrain")
    after = changed_config(before, run, given)
    settings, runtime = split_changes(before.model_dump(mode="json"), after.model_dump(mode="json"))
    if context := changed_context(before, after):
        raise differs(root, run, context[0], "fork the run: conversations of one run grow to one length")
    _check_settings(before, wanted, settings)
    check_fixed(before, after, run, "a stage that is done again")
    if wanted.stage == Stage.TRAIN and after.train.policy.needs_rewards > before.train.policy.needs_rewards:
        fact = f"iteration {wanted.iteration} has no rewards, which train.policy needs with these settings"
        raise InputError(f"{fact}: do its {Stage.ROLLOUT} again with them")
    check_start(run, root, before)
    if (prepared := prepared_stage(root, run)) is not None:
        check_others(after, prepared)
    if settings and prepared is not None:
        check_kept(after, root, prepared, "the run's model")
    if wanted.stage == Stage.ROLLOUT:
        check_followed(root, run, wanted.iteration - 1, after, given, f"{run}-fork")
    asked = rerun(root, run, replace(wanted, settings=settings, ahead=after.rollout.ahead))
    return asked, going_on(before, {**runtime, "run.iterations": asked.until}, run)


def going_on(config: RunConfig, settings: dict[str, object], run: str) -> RunConfig:
    document = with_settings(config.model_dump(mode="json"), settings)  # pyright: ignore[reportArgumentType]
    return parse_config(document, f"of run {run}")


def _check_settings(config: RunConfig, wanted: Wanted, settings: Mapping[str, JsonValue]) -> None:
    stage = Stage(wanted.stage)
    if settings and not WORKFLOW.leads_on(stage):
        raise InputError(f"nothing is made from {stage}: it cannot be done again with {', '.join(settings)}")
    if fixed := list(unchangeable(config, settings, (stage, *WORKFLOW.behind[stage]))):
        fact = f"{', '.join(fixed)} cannot change when {stage} of iteration {wanted.iteration} is done again"
        why = "what comes before it was made under the old value"
        raise InputError(f"{fact}: {why}. Do an earlier stage again, or fork the run")


def make_head(root: Root, run: str, revision: int, reason: str, who: str, owner: str) -> int:
    """Make a revision the head of a run that nothing drives, and write its report again; returns the head before.
    Raises as `choose`, or LeaseHeld."""
    from flows.views.reports import write_report  # draws curves

    before = read_revisions(root, run).head
    with hold(root, run, owner) as lease:
        choose(root, WORKFLOW, run, revision, reason, who, lease, stored_config(root, run).rollout.ahead)
        write_report(root, run)
    return before


def is_redoing(root: Root, name: str) -> bool:
    return unfinished(root, name, read_revisions(root, name)) is not None


def is_complete(root: Root, name: str, config: RunConfig) -> bool:
    """True if a run has nothing to do under a configuration."""
    left = next_iteration(root, name, config) <= last_iteration(root, name, config)
    return not (left or is_redoing(root, name))


def on_head(context: RunContext) -> RunContext:
    """The context that works on the run's head as it is now."""
    return _on(context, read_revisions(context.root, context.run))


def _on(context: RunContext, revisions: Revisions) -> RunContext:
    """The context that works on the revision that `revisions` is seen from, under its settings."""
    stored = read_config(context.root, context.run, revisions)
    config, settings = context.config, revisions.settings()
    if settings:
        given = with_settings(config.model_dump(mode="json"), settings)
        config = parse_config(given, f"of revision {revisions.current} of run {context.run}")
    every = documents(context.root, context.run, revisions)
    return replace(context, config=config, config_digest=stored.digest, revisions=revisions, documents=every)


def finish_rerun(context: RunContext, progress: Progress) -> RunContext:
    """Repeat the stage that was asked for, unless it is done, and choose the result if it cascades. Returns the context
    of the head."""
    root, run = context.root, context.run
    rerun = unfinished(root, run, context.revisions)
    if rerun is None:
        return context
    withdraw = f"`ratchet choose {run} {context.revisions.head} --reason TEXT`"
    fact = f"revision {rerun.revision}: {rerun} is done again ({rerun.reason})"
    progress.say(f"{fact}; until that is finished, {withdraw} withdraws it")
    with context.page.iteration(rerun.iteration):
        redo(_on(context, context.revisions.seen(rerun.revision)), rerun.iteration, Stage(rerun.stage))
    context.outbox.settle()
    if rerun.cascade:
        assert context.fence is not None
        choose(root, WORKFLOW, run, rerun.revision, rerun.reason, rerun.asked_by, context.fence)
        progress.say(f"revision {rerun.revision} is the head")
    else:
        number = rerun.revision
        progress.say(f"revision {number} is beside the head: `ratchet choose {run} {number}` changes it")
    return on_head(context)


def advance[P](context: RunContext, progress: Progress, first: int, source: Source[P]) -> None:
    """Do the iterations from `first` to the last; their results are durable on return."""
    # before a stage can find an old part and use it
    retain(context.root, context.run, context.config, context.fence, context.revisions)
    position = source.position_after(context, first - 1) if first else None
    if position is None:
        with context.page.iteration(0):
            position = source.begin(context)
            conclude(context, progress, 0)
    last = last_iteration(context.root, context.run, context.config)
    progress.expect(last)
    for iteration in range(max(first, 1), last + 1):
        with context.page.iteration(iteration):
            position = source.iterate(context, iteration, position)
            conclude(context, progress, iteration)
    context.outbox.settle()


def conclude(context: RunContext, progress: Progress, iteration: int) -> None:
    """Report an iteration once it is published completely, and delete the train state that is no longer kept.

    These are two jobs behind the stages, as each may be repeated: an iteration is reported once."""
    root, run = context.root, context.run
    context.outbox.add(lambda: progress.finished(read_record(root, run, iteration, context.revisions)))
    concluded = context.outbox.add(
        partial(retain, root, run, context.config, context.fence, context.revisions, served=iteration)
    )
    context.page.storing(iteration, "retention", concluded)


def tidy_complete(root: Root, name: str, config: RunConfig, owner: str, held: Lease | None = None) -> None:
    """Delete train states that a complete run no longer keeps: its process may have been killed before it did so.
    Raises WrongRecord if a stage is lost, so that it is not complete."""
    check_holes(name, root, config)
    if config.newest_states is None:
        return
    try:
        with hold(root, name, owner) if held is None else nullcontext(held) as lease:
            retain(root, name, config, lease)
    except LeaseHeld as driven:
        logger.info("%s; the train states of run %s are left to it", driven, name)


def retain(
    root: Root,
    name: str,
    config: RunConfig,
    fence: Fence | None,
    revisions: Revisions | None = None,
    served: int | None = None,
) -> None:
    """Delete train states that are no longer kept; with `served`, only the one that this iteration pushes out."""
    if config.newest_states is None:
        return
    retention = Retention(newest=config.newest_states, every=config.storage.keep_every)
    work = catch_up if served is None else partial(give_up, served=served)
    work(root, workflow_of(config), name, retention, fence=fence, revisions=revisions)
