"""An evaluation on request: greedy and sampled answers of the weights of any iteration whose state is kept.

Its manifest is beside those of the iteration's stages and names them as inputs. No stage is made from it, and it needs
no lease: the run may go on meanwhile. Its name holds a digest of everything that decides the answers, so the same
evaluation asked for twice is one, and one that was interrupted continues with the next part."""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from storage.digest import value_digest
from storage.errors import InputError
from storage.manifest import Manifest, Part, commit, find
from storage.parallel import each
from storage.parts import PartWriter, flat, read_parts, row_views
from storage.schema import EVALUATION_SAMPLES, fingerprint
from storage.unfinished import find_piece, keep_piece
from storage.upkeep.catalog import require_run
from tasks.config.evaluation import EXACT, PASS, PREFIX, SCORED_BY, SETTINGS, SOURCE, EvaluationSettings
from tasks.config.identity import settings_digest
from tasks.config.run import RunConfig
from tasks.data.files import name_of
from tasks.data.sources import check_asked_prompts
from tasks.engine.protocol import Sampling
from tasks.rewards.passing import check_passing, condition_of, passing
from tasks.rewards.sample import Score
from tasks.rewards.scoring import score_responses, sources_of
from tasks.stages.context import Portion, RunContext
from tasks.stages.conversations import environment_source, played_once, tasks_of
from tasks.stages.names import Stage
from tasks.stages.prepared import Records, prompts, text_codec
from tasks.stages.samples import HELD_OUT_WORLD, sample_seed
from tasks.stages.scored import judges_of, responses_of, scored_by, unchanged, with_scores
from tasks.stages.served_weights import ensure_served
from tasks.stages.stage import Attempt, StageOutput
from tasks.stages.views import Evaluated, Performed, Prepared, Served
from tasks.workers.interface import EngineHandle

_LETTERS = str.maketrans("0123456789abcdef", "ghijklmnopabcdef")
_NAME = 16


def evaluation(context: RunContext, iteration: int, settings: EvaluationSettings) -> Evaluated:
    """Evaluate the weights of an iteration, or return the evaluation that is stored. Raises InputError (the run has no
    such prompts, they leave no room for answers, or a condition cannot be used), NotCommitted (the iteration is not
    complete) or PartMissing (its state is not kept)."""
    prepared = Prepared(context.need(0, Stage.PREPARE))
    served = Served(context.need(iteration, Stage.WEIGHT_SYNC))
    own = context.find(iteration, Stage.EVALUATE)  # `evaluate.pass` may have changed since the start
    used = None if own is None else own.facts.get(PASS)
    condition = used if isinstance(used, str) and used != EXACT else context.config.evaluate.passing
    defaults = {"max_tokens": context.config.rollout.max_tokens, "passing": condition}
    given = settings.model_dump(include=set(defaults), exclude_none=True)
    settings = settings.model_copy(update={**defaults, **given})
    check_passing(context.config.reward, settings.passing, "--pass")
    check_asked_prompts(context.config, context.root, prepared.manifest, settings)

    def work() -> Performed:
        tries = context.tries(Stage.EVALUATE, iteration)
        while True:
            with tries:
                return _performed(context, iteration, settings, prepared, served)

    return Evaluated(context.performer(Stage.EVALUATE, iteration, work, (prepared, served)).manifest)


def stage_name(
    settings: EvaluationSettings, prepared: str, served: str, config: RunConfig, made_of: Mapping[str, str]
) -> str:
    """The name of an evaluation: equal for two that give the same answers and scores. `made_of` are the sources of the
    reward functions: no part with other scores is found under this name."""
    scoring = settings_digest(config.model_dump(mode="json"), Stage.EVALUATE)
    decides = [settings.model_dump(mode="json"), prepared, served, scoring, dict(made_of)]
    return PREFIX + value_digest(decides)[:_NAME].translate(_LETTERS)


