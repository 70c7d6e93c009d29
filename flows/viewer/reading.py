"""Data of the pages about samples: what an iteration, a prompt group and a sample hold."""

import itertools
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow.compute as pc
from numpy.typing import NDArray

from flows.viewer.charts import Histogram, histogram
from flows.views.samples import Scored, read_scored
from storage.backends.root import Root
from storage.errors import InputError
from storage.manifest import find
from storage.parts import read_parts
from storage.schema import TRAINER
from storage.turns import ended_by, sampled_by, sampled_lengths, weight_versions
from tasks.config.stored import stored_config
from tasks.data.tokenizer import StoredTexts, texts_of
from tasks.stages.names import Stage
from tasks.stages.views import TRAINER_TABLE

TOKENS = 3000  # most tokens on one page
_BEFORE = 4  # tokens that are decoded with a token: some tokenizers need those before it for its blanks
_UNCERTAIN = (0.1, 0.5, 1.0, 2.0, 4.0, 8.0)  # nat: edges between the shades of surprise
_APART = (0.001, 0.01, 0.05, 0.1, 0.2, 0.5)  # nat: edges between the shades of a log-ratio
_VERSIONS = 4  # shades of weight versions


@dataclass(frozen=True)
class Group:
    prompt_id: str
    samples: int
    mean: float | None
    low: float | None
    high: float | None
    length: float


@dataclass(frozen=True)
class Token:
    place: int
    id: int
    text: str
    sampled: bool
    logprob: float
    trainer: float | None  # log-probability by the trainer, before the updates
    version: int
    advantage: float | None
    shade: str  # class of its colour

    @property
    def words(self) -> str:
        if not self.sampled:
            return f"token {self.place}: {self.text!r}, id {self.id}, not sampled: it counts in no loss"
        chance = f"log-probability {self.logprob:.4f} of the engine (p {np.exp(self.logprob):.3g}){self._trained}"
        return f"token {self.place}: {self.text!r}, id {self.id}, {chance}, weights {self.version}, {self._weighed}"

    @property
    def ratio(self) -> float | None:
        """Probability by the trainer, divided by that of the engine."""
        return None if self.trainer is None else float(np.exp(self.trainer - self.logprob))

    @property
    def _trained(self) -> str:
        return "" if self.trainer is None else f", {self.trainer:.4f} of the trainer, ratio {self.ratio:.4f}"

    @property
    def _weighed(self) -> str:
        return "no advantage" if self.advantage is None else f"advantage {self.advantage:+.4f}"


@dataclass(frozen=True)
class Turn:
    number: int
    role: str
    about: dict[str, Any]
    tokens: tuple[Token, ...]


@dataclass(frozen=True)
class TokenPage:
    row: dict[str, Any]  # its row of the archive's schema
    prompt: str | None
    advantage: float | None
    untrained: str | None  # why there are no log-probabilities by the trainer; None if there are
    finish_reason: str | None
    versions: tuple[int, ...]
    siblings: tuple[int, ...]  # numbers of all samples of the prompt
    turns: tuple[Turn, ...]
    begin: int
    count: int  # tokens of the response


def read_all(root: Root, run: str, iteration: int) -> Scored:
    return read_scored(root, run, iteration, stored_config(root, run).train.policy)


def distributions(found: Scored, iteration: int) -> list[Histogram]:
    oldest = weight_versions(found.table)[0].cast("float64").to_numpy(zero_copy_only=False)
    advantages = np.zeros(0) if found.advantages is None else found.advantages
    kinds = (
        ("Rewards", found.rewards),
        ("Sampled tokens of a response", sampled_lengths(found.table["sampled"])),
        ("Advantages", advantages),
        ("Staleness: updates between the weights that sampled and those that are trained", iteration - 1 - oldest),
    )
    return [made for title, values in kinds if (made := histogram(title, values)) is not None]


def groups(found: Scored) -> list[Group]:
    encoded = found.table["prompt_id"].combine_chunks().dictionary_encode()
    codes, lengths = encoded.indices.to_numpy(), sampled_lengths(found.table["sampled"])
    order = np.argsort(codes, kind="stable")
    parts = np.split(order, np.flatnonzero(np.diff(codes[order])) + 1) if len(order) else []
    made = [_group(str(encoded.dictionary[codes[rows[0]]]), found.rewards[rows], lengths[rows]) for rows in parts]
    return sorted(made, key=lambda one: (one.mean is None, one.mean))


def _group(prompt_id: str, rewards: NDArray[np.float64], lengths: NDArray[np.int64]) -> Group:
    there = rewards[~np.isnan(rewards)]
    figures = (float(there.mean()), float(there.min()), float(there.max())) if len(there) else (None, None, None)
    return Group(prompt_id, len(rewards), *figures, float(lengths.mean()))


