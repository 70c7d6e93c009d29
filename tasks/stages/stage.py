"""The one rule of every stage: already committed from the same inputs means done; else do the work, then commit.

A train state may be stored behind the stages that follow. Its stage then returns a manifest that is yet to be
published, and what is made from it is published after it, in the order of an outbox."""

import inspect
import os
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from typing import Concatenate, cast

from pydantic import JsonValue

from storage import kill_points, meter
from storage.backends.root import Root
from storage.errors import CommitConflict, RatchetError
from storage.kill_points import Point
from storage.manifest import Fence, Manifest, Part, commit, finite_or_null
from storage.parts import PartWriter
from storage.unfinished import begin
from tasks.config.code_version import code_version
from tasks.config.run import RunConfig
from tasks.stages.context import RunContext
from tasks.stages.names import Stage
from tasks.stages.views import Performed, View
from tasks.workers.stalls import within


@dataclass(frozen=True)
class Work:
    """One stage in progress."""

    context: RunContext
    iteration: int
    writer: PartWriter  # writer of its parts

    @property
    def config(self) -> RunConfig:
        return self.context.config

    @property
    def root(self) -> Root:
        """The run's storage."""
        return self.context.root


@dataclass(frozen=True)
class StageOutput:
    """The result of a stage's body, to be committed."""

    parts: tuple[Part, ...] = ()
    schema_fingerprint: str | None = None
    facts: Mapping[str, JsonValue] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)
    content: str | None = None  # name of the fact that identifies what the parts hold, if that is known before they are
    store: Callable[[], tuple[Part, ...]] | None = None
    """Stores the parts and returns them, if a fact identifies them; called once, by the outbox."""
    identified: Callable[[str], None] | None = None
    """Called with the digest of the manifest once it is known and being published."""


class StageFunction[**P, V: View]:
    """A stage: called with the run, the iteration and the views of its inputs, it returns the view of its own manifest.
    In a flow four of our frames are between the caller's line and the first line of the body: this call, the subflow
    and the task that show it, and `perform`."""

    def __init__(
        self, stage: Stage, roles: tuple[str, ...], view: type[V], body: Callable[Concatenate[Work, P], StageOutput]
    ) -> None:
        self.stage, self.view = stage, view
        self._roles, self._body = roles, body
        self._signature = inspect.signature(body)

    def __call__(self, context: RunContext, iteration: int, *inputs: P.args, **named: P.kwargs) -> V:
        """Run the stage, or return what is committed. An input that a run does not have is None. Raises CommitConflict
        (the stage is committed, but from other inputs or by a competing writer with another result) or LeaseLost
        (another process drives the run now)."""
        context.announce(iteration, self.stage)
        ordered = self._signature.bind(None, *inputs, **named).args[1:]
        work = partial(self.perform, context, iteration, ordered)
        there = tuple(view for view in ordered if view is not None)
        return cast(V, context.performer(self.stage, iteration, work, there))

    def perform(self, context: RunContext, iteration: int, inputs: tuple[View | None, ...]) -> Performed:
        """Run the body only if no manifest made from the same inputs is committed, and again as `tries` allows."""
        pairs = zip(self._roles, inputs, strict=True)
        digests = {role: view.digest for role, view in pairs if view is not None}
        revision = context.revisions.of(iteration, self.stage)
        writer = PartWriter(context.root, context.run, iteration, self.stage, revision)
        tries = context.tries(self.stage, iteration)
        while True:
            with tries, within(f"{self.stage} of iteration {iteration}"):
                if (done := committed(context, iteration, self.stage, digests)) is not None:
                    return Performed(self.view(done), reused=True)
                kill_points.reached(Point.STARTED, writer.manifest_key)
                attempt = Attempt.begin(context, writer)
                output = self._body(Work(context, iteration, writer), *inputs)  # pyright: ignore[reportCallIssue]
                return self._commit(context, writer, attempt.manifest(output, digests), output)

    def _commit(self, context: RunContext, writer: PartWriter, manifest: Manifest, output: StageOutput) -> Performed:
        publish = partial(_publish, writer, manifest, output.store, context.fence)
        pending = output.store is not None or not context.outbox.idle
        if pending:
            published = context.outbox.add(publish, (writer.iteration, self.stage))
            context.page.storing(writer.iteration, self.stage, published)
        else:
            manifest = publish()
        if output.identified is not None:
            output.identified(manifest.digest)
        return Performed(self.view(manifest), reused=False, pending=pending)