def _performed(
    context: RunContext, iteration: int, settings: EvaluationSettings, prepared: Prepared, served: Served
) -> Performed:
    made_of = environment_source(context.config) or sources_of(context.config.reward)
    name = stage_name(settings, prepared.digest, served.digest, context.config, made_of)
    if (done := find(context.root, context.run, iteration, name, context.revisions)) is not None:
        return Performed(Evaluated(done), reused=True)
    writer = PartWriter(context.root, context.run, iteration, name, context.revisions.of(iteration, name))
    attempt = Attempt.begin(context, writer)
    parts = _Asked(context, settings, prepared, served, made_of, writer).answer()
    inputs = {"prepare": prepared.digest, "weights": served.digest}
    _check_there(context, iteration, inputs)
    table = read_parts(context.root, parts, EVALUATION_SAMPLES)
    condition = condition_of(table, context.config.reward, settings.passing)
    passes = None if condition is None else passing(table, condition, "--pass")
    output = StageOutput(
        parts=parts,
        schema_fingerprint=fingerprint(EVALUATION_SAMPLES),
        facts={
            SETTINGS: settings.model_dump(mode="json"),
            SOURCE: dict(made_of),
            SCORED_BY: scored_by(context.config.reward, made_of),
            "weights_digest": served.weights_digest,
            **({} if condition is None else {PASS: condition}),
        },
        metrics=figures(table, settings.samples, passes),
    )
    return Performed(Evaluated(_published(context, attempt.manifest(output, inputs))), reused=False)


def _published(context: RunContext, manifest: Manifest) -> Manifest:
    """Commit an evaluation, unless what it is of is gone. No lease is held: its run may be removed at any time. A
    removal writes its record before it lists what there is, so either it sees the manifest, or we see the record."""
    published = commit(context.root, manifest)
    try:
        _check_there(context, manifest.iteration, manifest.inputs)
    except InputError:
        context.root.remove(published.key)
        raise
    return published


def _check_there(context: RunContext, iteration: int, inputs: Mapping[str, str]) -> None:
    """Refuse an evaluation whose inputs are not there any more: another run may have its run's name by now."""
    require_run(context.root, context.run)
    for role, stage, of in (("prepare", Stage.PREPARE, 0), ("weights", Stage.WEIGHT_SYNC, iteration)):
        if (there := context.find(of, stage)) is None or there.digest != inputs[role]:
            raise InputError(
                f"the evaluation of iteration {iteration} of run {context.run!r} is not stored: it was made from "
                f"{stage} {inputs[role]}, and {there.digest if there else 'none'} is there now. The run was removed "
                "meanwhile: evaluate what has its name now"
            )


class _Wanted(NamedTuple):
    """Answers to sample in one way, a row for each."""

    rows: pa.Table  # prompts
    places: Sequence[int]  # of the prompts among all of the evaluation
    numbers: NDArray[np.int32]  # of the samples
    seeds: list[int]
    how: Sampling


