"""Stored samples as a person reads them: texts, rewards, advantages. Imports no torch, Ray, vLLM or Prefect."""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pydantic import BaseModel

from flows.views.output import figure, some
from storage.backends.root import Root, open_root
from storage.errors import InputError
from storage.manifest import Manifest, find, load, need
from storage.revisions import read_revisions
from storage.turns import ended_by, sampled_by
from storage.upkeep.archive import SAMPLES, Texts, scored, without_texts
from storage.upkeep.catalog import names, names_of, require_run
from tasks.config.stored import stored_config
from tasks.data.tokenizer import StoredTexts, texts_of
from tasks.stages.names import Stage
from trainer_core.batches.reading import read_samples
from trainer_core.objectives.advantages import sample_advantages
from trainer_core.objectives.objective_config import PolicyConfig
from trainer_core.objectives.scored import scored_of
from trainer_core.objectives.selection import trained_on

_NAMED = 8  # ids in a message

Rows = NDArray[np.int64]


class Sample(BaseModel, frozen=True, extra="forbid"):
    prompt_id: str
    sample_id: int  # number within its prompt group
    prompt: str | None  # text of the prompt; None if it is not stored
    response: str | None
    """Text of the response, without stop, padding and BOS tokens; None if the run's tokenizer is not known."""
    reward: float | None  # None if it is not scored, or could not be
    components: dict[str, float | None] | None
    status: str | None  # outcome of scoring: ok, or the reason why there is no reward; None if it is not scored yet
    detail: str | None  # error of scoring, in words
    advantage: float | None
    """Its reward relative to its group, as the trainer computes it; None if it is not scored yet."""
    finish_reason: str | None  # stop, length or abort; None if no turn was sampled
    tokens: int
    weight_versions: tuple[int, ...]  # iterations whose weights sampled it, oldest first

    @property
    def versions(self) -> str:
        return ", ".join(map(str, self.weight_versions))


class Samples(BaseModel, frozen=True, extra="forbid"):
    root: str
    run: str
    iteration: int
    total: int  # samples of the iteration
    samples: tuple[Sample, ...]


@dataclass(frozen=True)
class Choice:
    best: int = 0  # with the highest rewards
    worst: int = 0  # with the lowest rewards; a sample without a reward is neither
    prompt: str | None = None  # all of this prompt
    random: int = 0  # drawn with `seed`
    seed: int = 0

    def rows(self, prompts: Sequence[str], rewards: NDArray[np.float64]) -> Rows:
        """The rows of the chosen samples, each once. Rewards are (N,), NaN where there is none. Raises InputError if
        the prompt has no samples."""
        ranked = np.argsort(-rewards, kind="stable")[: np.count_nonzero(~np.isnan(rewards))]
        drawn = np.random.default_rng(self.seed).permutation(len(rewards))[: self.random]
        worst = ranked[max(self.best, len(ranked) - self.worst) :]
        found = np.concatenate((ranked[: self.best], worst, self._of_prompt(prompts), drawn))
        return np.array(list(dict.fromkeys(found.tolist())), dtype=np.int64)

    def _of_prompt(self, prompts: Sequence[str]) -> Rows:
        rows = np.array([row for row, name in enumerate(prompts) if name == self.prompt], dtype=np.int64)
        if self.prompt is not None and not len(rows):
            there = some(list(dict.fromkeys(prompts)), _NAMED)
            raise InputError(f"prompt {self.prompt!r} has no samples in this iteration: it sampled {there}")
        return rows


def read_chosen(root: Root, run: str, iteration: int | None, choice: Choice) -> Samples:
    """The chosen samples of an iteration, by default the newest that has any. Raises InputError if there is no such run
    or prompt, or the iteration has no samples."""
    require_run(root, run)
    policy = stored_config(root, run).train.policy
    return chosen(root, run, _sampled(root, run, iteration), choice, texts_of(root, run), policy)


def scored_samples(
    root: str, run: str, iterations: Collection[int] | None = None, *, revision: int | None = None, texts: bool = False
) -> pa.Table:
    """The table of `ratchet.samples`, with the columns of `storage.upkeep.archive.SAMPLES`. Raises InputError as that
    does.

    Rollout and reward of each iteration are those of one revision, joined by prompt and sample; what was replaced, or
    is not finished, is not among them. Columns of scores are null where nothing is scored yet."""
    store = open_root(root)
    require_run(store, run)
    newest = names_of(store, run, revision).newest
    there = sorted(at for at, stage in newest if stage == Stage.ROLLOUT)
    if iterations is not None and (missing := sorted(set(iterations) - set(there))):
        raise InputError(f"iterations {missing} of run {run!r} have no samples: those of {there} do")
    decoded = (texts_of(store, run) if texts else None) or without_texts
    tables = [_joined(store, newest, at, decoded) for at in there if iterations is None or at in iterations]
    return pa.concat_tables(tables) if tables else SAMPLES.empty_table()


def _joined(store: Root, newest: Mapping[tuple[int, str], str], iteration: int, texts: Texts) -> pa.Table:
    rewards = newest.get((iteration, Stage.REWARD))
    rollout = load(store, newest[iteration, Stage.ROLLOUT])
    return scored(store, rollout, None if rewards is None else load(store, rewards), texts)


