"""Origin and use of weights and samples, found by following the digests in manifests."""

from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from pydantic import BaseModel

from storage.backends.root import Root
from storage.errors import InputError, StorageError
from storage.ids import Workflow
from storage.manifest import Manifest, Origin
from storage.parts import read_parts, read_table
from storage.schema import PROMPTS, REWARD, ROLLOUT, SELECTION
from storage.selection import SHARE, Source, read_sources
from storage.turns import ended_by, sampled_by
from storage.upkeep.catalog import contents, names_of, require_run, runs, survey


class Step(BaseModel, frozen=True, extra="forbid"):
    run: str
    iteration: int
    stage: str
    digest: str  # identity of its manifest
    inputs: dict[str, str]  # identities of what it was made from, by role
    rows: int  # rows of its tables
    bytes: int  # size of its parts
    code_version: str  # version of Ratchet that did it
    config_digest: str  # configuration it was done under
    finished: datetime  # time of the commit (UTC)
    origin: Origin | None  # the run that did the work, if this one was forked


class WeightsLineage(BaseModel, frozen=True, extra="forbid"):
    run: str
    version: int  # weight version: the iteration whose training made it
    weights_digest: str | None  # identity of the tensors that were served, if they were
    steps: tuple[Step, ...]  # all stages that they come from, oldest first; the last is the training that made them
    sampled_by: int | None  # weight version that sampled what the last step was trained on; None for the first state
    prompts: tuple[str, ...]  # ids of the prompts the last step was trained on
    reward_mean: float | None  # mean score of those samples
    selected: tuple[Source, ...] = ()
    """The rollouts, of any run, that their training samples were selected from; empty if they were not selected."""


class SampleLineage(BaseModel, frozen=True, extra="forbid"):
    run: str
    iteration: int
    prompt_id: str
    sample_id: int
    prompt: str | None  # text of the prompt
    response_tokens: int  # number of sampled tokens
    finish_reason: str | None  # of its last turn that has one
    seed: int
    weight_versions: tuple[int, ...]  # versions that sampled it, oldest first
    weights: str | None  # identity of the weight-sync that served the newest of them
    rollout: str  # identity of the rollout that it is a row of
    reward: float | None  # its score, if it has one
    reward_status: str | None  # ok, error or timeout; None if it was not scored yet
    used_by: tuple[Step, ...]  # training steps on it, including those of forks


def of_weights(root: Root, workflow: Workflow, run: str, version: int, revision: int | None = None) -> WeightsLineage:
    """The origin of weight version `version`. Raises InputError if the run, revision or version is not there."""
    require_run(root, run)
    newest = contents(root, run, names_of(root, run, revision)).newest
    made = _stage(newest, version, workflow.holds_state)
    if made is None:
        there = [manifest.iteration for manifest in newest if manifest.stage == workflow.holds_state]
        raise InputError(f"run {run!r} has no weights of version {version}, only {there}")
    ancestors = list(_ancestors(made, {manifest.digest: manifest for manifest in newest}))
    earlier = _before(root, workflow, ancestors)
    by_digest = {one.digest: one for one in ancestors}
    rollout, reward = (by_digest.get(made.inputs.get(role, "")) for role in ("rollout", "reward"))
    selection = next((one for one in ancestors if one.stage == workflow.selects), None)
    sync = _stage(newest, version, workflow.ends_iteration)
    place = {manifest.digest: number for number, manifest in enumerate([*earlier, *newest])}
    asked = read_table(root, rollout, ROLLOUT, ["prompt_id"])["prompt_id"].unique().to_pylist() if rollout else ()
    return WeightsLineage(
        run=run,
        version=version,
        weights_digest=_fact(sync, "weights_digest", str),
        steps=tuple(_step(one) for one in sorted([*earlier, *ancestors], key=lambda one: place[one.digest])),
        sampled_by=_fact(rollout, "weight_version", int),
        prompts=tuple(asked),
        reward_mean=reward.metrics.get("reward_mean") if reward else None,
        selected=tuple(read_sources(root, selection)) if selection else (),
    )


def of_sample(
    root: Root,
    workflow: Workflow,
    run: str,
    iteration: int,
    prompt_id: str,
    sample_id: int,
    revision: int | None = None,
) -> SampleLineage:
    """Origin and use of one sample. Raises InputError if the run, revision or sample is not there."""
    require_run(root, run)
    newest = contents(root, run, names_of(root, run, revision)).newest
    rollout = _stage(newest, iteration, workflow.samples)
    if rollout is None:
        raise InputError(f"run {run!r} has no rollout of iteration {iteration}")
    sample = _one_row(read_table(root, rollout, ROLLOUT), prompt_id, sample_id)
    if sample is None:
        raise InputError(f"iteration {iteration} of run {run!r} has no sample {sample_id} of prompt {prompt_id!r}")
    reward = _stage(newest, iteration, workflow.scores)
    score = _one_row(read_table(root, reward, REWARD), prompt_id, sample_id) if reward else None
    versions = sampled_by(sample)
    sync = _stage(newest, versions[-1], workflow.ends_iteration) if versions else None
    return SampleLineage(
        run=run,
        iteration=iteration,
        prompt_id=prompt_id,
        sample_id=sample_id,
        prompt=_prompt_text(root, _stage(newest, 0, workflow.prepares), prompt_id),
        response_tokens=sum(sample["sampled"]),
        finish_reason=ended_by(sample),
        seed=sample["seed"],
        weight_versions=versions,
        weights=sync.digest if sync else None,
        rollout=rollout.digest,
        reward=score["reward"] if score else None,
        reward_status=score["status"] if score else None,
        used_by=tuple(_users(root, workflow, rollout, prompt_id, sample_id)),
    )


