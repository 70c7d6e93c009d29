"""Output of the store commands, for people and as JSON."""

from collections.abc import Iterator, Sequence

from pydantic import BaseModel, computed_field

from flows.views.output import count, size, some, table
from flows.views.table import STEP
from storage import layout
from storage.manifest import Manifest
from storage.revisions import Choice, Rerun
from storage.upkeep.catalog import Contents, RunSummary
from storage.upkeep.lineage import SampleLineage, Step, WeightsLineage
from storage.upkeep.retention import Collection, Garbage
from storage.upkeep.verify import Verification
from tasks.config.evaluation import PREFIX
from tasks.config.reference import Table, default_of

_NAMED = 8  # prompts of weights


class Listing(BaseModel, frozen=True, extra="forbid"):
    root: str
    runs: tuple[RunSummary, ...]


class ShownStage(BaseModel, frozen=True, extra="forbid"):
    digest: str
    retired: bool  # True if retention has deleted its parts
    replaced: bool = False  # True for an evaluation of weights that a rerun has replaced since
    manifest: Manifest


class Shown(BaseModel, frozen=True, extra="forbid"):
    root: str
    run: str
    stages: tuple[ShownStage, ...]
    head: int = 0  # the revision that the run consists of
    reruns: tuple[Rerun, ...] = ()  # finished stages that were asked to be done again, each as a revision
    choices: tuple[Choice, ...] = ()  # changes of the head, with their reasons, in the order of time

    @classmethod
    def of(cls, root: str, stored: Contents, manifests: Sequence[Manifest]) -> "Shown":
        current, revisions = {one.digest for one in stored.newest}, stored.revisions
        stages = (
            ShownStage(
                digest=one.digest,
                retired=one.key in stored.retired,
                replaced=one.stage.startswith(PREFIX) and one.inputs.get("weights") not in current,
                manifest=one,
            )
            for one in manifests
        )
        asked = {"head": revisions.head, "reruns": revisions.reruns, "choices": revisions.choices}
        return cls(root=root, run=stored.run, stages=tuple(stages), **asked)


class Verifications(BaseModel, frozen=True, extra="forbid"):
    root: str
    runs: tuple[Verification, ...]

    @computed_field
    @property
    def sound(self) -> bool:
        return all(one.sound for one in self.runs)


class Unlocked(BaseModel, frozen=True, extra="forbid"):
    run: str
    free: bool
    explanation: str


def of_listing(listing: Listing) -> list[str]:
    """One line per run, then the runs whose records cannot be read, with the reason."""
    rows = [("RUN", "ITERATION", "LAST STAGE", "FINISHED (UTC)", "BEGAN FROM", "DRIVEN BY")]
    for one in listing.runs:
        finished = f"{one.finished:%Y-%m-%d %H:%M:%S}" if one.finished else "-"
        place = "-" if one.iteration is None else str(one.iteration)
        stage = "DAMAGED" if one.damaged else str(one.stage or "-")
        rows.append((one.run, place, stage, finished, one.parent or "-", one.driven_by or "-"))
    damaged = [f"{one.run}: {one.damaged}" for one in listing.runs if one.damaged]
    return [*table(rows), *damaged] if listing.runs else [f"no runs in {listing.root}"]


def of_shown(shown: Shown, in_detail: bool) -> list[str]:
    if in_detail:
        return [line for stage in shown.stages for line in _detail(stage)]
    rows = [("ITERATION", "STAGE", "MANIFEST", "PARTS", "SIZE", "SECONDS", "FINISHED (UTC)", "")]
    for stage in shown.stages:
        one = stage.manifest
        stored = str(len(one.parts)), size(one.size)
        took = f"{one.metrics.get('seconds') or 0:.2f}", f"{one.finished:%Y-%m-%d %H:%M:%S}"
        rows.append((str(one.iteration), one.stage, stage.digest[:12], *stored, *took, _remarks(stage)))
    if not shown.stages:
        return [f"run {shown.run} has committed nothing yet"]
    return [*table(rows), *_revisions(shown)]


def _revisions(shown: Shown) -> list[str]:
    if not shown.reruns:
        return []
    rows = [("REVISION", "MADE IN", "DOES AGAIN", "ASKED BY", "ASKED (UTC)", "REASON", "")]
    for one in shown.reruns:
        remarks = ["other seeds"] if one.new_seeds else []
        remarks += [f"{key}={value}" for key, value in one.settings.items()]
        asked = f"{one.time:%Y-%m-%d %H:%M:%S}"
        rows.append((str(one.revision), str(one.parent), str(one), one.asked_by, asked, one.reason, ", ".join(remarks)))
    return ["", *table(rows), f"revision {shown.head} is the head"]


def of_weights_lineage(lineage: WeightsLineage) -> list[str]:
    opening = [f"weights of version {lineage.version} of run {lineage.run}"]
    opening += [f"tensors             {lineage.weights_digest or 'not served yet'}"]
    if lineage.sampled_by is not None:
        mean = "not known" if lineage.reward_mean is None else f"{lineage.reward_mean:.4f}"
        opening += [f"learned from        samples of version {lineage.sampled_by}, mean reward {mean}"]
        opening += [f"prompts             {len(lineage.prompts)}: {some(lineage.prompts, _NAMED)}"]
    if lineage.selected:
        samples = sum(one.selected for one in lineage.selected)
        opening += [f"learned from        {samples} stored samples, selected from"]
        opening += [f"                    {one.selected} of {one.rows} of {one.place}" for one in lineage.selected]
    return [*opening, "", *_steps(lineage.steps)]