@dataclass
class _Asked:
    """One evaluation in progress."""

    context: RunContext
    settings: EvaluationSettings
    prepared: Prepared
    served: Served
    made_of: Mapping[str, str]  # sources of the reward functions, by name
    writer: PartWriter

    def __post_init__(self) -> None:
        context, settings = self.context, self.settings
        self.codec = text_codec(context, self.prepared)
        self.table = prompts(context, self.prepared, settings.table).slice(0, settings.prompts)
        self.engines = ensure_served(context, self.prepared, self.served)
        tokens = settings.max_tokens or context.config.rollout.max_tokens
        stop, texts = self.codec.stop_tokens, context.config.rollout.stop
        self.greedy = Sampling(temperature=0, max_tokens=tokens, stop_token_ids=stop, stop=texts)
        drawn = settings.model_dump(include={"temperature", "top_p", "top_k", "min_p"})
        self.sampled = self.greedy.model_copy(update=drawn)
        self.clock = time.perf_counter()

    def answer(self) -> tuple[Part, ...]:
        """Every answer with its score, part by part."""
        count, starts = len(self.engines), range(0, self.table.num_rows, self.settings.prompts_per_part)
        threads = 1 if self.context.config.environment else count  # conversations have all engines
        return tuple(each(lambda at: self._part(self.engines[at % count], starts[at]), range(len(starts)), threads))

    def _part(self, engine: EngineHandle, start: int) -> Part:
        rows = self.table.slice(start, self.settings.prompts_per_part)
        name = f"{start:06d}-{start + rows.num_rows:06d}"
        if (kept := find_piece(self.writer, name)) is not None:
            return kept
        if self.context.config.environment is None:
            table = self._scored(self._generated(engine, rows, start), rows)
        else:
            table = self._played(rows, start, name)
        part = self.writer.write_table(f"answers-{name}.arrow", table, EVALUATION_SAMPLES)
        done, of = ((1 + self.settings.samples) * count for count in (start + rows.num_rows, self.table.num_rows))
        tokens, seconds = int(flat(table["response_tokens"])[1][-1]), time.perf_counter() - self.clock
        portion = Portion(self.writer.iteration, Stage.EVALUATE, done, of, "answers", tokens, seconds)
        self.context.page.advanced(portion)
        return keep_piece(self.writer, name, part)

    def _wanted(self, rows: pa.Table, start: int) -> Iterator[_Wanted]:
        """The greedy answer to each prompt, then the sampled ones."""
        count, samples = rows.num_rows, self.settings.samples
        yield _Wanted(rows, range(start, start + count), np.zeros(count, np.int32), [0] * count, self.greedy)
        if samples:
            numbers = np.tile(np.arange(samples, dtype=np.int32), count)
            repeats = np.repeat(np.arange(count), samples)
            places = (repeats + start).tolist()
            pairs = zip(places, numbers.tolist(), strict=True)
            seeds = [sample_seed(self.settings.seed, place, sample) for place, sample in pairs]
            yield _Wanted(rows.take(repeats), places, numbers, seeds, self.sampled)

    def _generated(self, engine: EngineHandle, rows: pa.Table, start: int) -> pa.Table:
        tables: list[pa.Table] = []
        for wanted in self._wanted(rows, start):
            batch = engine.generate(row_views(wanted.rows["prompt_tokens"]), wanted.seeds, wanted.how)
            tables.append(self._table(wanted, batch.column("response_tokens"), batch.column("finish_reason")))
        return pa.concat_tables(tables)

    def _played(self, rows: pa.Table, start: int, name: str) -> pa.Table:
        """The same of conversations, with the scores that their environments gave."""
        tables: list[pa.Table] = []
        scores: list[Score] = []
        for number, wanted in enumerate(self._wanted(rows, start)):
            worlds = [sample_seed(self.settings.seed, place, HELD_OUT_WORLD) for place in wanted.places]
            tasks = tasks_of(wanted.rows, wanted.numbers.tolist(), wanted.seeds, worlds)
            responses, ends, kept = played_once(
                self.context, self.writer, f"{name}-{number}", self.engines, self.served.weight_version, self.prepared,
                tasks, wanted.how,
            )  # fmt: skip
            tables.append(self._table(wanted, responses, ends))
            scores += [one.score.score for one in kept]
        return self._with_scores(pa.concat_tables(tables), scores)

    def _table(self, wanted: _Wanted, responses: pa.Array, ends: pa.Array) -> pa.Table:
        return pa.table(
            {
                "prompt_id": wanted.rows["prompt_id"].combine_chunks(),
                "greedy": pa.array([wanted.how is self.greedy] * wanted.rows.num_rows, pa.bool_()),
                "sample_id": pa.array(wanted.numbers, pa.int32()),
                "seed": pa.array(wanted.seeds, pa.int64()),
                "response_tokens": responses.cast(pa.list_(pa.int32())),
                "finish_reason": ends,
            }
        )

    def _scored(self, answers: pa.Table, rows: pa.Table) -> pa.Table:
        iteration = self.writer.iteration
        responses = responses_of(answers, self.codec, Records(rows), iteration)
        what = f"evaluation of iteration {iteration}"
        section, judges = self.context.config.reward, judges_of(self.context, self.prepared)
        scored = unchanged(score_responses(section, responses, True, judges), self.made_of, what)
        return self._with_scores(answers, [score for score in scored.scores if score is not None])

    def _with_scores(self, answers: pa.Table, scores: Sequence[Score]) -> pa.Table:
        more = {
            "run": pa.repeat(pa.scalar(self.context.run), len(scores)),
            "iteration": pa.repeat(pa.scalar(self.writer.iteration, pa.int32()), len(scores)),
            "source": pa.array(self._sources(answers["prompt_id"].to_pylist()), pa.string()),
        }
        return with_scores(answers, scores, EVALUATION_SAMPLES, more)

    def _sources(self, prompt_ids: list[str]) -> list[str]:
        """The data source of each prompt: with several sources, its name goes before the prompt's."""
        data = self.context.config.data
        names = [name_of(one) for one in data.sources(self.settings.table) or data.sources("train")]
        if len(names) < 2:
            return [names[0] if names else "generated"] * len(prompt_ids)
        found = {one: max((n for n in names if one.startswith(f"{n}/")), key=len, default="") for one in prompt_ids}
        return [found[one] for one in prompt_ids]