def parse_sample(text: str) -> tuple[str, int]:
    """Prompt id, which may hold '/' and '@', and sample id of `PROMPT_ID/SAMPLE_ID`. Raises InputError."""
    prompt_id, _, sample_id = text.rpartition("/")
    if not (prompt_id and sample_id.isascii() and sample_id.isdigit()):
        fact = f"--sample {text!r} is not of the form PROMPT_ID/SAMPLE_ID"
        raise InputError(f"{fact}; its iteration is named with the run, as in my-run@6")
    return prompt_id, int(sample_id)


def _ancestors(manifest: Manifest, known: Mapping[str, Manifest]) -> Iterator[Manifest]:
    seen, open_ends = set(), [manifest]
    while open_ends:
        one = open_ends.pop()
        if one.digest not in seen:
            seen.add(one.digest)
            yield one
            open_ends += [known[digest] for digest in one.inputs.values() if digest in known]


def _before(root: Root, workflow: Workflow, ancestors: Sequence[Manifest]) -> list[Manifest]:
    """Manifests in other runs of the root from which the first state of a branch was made; oldest first."""
    first = next((one for one in ancestors if one.stage == workflow.holds_state and one.iteration == 0), None)
    if first is None or first.origin is None or first.origin.run not in runs(root):
        return []
    newest = survey(root, first.origin.run)[0].newest
    original = next((one for one in newest if one.digest == first.origin.digest), None)
    if original is None or original.iteration == 0:
        return []
    chain = {one.digest for one in _ancestors(original, {one.digest: one for one in newest})} - {original.digest}
    made_from = [one for one in newest if one.digest in chain]
    return [*_before(root, workflow, made_from), *made_from]


def _users(root: Root, workflow: Workflow, rollout: Manifest, prompt_id: str, sample_id: int) -> Iterator[Step]:
    """Training steps on a sample in any run of the root, as far as runs can be read. They are made from its rollout,
    from a fork's copy of it, or from a selection that holds it."""
    there = [tuple(survey(root, run)[0].manifests.values()) for run in runs(root)]  # of all revisions
    samples = [one for every in there for one in every if one.stage == workflow.samples]
    same = {one.digest for one in samples if _source(one) == _source(rollout)}
    for every in there:
        selections = [one for one in every if one.stage == workflow.selects]
        shares = {one.digest: _shares(root, one, same, prompt_id, sample_id) for one in selections}
        for one in every:
            made_of = set(one.inputs.values())
            held = any(one.facts.get(SHARE) in shares.get(digest, ()) for digest in made_of)
            if one.stage == workflow.holds_state and (held or same & made_of):
                yield _step(one)


def _shares(root: Root, selection: Manifest, rollouts: set[str], prompt_id: str, sample_id: int) -> set[int]:
    """The tables of a selection that hold a sample of one of some rollouts, by number."""
    try:
        named = read_sources(root, selection)
    except StorageError:
        return set()  # `verify` names it
    sources = [number for number, one in enumerate(named) if one.rollout in rollouts]
    tables = selection.tables if sources else ()
    found: set[int] = set()
    for number, part in enumerate(tables):
        table = read_parts(root, [part], SELECTION, ["source", "prompt_id", "sample_id"])
        of_rollout = table.filter(pc.field("source").isin(sources))
        if _one_row(of_rollout, prompt_id, sample_id) is not None:
            found.add(number)
    return found


def _step(manifest: Manifest) -> Step:
    shared = {name: value for name, value in manifest if name in Step.model_fields}
    rows, digest = sum(part.rows or 0 for part in manifest.parts), manifest.digest
    config_digest = manifest.origin.config_digest if manifest.origin else manifest.config_digest
    return Step(**{**shared, "digest": digest, "rows": rows, "bytes": manifest.size, "config_digest": config_digest})


def _source(manifest: Manifest) -> str:
    """Identity of the manifest that the work was published under."""
    return manifest.digest if manifest.origin is None else manifest.origin.digest


def _stage(manifests: Sequence[Manifest], iteration: int, stage: str) -> Manifest | None:
    return next((one for one in manifests if (one.iteration, one.stage) == (iteration, stage)), None)


def _fact[T](manifest: Manifest | None, name: str, kind: type[T]) -> T | None:
    value = manifest.facts.get(name) if manifest else None
    return value if isinstance(value, kind) else None


def _one_row(table: pa.Table, prompt_id: str, sample_id: int) -> dict[str, Any] | None:
    found = table.filter((pc.field("prompt_id") == prompt_id) & (pc.field("sample_id") == sample_id))
    return found.slice(0, 1).to_pylist()[0] if found.num_rows else None


def _prompt_text(root: Root, prepared: Manifest | None, prompt_id: str) -> str | None:
    prompts = read_parts(root, prepared.tables if prepared else (), PROMPTS, ["prompt_id", "prompt"])
    found = prompts.filter(pc.field("prompt_id") == prompt_id)
    return found["prompt"][0].as_py() if found.num_rows else None