def of_sample_lineage(found: SampleLineage) -> list[str]:
    score = found.reward_status or "not scored yet" if found.reward is None else f"{found.reward:g}"
    versions = ", ".join(map(str, found.weight_versions))
    return [
        f"sample {found.sample_id} of prompt {found.prompt_id!r} of iteration {found.iteration} of run {found.run}",
        f"prompt              {found.prompt!r}",
        f"sampled by          weight version {versions}, weight-sync {found.weights or 'unknown'}",
        f"seed                {found.seed}",
        f"response            {found.response_tokens} tokens, ended by {found.finish_reason}",
        f"reward              {score}",
        f"stored in           rollout {found.rollout}",
        "",
        *(_steps(found.used_by) if found.used_by else ["no step has learned from it yet"]),
    ]


def of_verification(report: Verification) -> list[str]:
    found = [f"{finding.fault:<14}{finding.key}\n              {finding.detail}" for finding in report.findings]
    verdict = "sound" if report.sound else "NOT SOUND"
    retired = f"; {report.retired} states deleted by retention" if report.retired else ""
    read = f"{report.manifests} manifests and {report.parts} parts ({size(report.bytes)}) read{retired}"
    return [*found, f"run {report.run} is {verdict}: {read}, {count(len(report.findings), 'finding')}"]


def of_collection(found: Collection, each: bool = False) -> list[str]:
    """One line for each stage of an iteration and each reason, or with `each` for each object; the total, and why there
    may be more."""
    rows = [(one.key, size(one.bytes), one.reason) for one in found.garbage]
    if not each:
        rows = [
            (place, count(len(some), "object"), size(sum(one.bytes for one in some)), reason)
            for (place, reason), some in _by_place(found.garbage).items()
        ]
    verb = "removed, {} freed" if found.applied else "can be removed, which would free {}: --apply does it"
    unreadable = [f"unreadable, of run {one.run}: {one.reason}" for one in found.unreadable]
    kept = ["No part counts as garbage until these records can be read, because they may name it:", *unreadable]
    total = f"{count(len(found.garbage), 'object')} of run {found.run} {verb.format(size(found.bytes))}"
    total = total if found.garbage else f"nothing of run {found.run} can be removed"
    return [*table(rows), total, *(kept if unreadable else [])]


def _by_place(garbage: Sequence[Garbage]) -> dict[tuple[str, str], list[Garbage]]:
    found: dict[tuple[str, str], list[Garbage]] = {}
    for one in garbage:
        place = layout.place_of(one.key)
        name = "-" if place is None else f"{place[1]} of iteration {place[0]}"
        found.setdefault((name, one.reason), []).append(one)
    return found


def of_configuration(tables: Sequence[Table]) -> list[str]:
    lines: list[str] = []
    for one in (form for form_or_table in tables for form in (form_or_table, *form_or_table.instead)):
        rows = [(key.name, key.kind, default_of(key), key.role, key.text) for key in one.keys]
        lines += [f"[{one.path}]  {one.text}", *(f"  {line}" for line in table(rows)), ""]
    return lines[:-1]


def _run(step: Step) -> str:
    """The run that has a step; a fork's came from another run, where its iteration may have another number."""
    return f"{step.run} (from {step.origin.run})" if step.origin else step.run


def _steps(steps: Sequence[Step]) -> list[str]:
    rows = [("RUN", "ITERATION", "STAGE", "MANIFEST", "ROWS", "SIZE", "CODE", "CONFIG", "FINISHED (UTC)")]
    for one in reversed(steps):
        made = _run(one), str(one.iteration), one.stage, one.digest[:12]
        by = one.code_version, one.config_digest[:12], f"{one.finished:%Y-%m-%d %H:%M:%S}"
        rows.append((*made, str(one.rows or "-"), size(one.bytes), *by))
    return table(rows)


def _detail(stage: ShownStage) -> Iterator[str]:
    one = stage.manifest
    yield f"{one.stage} of iteration {one.iteration} of run {one.run} {_remarks(stage)}".rstrip()
    yield f"manifest            {stage.digest}, revision {one.revision}"
    yield f"configuration       {one.config_digest}"
    yield f"code                {one.code_version}"
    yield f"done by             {one.writer}, attempt {one.attempt}, lease epoch {one.epoch or '-'}"
    yield f"from ... to         {one.started:%Y-%m-%d %H:%M:%S} ... {one.finished:%Y-%m-%d %H:%M:%S} UTC"
    if one.schema_fingerprint:
        yield f"schema              {one.schema_fingerprint}"
    # `report/warmup.csv` has the metrics of single steps
    metrics = {name: value for name, value in one.metrics.items() if not name.startswith(STEP)}
    for title, values in (("inputs", one.inputs), ("facts", one.facts), ("metrics", metrics)):
        if values:
            yield f"{title}:"
            yield from (f"  {line}" for line in table([(name, str(value)) for name, value in values.items()]))
    if one.parts:
        yield "parts:"
        rows = [(part.name, size(part.bytes), str(part.rows or "-"), part.digest, part.key) for part in one.parts]
        yield from (f"  {line}" for line in table(rows))


def _remarks(stage: ShownStage) -> str:
    origin = stage.manifest.origin
    remarks = [f"taken from {origin.run}"] if origin else []
    remarks += [f"revision {stage.manifest.revision}"] if stage.manifest.revision else []
    remarks += ["of weights that were replaced"] if stage.replaced else []
    return ", ".join([*remarks, *(["parts deleted"] if stage.retired else [])])
