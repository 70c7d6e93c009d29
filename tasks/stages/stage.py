"""The one rule of every stage: committed already with the same inputs means done; else do the work, then commit.

A train state may be stored behind the stages that follow. Its stage then returns a manifest that is still to be
published, and what is made from it is published after it, in the order of an outbox.
"""

import os
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial

from pydantic import JsonValue

from storage import kill_points, layout, meter
from storage.attempts import begin
from storage.backends.root import Root
from storage.errors import CommitConflict
from storage.kill_points import Point
from storage.manifest import Fence, Manifest, Part, commit, find
from storage.parts import PartWriter
from storage.write_behind import Outbox
from tasks.config.code_version import code_version


@dataclass(frozen=True)
class StageOutput:
    """What a stage's body hands over to be committed."""

    parts: tuple[Part, ...] = ()
    schema_fingerprint: str | None = None
    facts: Mapping[str, JsonValue] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)
    store: Callable[[], None] | None = None
    """Stores the parts, if that is still to be done; called once, by the outbox if there is one."""


@dataclass(frozen=True)
class StageResult:
    """A finished stage, and whether it was committed before."""

    manifest: Manifest
    reused: bool
    pending: bool = False
    """Whether its manifest is still to be published by the outbox."""


def run_stage(
    writer: PartWriter,
    config_digest: str,
    inputs: Mapping[str, Manifest],
    body: Callable[[], StageOutput],
    fence: Fence | None = None,
    outbox: Outbox | None = None,
) -> StageResult:
    """Return the manifest of a stage, doing `body` only if there is none made from the same inputs.

    With an outbox that is at work, or for parts that are still to be stored, the manifest is published from there,
    after everything that was added before. What then goes wrong is raised by the outbox.

    Raises:
        CommitConflict: the stage is committed, but from other inputs or by a competing writer with another result.
        LeaseLost: another process drives the run by now; nothing was committed.
    """
    digests = {role: manifest.digest for role, manifest in inputs.items()}
    done = committed(writer.root, writer.run, writer.iteration, writer.stage, digests, config_digest)
    if done is not None:
        return StageResult(done, reused=True)
    kill_points.reached(Point.STARTED, _key(writer))
    started, clock, begun = datetime.now(UTC), time.perf_counter(), meter.seconds()
    process = f"{socket.gethostname()}:{os.getpid()}"
    attempt = begin(writer.root, writer.run, writer.iteration, writer.stage, process)
    output = body()
    manifest = Manifest(
        run=writer.run,
        iteration=writer.iteration,
        stage=writer.stage,
        schema_fingerprint=output.schema_fingerprint,
        parts=output.parts,
        inputs=digests,
        config_digest=config_digest,
        code_version=code_version(),
        facts=dict(output.facts),
        metrics={
            **output.metrics,
            "seconds": time.perf_counter() - clock,
            "storage_seconds": meter.seconds() - begun,
        },
        attempt=attempt,
        writer=process,
        started=started,
        finished=datetime.now(UTC),
    )
    publish = partial(_publish, writer, manifest, output.store, fence)
    if outbox is None or (output.store is None and outbox.idle):
        return StageResult(publish(), reused=False)
    outbox.add(publish)
    return StageResult(manifest, reused=False, pending=True)


def _publish(writer: PartWriter, manifest: Manifest, store: Callable[[], None] | None, fence: Fence | None) -> Manifest:
    if store is not None:
        clock = time.perf_counter()
        store()
        metrics = {**manifest.metrics, "upload_seconds": time.perf_counter() - clock}
        manifest = manifest.model_copy(update={"metrics": metrics})
    kill_points.reached(Point.PARTS_DONE, _key(writer))
    published = commit(writer.root, manifest, fence)
    kill_points.reached(Point.COMMITTED, _key(writer))
    return published


def _key(writer: PartWriter) -> str:
    return layout.manifest_key(writer.run, writer.iteration, writer.stage, 0)


def committed(
    root: Root, run: str, iteration: int, stage: str, inputs: Mapping[str, str], config_digest: str
) -> Manifest | None:
    """The stage's manifest if it was made from these inputs under this configuration; None if there is none.

    Raises:
        CommitConflict: there is one, made from something else.
    """
    manifest = find(root, run, iteration, stage)
    if manifest is None:
        return None
    if manifest.inputs == dict(inputs) and manifest.config_digest == config_digest:
        return manifest
    changed = [role for role in inputs if manifest.inputs.get(role) != inputs[role]]
    raise CommitConflict(
        f"{stage} of iteration {iteration} of run {run} is committed, but from another "
        f"{' and '.join(changed) or 'configuration'}; it cannot be used here and is not overwritten. "
        "Start a new run with another --run"
    )