_ERRORS = ("exception", "exit", "no_number", "non_finite")


def pass_at_k(answers: int, passing: int, k: int) -> float:
    """Unbiased estimate of the probability that at least one of `k` answers passes. 1 - C(n - c, k) / C(n, k) for c
    passing ones of n answers, as a product, which does not overflow: Chen et al. 2021, "Evaluating Large Language
    Models Trained on Code", equation 1 and figure 3. Raises ValueError: there are fewer than `k` answers, or more pass
    than there are."""
    if not (0 <= passing <= answers and 1 <= k <= answers):
        raise ValueError(f"pass@{k} of {answers} answers, of which {passing} pass, is not defined")
    if answers - passing < k:
        return 1.0
    return 1.0 - float(np.prod(1.0 - k / np.arange(answers - passing + 1, answers + 1)))


def ladder(samples: int) -> list[int]:
    """The values of k that are reported for so many samples: powers of two, and their number."""
    powers = [1 << power for power in range(samples.bit_length())]
    return sorted({*(k for k in powers if k <= samples), *([samples] if samples else [])})


def figures(table: pa.Table, samples: int, passes: NDArray[np.bool_] | None) -> dict[str, float]:
    """The metrics of an evaluation: mean rewards, and if it is known which answers pass, pass@k. An answer without a
    score counts neither as passing nor as failing: it is counted apart. A prompt with fewer than k scored answers is
    left out of pass@k. `table` is an EVALUATION_SAMPLES, `samples` the number of sampled answers to each prompt, and
    `passes` tells which rows pass, (rows,)."""
    kind = table["greedy"].to_numpy(zero_copy_only=False)
    greedy, sampled = table.filter(pa.array(kind)), table.filter(pa.array(~kind))
    first, other = (None, None) if passes is None else (passes[kind], passes[~kind])
    found = {**_of("greedy", greedy, first), "prompts": float(greedy.num_rows)}
    if samples:
        found |= _of("sampled", sampled, other)
        found |= {} if other is None else _passes(sampled, samples, other)
    return found


def _of(kind: str, table: pa.Table, passes: NDArray[np.bool_] | None) -> dict[str, float]:
    """Figures of the greedy or of the sampled answers, all of them and those of each source."""
    rewards = _rewards(table)
    sources = np.asarray(table["source"].to_pylist(), dtype=object)
    several = names if len(names := sorted(set(sources))) > 1 else []
    groups = {kind: np.ones(len(rewards), np.bool_), **{f"{kind}/{name}": sources == name for name in several}}
    found: dict[str, float] = {}
    for name, rows in ((name, rows & np.isfinite(rewards)) for name, rows in groups.items()):
        if rows.any():
            found[f"{name}/reward"] = float(rewards[rows].mean())
        if rows.any() and passes is not None:
            found[f"{name}/pass@1"] = float(passes[rows].mean())
    reasons = table["reason"].to_pylist()
    return {
        **found,
        f"{kind}/timeouts": float(reasons.count("timeout")),
        f"{kind}/errors": float(sum(reasons.count(reason) for reason in _ERRORS)),
        f"{kind}/truncated": float(table["finish_reason"].to_pylist().count("length")),
    }


def _passes(sampled: pa.Table, samples: int, passes: NDArray[np.bool_]) -> dict[str, float]:
    """pass@k for more than one answer: the mean over prompts."""
    rewards = _rewards(sampled)
    groups: dict[str, list[int]] = {}
    for row, prompt in enumerate(sampled["prompt_id"].to_pylist()):
        groups.setdefault(prompt, []).append(row)
    scored = [passes[rows][np.isfinite(rewards[rows])] for rows in groups.values()]
    found: dict[str, float] = {}
    for k in ladder(samples):
        if rates := [pass_at_k(len(one), int(one.sum()), k) for one in scored if len(one) >= k]:
            found[f"sampled/pass@{k}"] = float(np.mean(rates))
    return found


def _rewards(table: pa.Table) -> NDArray[np.float64]:
    """(rows,) NaN where there is no score."""
    return table["reward"].to_numpy(zero_copy_only=False).astype(np.float64)