def stage[**P, V: View](
    name: Stage, roles: tuple[str, ...], view: type[V]
) -> Callable[[Callable[Concatenate[Work, P], StageOutput]], StageFunction[P, V]]:
    """Turn a function from `Work` and the views of its inputs to a `StageOutput` into a stage. `roles` are the names of
    the inputs in its manifest, in the order of the parameters; they are stored, so they never change. The stages that
    follow see a `view`."""
    return lambda body: StageFunction(name, roles, view, body)


@dataclass(frozen=True)
class Attempt:
    """The start of work on a stage, as its manifest records it."""

    context: RunContext
    writer: PartWriter
    number: int
    started: datetime
    clock: float
    stored: float  # seconds of this process in storage by then
    awaited: float  # seconds of this process in starts by then

    @classmethod
    def begin(cls, context: RunContext, writer: PartWriter) -> "Attempt":
        """Record the attempt."""
        started, clock = datetime.now(UTC), time.perf_counter()
        stored, awaited = meter.seconds(), context.starts.seconds
        number = begin(writer.root, writer.run, writer.iteration, writer.stage, _process(), writer.revision)
        return cls(context, writer, number, started, clock, stored, awaited)

    def manifest(self, output: StageOutput, inputs: Mapping[str, str]) -> Manifest:
        """The manifest of what the attempt made. Its duration is without the starts, which are beside it."""
        start = self.context.starts.seconds - self.awaited
        return Manifest(
            content=output.content,
            run=self.writer.run,
            iteration=self.writer.iteration,
            stage=self.writer.stage,
            revision=self.writer.revision,
            schema_fingerprint=output.schema_fingerprint,
            parts=output.parts,
            inputs=dict(inputs),
            config_digest=self.context.config_digest,
            code_version=code_version(),
            facts=dict(output.facts),
            metrics={
                **finite_or_null(output.metrics),
                "seconds": time.perf_counter() - self.clock - start,
                **({"start_seconds": start} if start else {}),
                "storage_seconds": meter.seconds() - self.stored,
            },
            attempt=self.number,
            writer=_process(),
            started=self.started,
            finished=datetime.now(UTC),
        )


def _publish(
    writer: PartWriter, manifest: Manifest, store: Callable[[], tuple[Part, ...]] | None, fence: Fence | None
) -> Manifest:
    try:
        if store is not None:
            clock = time.perf_counter()
            parts = store()
            metrics = {**manifest.metrics, "upload_seconds": time.perf_counter() - clock}
            manifest = manifest.model_copy(update={"parts": parts, "metrics": metrics})
        kill_points.reached(Point.PARTS_DONE, writer.manifest_key)
        published = commit(writer.root, manifest, fence)
        kill_points.reached(Point.COMMITTED, writer.manifest_key)
    except RatchetError as error:  # it may be raised where a later stage waits
        error.during = f"the storing of {writer.stage} of iteration {writer.iteration}"
        raise
    return published


def _process() -> str:
    return f"{socket.gethostname()}:{os.getpid()}"


def committed(context: RunContext, iteration: int, stage: Stage, inputs: Mapping[str, str]) -> Manifest | None:
    """The stage's manifest if it was made from these inputs under the settings that it reads; None if there is none.
    Raises CommitConflict: there is one, made from something else."""
    if (manifest := context.find(iteration, stage)) is None:
        return None
    if manifest.inputs == dict(inputs) and context.reads_the_same(stage, manifest.config_digest):
        return manifest
    changed = [role for role in inputs if manifest.inputs.get(role) != inputs[role]]
    raise CommitConflict(
        f"{stage} of iteration {iteration} of run {context.run} is committed, but from another "
        f"{' and '.join(changed) or 'configuration'}; it cannot be used here and is not overwritten. "
        "Start a new run with another --run"
    )
