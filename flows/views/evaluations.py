"""The evaluations that a run has stored, each with its change since the one before it."""

from collections.abc import Iterable, Sequence
from datetime import datetime

from pydantic import BaseModel, JsonValue

from flows.views.output import rounded
from storage.backends.root import Root
from storage.manifest import Manifest
from storage.upkeep.catalog import Names, names, survey
from tasks.config.evaluation import PASS, PREFIX, SCORED_BY, SETTINGS
from tasks.stages.names import Stage

_DURATIONS = "seconds"  # end of their names


class EvaluationRecord(BaseModel, frozen=True, extra="forbid"):
    run: str
    iteration: int  # iteration whose weights answered
    replaced: bool = False  # True if a rerun has replaced these weights since: then nothing is compared with it
    manifest: str
    stored: str
    finished: datetime
    settings: dict[str, JsonValue]
    figures: dict[str, float | None]
    """`greedy/reward`, `greedy/pass@1`, `sampled/pass@K` and so on, those of a data source as `greedy/SOURCE/reward`;
    `errors` and `timeouts` count answers without a score."""
    passing: str | None = None  # the condition by which answers pass; None if it is not known which do
    scored_by: str = ""  # identity of the reward: figures of two rewards are not compared
    before: int | None = None
    """Iteration of the newest earlier evaluation with the same settings and reward, which `change` is against."""
    apart: int | None = None  # iteration of a newer one with the same settings that another reward has scored
    change: dict[str, float] = {}  # difference of each figure from that one


def evaluations(root: Root, run: str) -> list[EvaluationRecord]:
    """All evaluations of a run, by iteration and time. One listing, and one reading for each evaluation."""
    recorded = names(root, run)
    found = _readable(root, run, (key for key in recorded.manifests if f"/{PREFIX}" in key))
    numbers = {one.iteration for one in found}
    syncs = (key for (at, stage), key in recorded.newest.items() if at in numbers and stage == Stage.WEIGHT_SYNC)
    served = {one.digest for one in _readable(root, run, syncs)}
    return compared([_record(root, one, one.inputs.get("weights") not in served) for one in found])


def _readable(root: Root, run: str, keys: Iterable[str]) -> list[Manifest]:
    """The manifests at some keys, by iteration and time. `ratchet verify` names those that cannot be read."""
    return [*survey(root, run, Names(manifests=tuple(keys)))[0].manifests.values()]


def compared(records: Sequence[EvaluationRecord]) -> list[EvaluationRecord]:
    """Each with its change since the one before it that has the same settings, and is scored by the same reward."""
    newest: dict[str, EvaluationRecord] = {}
    alike: dict[tuple[str, str], EvaluationRecord] = {}
    made: list[EvaluationRecord] = []
    for one in records:
        asked = repr(sorted(one.settings.items()))
        if one.replaced:
            made.append(one)
            continue
        by = (asked, one.scored_by)
        before, last = alike.get(by), newest.get(asked)
        apart = None if last is None or last is before else last.iteration
        made.append((one if before is None else _against(one, before)).model_copy(update={"apart": apart}))
        alike[by] = newest[asked] = one
    return made


def _against(now: EvaluationRecord, before: EvaluationRecord) -> EvaluationRecord:
    change = {
        name: value - earlier
        for name, value in now.figures.items()
        if value is not None and (earlier := before.figures.get(name)) is not None
    }
    return now.model_copy(update={"before": before.iteration, "change": change})


def evaluation_rows(record: EvaluationRecord) -> list[dict[str, str | float | int | None]]:
    return [
        {
            "figure": name,
            "value": rounded(value),
            "before": None if (change := record.change.get(name)) is None else rounded((value or 0.0) - change),
            "change": rounded(change),
        }
        for name, value in sorted(record.figures.items())
    ]


def evaluation_lines(record: EvaluationRecord) -> list[str]:
    lines = [f"weights of iteration {record.iteration} of run {record.run}{compared_with(record)}"]
    if record.passing is None:
        lines.append('which answers pass is not known, so there is no pass@k: give --pass, as in --pass "right >= 1"')
    else:
        lines.append(f"an answer passes if {record.passing}")
    for row in evaluation_rows(record):
        value, change = row["value"], row["change"]
        shown = "none" if value is None else f"{value:.4g}"
        lines.append(f"{row['figure']!s:<28} {shown:>10}{'' if change is None else f'  {change:+.4g}'}")
    return [*lines, f"stored in {record.stored}"]


def compared_with(record: EvaluationRecord) -> str:
    """Name the evaluation that the changes are against, and one that is not compared, as the end of a sentence."""
    since = "" if record.before is None else f", change since iteration {record.before}"
    if record.apart is None:
        return since
    return f"{since}; not compared with iteration {record.apart}, which another reward function has scored"


def _record(root: Root, manifest: Manifest, replaced: bool) -> EvaluationRecord:
    settings, passing = manifest.facts.get(SETTINGS), manifest.facts.get(PASS)
    same = {"run": manifest.run, "iteration": manifest.iteration, "finished": manifest.finished}
    return EvaluationRecord(
        **same,
        replaced=replaced,
        manifest=manifest.digest,
        stored=f"{root.url}/{manifest.key}",
        passing=None if passing is None else str(passing),
        scored_by=str(manifest.facts.get(SCORED_BY, "")),
        settings=settings if isinstance(settings, dict) else {},
        figures={name: value for name, value in manifest.metrics.items() if not name.endswith(_DURATIONS)},
    )