def chosen(
    root: Root, run: str, iteration: int, choice: Choice, texts: StoredTexts | None, policy: PolicyConfig
) -> Samples:
    read = read_scored(root, run, iteration, policy)
    table, advantages = read.table, read.advantages
    rows = choice.rows(table["prompt_id"].to_pylist(), read.rewards)
    few = table.take(rows)
    columns = texts(few) if texts is not None else (pa.nulls(len(rows)), pa.nulls(len(rows)))
    for name, column in zip(("prompt", "response"), columns, strict=True):
        few = few.set_column(few.schema.get_field_index(name), name, column)
    values = [None] * len(rows) if advantages is None else advantages[rows].tolist()
    samples = tuple(_sample(row, value) for row, value in zip(few.to_pylist(), values, strict=True))
    return Samples(root=root.url, run=run, iteration=iteration, total=table.num_rows, samples=samples)


@dataclass(frozen=True)
class Scored:
    table: pa.Table  # schema `storage.upkeep.archive.SAMPLES`, without texts
    advantages: NDArray[np.float32] | None
    """(N,) as the trainer computes them; None if nothing is scored yet, or the loss weighs none."""

    @property
    def rewards(self) -> NDArray[np.float64]:
        """(N,) rewards, NaN where there is none."""
        rewards = self.table["reward"].cast(pa.float64()).to_numpy()
        return np.where(np.isfinite(rewards), rewards, np.nan)


def read_scored(root: Root, run: str, iteration: int, policy: PolicyConfig) -> Scored:
    """The samples of an iteration that has a rollout, with their scores and advantages."""
    seen = read_revisions(root, run)  # once: both are of one revision
    rollout, reward = need(root, run, iteration, Stage.ROLLOUT, seen), find(root, run, iteration, Stage.REWARD, seen)
    advantages = None if reward is None else _advantages(root, rollout, reward, policy)
    return Scored(scored(root, rollout, reward), advantages)


def _advantages(root: Root, rollout: Manifest, reward: Manifest, policy: PolicyConfig) -> NDArray[np.float32] | None:
    samples = read_samples(root, rollout, reward)
    scored = scored_of(samples, trained_on(policy, samples)[samples.owners])
    return sample_advantages(policy, scored)


def _sample(row: dict, advantage: float | None) -> Sample:
    same = {name: row[name] for name in ("prompt_id", "sample_id", "prompt", "response", "status")}
    named = row.get("components")
    components = None if named is None else {name: _finite(value) for name, value in dict(named).items()}
    scores = {"reward": _finite(row["reward"]), "components": components, "detail": row["detail"] or None}
    made = {"finish_reason": ended_by(row), "tokens": len(row["response_tokens"]), "weight_versions": sampled_by(row)}
    return Sample(**same, **scores, **made, advantage=advantage)


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _sampled(root: Root, run: str, iteration: int | None) -> int:
    there = sorted(at for at, stage in names(root, run).newest if stage == Stage.ROLLOUT)
    if not there:
        raise InputError(f"run {run!r} has sampled nothing yet: it has no rollout")
    if iteration is not None and iteration not in there:
        fact = f"iteration {iteration} of run {run!r} has no samples"
        raise InputError(f"{fact}: iterations {there[0]} to {there[-1]} do")
    return there[-1] if iteration is None else iteration


def sample_lines(found: Samples) -> list[str]:
    lines = [f"iteration {found.iteration} of run {found.run}: {len(found.samples)} of {found.total} samples"]
    for one in found.samples:
        lines += ["", _head(one), *_block("prompt", one.prompt), *_block("response", one.response)]
        lines += _block("detail", one.detail) if one.detail else []
    return lines


def _head(one: Sample) -> str:
    score = one.status or "not scored yet"
    if one.reward is not None:
        parts = ", ".join(f"{name} {figure(value)}" for name, value in (one.components or {}).items())
        score = f"reward {figure(one.reward)}{f' ({parts})' if parts else ''}"
    advantage = "" if one.advantage is None else f" | advantage {one.advantage:+.3f}"
    sampled = f"{one.finish_reason}, {one.tokens} tokens | weights {one.versions}"
    return f"{one.prompt_id}/{one.sample_id} | {score}{advantage} | {sampled}"


def _block(title: str, text: str | None) -> Iterable[str]:
    lines = ["(not known)"] if text is None else _lines(text)
    return [f"{title if number == 0 else '':<10}{line}" for number, line in enumerate(lines)]


def _lines(text: str) -> list[str]:
    """The lines of a text in which blanks at the ends of lines, and line feeds at its end, can be seen."""
    body = text.rstrip("\n")
    ends = "\\n" * (len(text) - len(body))
    lines = [printable(line.rstrip()) + _spelled(line[len(line.rstrip()) :]) for line in body.split("\n")]
    return [*lines[:-1], lines[-1] + ends] if text else ["(empty)"]


def _spelled(blanks: str) -> str:
    return "".join("\\x20" if blank == " " else repr(blank)[1:-1] for blank in blanks)


def printable(text: str) -> str:
    """A text in which what would control a terminal is spelled out."""
    return "".join(sign if sign.isprintable() or sign == "\t" else repr(sign)[1:-1] for sign in text)
