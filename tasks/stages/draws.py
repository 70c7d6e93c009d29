"""Draws of a rollout: the next prompts, and with dynamic sampling further ones until enough groups have a spread of
rewards (DAPO, arXiv 2503.14476, section 3.2). The scores of a draw are recorded before they decide about the next one,
so a process that takes over draws the same."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pydantic import JsonValue

from storage.digest import value_digest
from storage.manifest import Part
from storage.parts import read_parts
from storage.schema import REWARD, ROLLOUT
from storage.turns import with_finish_reasons
from storage.unfinished import find_piece, keep_piece
from tasks.config.evaluation import SCORED_BY
from tasks.data.drawing import draw, repetitions
from tasks.environments.scores import Kept, play_metrics
from tasks.rewards.pool import Response
from tasks.rewards.sample import Score
from tasks.rewards.scoring import Scores, score_responses, sources_of, useful_groups
from tasks.stages.prepared import Records, prompts, shares, text_codec
from tasks.stages.scored import accepted, judges_of, responses_of, scored_by, unchanged, with_scores
from tasks.stages.stage import Work
from tasks.stages.views import Prepared, Rollouts

_REWARDS = "rewards-"  # how the names of parts with scores begin


@dataclass(frozen=True)
class Groups:
    prompts: pa.Table
    repeats: NDArray[np.int64]
    """(groups,) how often each prompt was drawn earlier in this rollout: its sample numbers continue from there."""
    position: int  # prompts drawn since the run began, before the first of these

    @property
    def positions(self) -> range:
        """Place of each prompt in the drawing."""
        return range(self.position, self.position + self.prompts.num_rows)

    def sample_ids(self, samples: int) -> NDArray[np.int64]:
        """Numbers of the samples within their prompt groups, (groups * samples,)."""
        return (self.repeats[:, None] * samples + np.arange(samples)).reshape(-1)


def drawn(work: Work, prepared: Prepared, cursor: int, first: int, count: int) -> list[Groups]:
    """The next `count` prompts of a rollout that begins after the first `cursor` and has drawn `first` so far, cut into
    pieces of `rollout.groups_per_part` groups."""
    table, data = prompts(work.context, prepared, "train"), work.config.data
    sources = shares(prepared, data)
    rows = draw(table.num_rows, cursor, first + count, work.config.run.seed, data.shuffle, sources)
    repeats, size = repetitions(rows), work.config.rollout.groups_per_part
    places = [slice(start, min(start + size, len(rows))) for start in range(first, len(rows), size)]
    return [Groups(table.take(rows[place]), repeats[place], cursor + place.start) for place in places]


@dataclass
class Refill:
    """The draws of one rollout. Without `rollout.most_prompts` there is one, and nothing is scored."""

    work: Work
    prepared: Prepared
    decides: Sequence[JsonValue]  # values that decide the samples, beside their places
    groups: list[Groups] = field(default_factory=list)  # prompts drawn so far
    played: list[Kept] = field(default_factory=list)  # conversations with environments about them
    parts: list[Part] = field(default_factory=list)
    """Scores of the samples, a part a draw; none where environments gave them."""
    _samples: pa.Table = field(default_factory=ROLLOUT.empty_table)
    _rewards: pa.Table = field(default_factory=REWARD.empty_table)

    @property
    def next(self) -> int:
        """Number of prompts to draw next; 0 if no more are needed, or allowed."""
        section = self.work.config.rollout
        if not self.drawn:
            return section.prompts
        if section.most_prompts is None:
            return 0
        return further(section.prompts, self.drawn, useful_groups(self._rewards), section.most_prompts)

    @property
    def drawn(self) -> int:
        """Number of prompts drawn so far."""
        return sum(one.prompts.num_rows for one in self.groups)

    def add(self, groups: list[Groups], samples: pa.Table, played: list[Kept]) -> None:
        """Add a draw, and score its samples unless environments did, or an earlier process."""
        first = self.drawn
        self.groups, self.played = [*self.groups, *groups], [*self.played, *played]
        if self.work.config.rollout.most_prompts is None:
            return
        self._samples = pa.concat_tables([self._samples, samples])
        if self.work.config.environment is not None:
            rewards = with_scores(samples, [one.score.score for one in played], REWARD)
        else:
            self.parts.append(self._scored(first))
            rewards = read_parts(self.work.root, self.parts[-1:], REWARD)
        self._rewards = pa.concat_tables([self._rewards, rewards])

    @property
    def facts(self) -> dict[str, JsonValue]:
        """Identity of the reward that scored, for the manifest."""
        return {SCORED_BY: scored_by(self.work.config.reward, self._made_of)} if self.parts else {}

    @property
    def metrics(self) -> dict[str, float]:
        """Metrics of conversations, and counts of prompts if their number was not fixed."""
        found = play_metrics(self.played) if self.played else {}
        if self.work.config.rollout.most_prompts is None:
            return found
        return {**found, "prompts_drawn": float(self.drawn), "useful_groups": float(useful_groups(self._rewards))}

    @cached_property
    def _made_of(self) -> dict[str, str]:
        return sources_of(self.work.config.reward)

    def _scored(self, first: int) -> Part:
        """The part with the scores of the newest draw, whose first prompt is the one after `first` others."""
        writer = self.work.writer
        stamp = value_digest([*self.decides, scored_by(self.work.config.reward, self._made_of)])[:16]
        name = f"{first:06d}-{self.drawn:06d}-{_REWARDS}{stamp}"
        if (kept := find_piece(writer, name)) is not None:
            return kept
        part = writer.write_table(f"{_REWARDS}{first:06d}.arrow", self._score(), REWARD)
        return keep_piece(writer, name, part.model_copy(update={"rows": None}))  # the tables with rows are the samples

    def _score(self) -> pa.Table:
        """Score the newest draw. Too many failures are those of all draws so far."""
        section, done = self.work.config.reward, self._rewards.num_rows
        what, judges = f"rollout of iteration {self.work.iteration}", judges_of(self.work.context, self.prepared)
        responses = scorable(self.work, self.prepared, self._samples)
        scored = unchanged(score_responses(section, responses[done:], bool(done), judges), self._made_of, what)
        scores = accepted([*_scores(self._rewards), *scored.scores], responses, section.max_failures, what)
        return with_scores(self._samples.slice(done), scores[done:], REWARD)


def further(wanted: int, drawn: int, useful: int, most: int) -> int:
    """Prompts to draw next: as many as give the groups that lack, at the share that is useful so far; not more than
    `wanted` at once, nor `most` in all."""
    missing = max(0, wanted - useful)
    return min(-(-missing * drawn // useful) if useful else wanted, wanted, most - drawn)


def scorable(work: Work, prepared: Prepared, samples: pa.Table) -> list[Response]:
    """The responses of a rollout's rows, as reward functions are given them."""
    records = Records(prompts(work.context, prepared, "train"))
    return responses_of(with_finish_reasons(samples), text_codec(work.context, prepared), records, work.iteration)


def scored_before(work: Work, rollouts: Rollouts) -> Scores | None:
    """The scores by which a rollout decided about its draws; None if there are none, if the reward is another one by
    now, or if the responses are to be scored again."""
    one = rollouts.manifest
    if SCORED_BY not in one.facts or one.revision != work.writer.revision:
        return None
    sources = sources_of(work.config.reward)
    if one.facts[SCORED_BY] != scored_by(work.config.reward, sources):
        return None
    return Scores([*_scores(read_parts(work.root, [*one.below(_REWARDS).values()], REWARD))], sources)


def _scores(rewards: pa.Table) -> Iterator[Score]:
    for row in rewards.drop_columns(["prompt_id", "sample_id"]).to_pylist():
        components = None if row["components"] is None else dict(row["components"])
        yield Score(**{**row, "components": components})