def token_page(
    root: Root, run: str, iteration: int, prompt_id: str, sample_id: int, color: str, begin: int
) -> TokenPage:
    """A sample with at most TOKENS tokens from `begin` on. Raises InputError: there is no such sample."""
    found = read_all(root, run, iteration)
    of_prompt = found.table.append_column("row", [np.arange(found.table.num_rows)]).filter(
        pc.field("prompt_id") == prompt_id
    )
    siblings = of_prompt["sample_id"].to_pylist()
    if sample_id not in siblings:
        known = f"it has samples {siblings}" if siblings else "the iteration has not sampled this prompt"
        raise InputError(f"iteration {iteration} of run {run!r} has no sample {sample_id} of {prompt_id!r}: {known}")
    row = of_prompt.slice(siblings.index(sample_id), 1).to_pylist()[0]
    advantage = None if found.advantages is None else float(found.advantages[row["row"]])
    texts, (trainer, untrained) = texts_of(root, run), _by_trainer(root, run, iteration, prompt_id, sample_id)
    tokens = list(_tokens(row, texts, advantage, trainer, color, range(begin, begin + TOKENS)))
    turns = tuple(_turn(number, turn, tokens) for number, turn in enumerate(row["turns"], 1))
    return TokenPage(
        row=row,
        prompt=None if texts is None else texts.prompts.get(prompt_id),
        advantage=advantage,
        untrained=untrained,
        finish_reason=ended_by(row),
        versions=sampled_by(row),
        siblings=tuple(sorted(siblings)),
        turns=tuple(one for one in turns if one.tokens),
        begin=begin,
        count=len(row["response_tokens"]),
    )


def _by_trainer(
    root: Root, run: str, iteration: int, prompt_id: str, sample_id: int
) -> tuple[list[float] | None, str | None]:
    """Log-probabilities of the sampled tokens by the trainer before the iteration's updates; or None, and the reason
    why there are none."""
    manifest = find(root, run, iteration, Stage.TRAIN)
    if manifest is None:
        return None, "the iteration is not trained yet"
    if TRAINER_TABLE not in manifest.part_names:
        return None, "the state of the iteration was not stored (storage.save_every), nor is what was stored beside it"
    table = read_parts(root, [manifest.part(TRAINER_TABLE)], TRAINER)
    own = table.filter((pc.field("prompt_id") == prompt_id) & (pc.field("sample_id") == sample_id))
    found = own["logprobs"].to_pylist()[0]  # of its row after those of its other branches
    return found, None if found is not None else "the sample was not trained on"


def _turn(number: int, turn: dict[str, Any], tokens: Sequence[Token]) -> Turn:
    about = {name: turn[name] for name in ("finish_reason", "seconds", "cost") if turn[name] is not None}
    about |= {name: json.dumps(json.loads(turn[name]), indent=1) for name in ("calls", "results") if turn[name]}
    return Turn(number, turn["role"], about, tuple(one for one in tokens if turn["begin"] <= one.place < turn["end"]))


def _tokens(
    row: dict[str, Any],
    texts: StoredTexts | None,
    advantage: float | None,
    trainer: Sequence[float] | None,
    color: str,
    places: range,
) -> Iterator[Token]:
    ids, counted = row["response_tokens"], np.cumsum(row["sampled"])
    known = sorted({version for version in row["weight_version"] if version >= 0})
    here = range(places.start, min(places.stop, len(ids)))
    for place, text in zip(here, _texts(ids, texts, here), strict=True):
        sampled, logprob, version = (row[name][place] for name in ("sampled", "logprobs", "weight_version"))
        own = advantage if sampled else None
        trained = trainer[counted[place] - 1 - counted[-1]] if sampled and trainer is not None else None
        number = known.index(version) if version in known else 0
        shade = _shade(color, logprob, trained, number, own) if sampled else "other"
        yield Token(place, ids[place], text, sampled, logprob, trained, version, own, shade)


def _texts(ids: Sequence[int], texts: StoredTexts | None, places: range) -> list[str]:
    """Text that each token adds to that of the tokens before it."""
    if texts is None or texts.tokenizer is None:
        return [f"[{ids[place]}]" for place in places]
    spans = [(ids[max(place - _BEFORE, 0) : place], ids[place]) for place in places]
    rows = [row for before, own in spans for row in (before, [*before, own], [own])]
    decoded = itertools.batched(texts.tokenizer.decode_batch(rows, skip_special_tokens=False), 3)
    return [whole[len(before) :] if whole.startswith(before) else alone for before, whole, alone in decoded]


def _shade(color: str, logprob: float, trainer: float | None, version: int, advantage: float | None) -> str:
    if color == "version":
        return f"version-{version % _VERSIONS}"
    if color == "advantage":
        return "plain" if not advantage else "better" if advantage > 0 else "worse"
    if color not in ("trainer", "ratio"):
        return f"surprise-{int(np.searchsorted(_UNCERTAIN, -logprob))}"
    if trainer is None:
        return "plain"
    edges, value = (_UNCERTAIN, -trainer) if color == "trainer" else (_APART, abs(trainer - logprob))
    return f"surprise-{int(np.searchsorted(edges, value))}"
