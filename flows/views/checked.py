"""`ratchet check`: validation of a configuration, its first prompts as tokens, and the resources of the run."""

import json
from collections.abc import Collection, Iterator, Sequence
from shutil import disk_usage

import pyarrow as pa
from pydantic import BaseModel
from rich.text import Text

from flows.views.output import size, some
from flows.views.samples import printable
from flows.views.trackers import check_trackers
from storage.backends.root import Root
from tasks.checks import advice, check_content, parameters_of, reward_calls
from tasks.config.environment import Settings
from tasks.config.run import RunConfig
from tasks.data.sources import Prompts, check_prompts, text_codec
from tasks.data.tokenizer import TextCodec
from tasks.rewards.scoring import notices, scoring_processes
from tasks.rewards.trying import blind, shown
from tasks.workers.folders import check_folders
from tasks.workers.placement import OPTIMIZER, WEIGHT, Parameters, engine_bytes, rank_bytes, trained
from trainer_core.config import Device

_NAMED = 8
_FIRST_TOKENS, _LAST_TOKENS = 300, 100
_PROMPT, _TRAINED = "cyan", "green"


class Needs(BaseModel, frozen=True, extra="forbid"):
    """Processes, and bytes, of a run. Activations, and what libraries take for themselves, are not counted."""

    device: Device
    ranks: int
    engines: int
    reward_processes: int
    environment_processes: int  # at most
    parameters: int  # weights of the model
    rank_bytes: int
    """Memory of one trainer rank: weights, gradients and optimizer of the model and of a critic, and the weights of a
    reference and of a teacher."""
    engine_bytes: int  # memory of one engine: weights and key-value cache
    judge_bytes: int  # the same of the engine that judges; 0 without one
    stored_bytes: int  # disk for what is stored once: models and prompts
    state_bytes: int  # disk for the train state of one iteration; one is in shared memory too while the run is driven
    states_kept: int  # train states kept at the end, by `[storage]`

    @property
    def disk_bytes(self) -> int:
        """Bytes of all that is kept at the end, without samples."""
        return self.stored_bytes + self.state_bytes * self.states_kept


def needs_of(config: RunConfig, device: Device, held: Parameters, prompt_bytes: int) -> Needs:
    """Estimate the resources of a run from the weights of its models and the size of its tables of prompts."""
    weight, optimizer = WEIGHT[config.train.precision], OPTIMIZER[config.train.precision]
    return Needs(
        device=device, ranks=config.train.parallel.world_size, engines=config.engine.count, parameters=held.model,
        reward_processes=0 if config.environment else scoring_processes(config.reward),
        environment_processes=config.environment.processes if config.environment else 0,
        rank_bytes=rank_bytes(config, held),
        engine_bytes=engine_bytes(config.engine, held.model),
        judge_bytes=0 if config.engines is None else engine_bytes(config.engines.judge, held.judge),
        stored_bytes=sum(held) * weight + prompt_bytes,
        state_bytes=trained(config, held) * (weight + optimizer),
        states_kept=_states_kept(config),
    )  # fmt: skip


def _states_kept(config: RunConfig) -> int:
    """The states of iteration 0 and of the newest iterations, and every `keep_every`-th before those."""
    last, newest, every = config.run.iterations, config.newest_states, config.storage.keep_every
    if newest is None:
        return last + 1
    older = last - newest  # the last iteration before the newest ones
    return min(newest, last + 1) + (0 if older < 0 else 1 + (older // every if every else 0))


class Token(BaseModel, frozen=True, extra="forbid"):
    id: int
    text: str


class Example(BaseModel, frozen=True, extra="forbid"):
    prompt_id: str
    prompt: str
    tokens: tuple[Token, ...]
    answer: str | None
    trained: tuple[Token, ...] | None = None  # tokens that the warm-up trains on, after the prompt
    kind: str = ""
    """Of the first record with something that not every record has: tools, tool calls, reasoning, a system text."""


class SourceCount(BaseModel, frozen=True, extra="forbid"):
    table: str  # train, held_out or warmup
    source: str
    prompts: int
    dropped: int  # prompts that were too long


class Checked(BaseModel, frozen=True, extra="forbid"):
    example: Example  # the first training prompt
    solved: Example | None  # the first example of the warm-up, if there is one
    kinds: tuple[Example, ...]  # the first record of each kind, where that is another one
    longest: int  # tokens of the longest training prompt
    context: int  # longest sequence, prompt and response, in tokens
    stop_tokens: tuple[Token, ...]
    left_out: tuple[Token, ...]  # other tokens that the texts of responses lack, which rewards and people see
    sources: tuple[SourceCount, ...]
    reward: tuple[str, ...]
    """The reward's calls on a few records: their own answer and a wrong one. None if reward.try is false."""
    notes: tuple[str, ...]
    needs: Needs


def checked(config: RunConfig, root: Root) -> Checked:
    """Make all checks of a run that is to begin in that root. Raises InputError for what cannot work."""
    check_folders()
    check_content(config)
    check_trackers(config.report)
    codec, prompts = text_codec(config), check_prompts(config)
    train = prompts.tables["train"]
    prompt_bytes, device = sum(table.nbytes for table in prompts.tables.values()), Settings.from_environment().device
    example, solved = _example(train, 0, codec), _solved(prompts.tables.get("warmup"), codec)
    calls = reward_calls(config)
    needs = needs_of(config, device(config.device.kind), parameters_of(config), prompt_bytes)
    about_run = (*advice(config), *notices(config.reward), *blind(calls), *_scarce(needs, root))
    return Checked(
        example=example,
        solved=solved,
        kinds=tuple(of_kinds(prompts, codec, [one.prompt_id for one in (example, solved) if one is not None])),
        longest=int(train["prompt_tokens"].combine_chunks().value_lengths().to_numpy(zero_copy_only=False).max()),
        context=min(config.engine.max_model_len, codec.context),
        stop_tokens=_tokens(codec.stop_tokens, codec),
        left_out=_tokens(sorted(codec.left_out.difference(codec.stop_tokens)), codec),
        sources=_counts(prompts),
        reward=tuple(map(shown, calls)),
        notes=(*prompts.notes, *notes_of(config, codec, train), *_unsolved(prompts), *about_run),
        needs=needs,
    )


def _scarce(needs: Needs, root: Root) -> list[str]:
    place = root.backend.to_check().folder
    if place is None or (free := disk_usage(place).free) >= needs.disk_bytes:
        return []
    fact = f"{root.url} has {size(free)} free, less than the {size(needs.disk_bytes)} that the run stores"
    return [f"{fact}: free space, or keep fewer states ([storage])"]


def lines_of(found: Checked) -> list[str | Text]:
    one = found.example
    return [
        f"first prompt {one.prompt_id!r}:",
        *(f"    {printable(line)}" for line in one.prompt.split("\n")),
        f"its {len(one.tokens)} tokens, separated by |:",
        Text("    ").append(_separated(one.tokens), _PROMPT),
        *([] if one.answer is None else [f"its answer: {printable(one.answer)}"]),
        *([] if found.solved is None else _trained(found.solved, "first example of the warm-up")),
        *(line for each in found.kinds for line in of_kind(each)),
        f"stop tokens: {_named(found.stop_tokens)}",
        *([f"also left out of responses: {_named(found.left_out)}"] if found.left_out else []),
        f"prompts (the longest has {found.longest} tokens; the context is {found.context}):",
        *(
            f"    {one.table:9} {one.prompts:8} from {one.source}" + (f", {one.dropped} dropped" if one.dropped else "")
            for one in found.sources
        ),
        *(["the reward on records of the run:"] if found.reward else []),
        *(f"    {call}" for call in found.reward),
        *_needs(found.needs),
        *(f"note: {note}" for note in found.notes),
        "the configuration can be run",
    ]


def of_kind(one: Example) -> list[str | Text]:
    title = f"first record with {one.kind}"
    if one.trained is not None:
        return _trained(one, title)
    first = f"{title}, {one.prompt_id!r}: {len(one.tokens)} tokens:"
    return [first, Text("    ").append(_separated(one.tokens), _PROMPT)]


def _trained(one: Example, title: str) -> list[str | Text]:
    turn = one.trained or ()
    return [
        f"{title}, {one.prompt_id!r}: {len(turn)} tokens are trained after {len(one.tokens)}:",
        Text("    prompt   ").append(_separated(one.tokens), _PROMPT),
        Text("    trained  ").append(_separated(turn), _TRAINED),
    ]


def _separated(tokens: Sequence[Token]) -> str:
    first, last = [_visible(one) for one in tokens], list[str]()
    if (more := len(tokens) - _FIRST_TOKENS - _LAST_TOKENS) > 0:
        first, last = [*first[:_FIRST_TOKENS], f"... {more} more ..."], first[-_LAST_TOKENS:]
    return "|".join([*first, *last])


def _visible(token: Token) -> str:
    """Its text; the id of one that is a part of a character."""
    return f"[{token.id}]" if not token.text or "\N{REPLACEMENT CHARACTER}" in token.text else printable(token.text)


def _named(tokens: Sequence[Token]) -> str:
    return some([f"{token.id} {token.text!r}" for token in tokens], _NAMED)


def _needs(needs: Needs) -> list[str]:
    beside = {"scoring processes": needs.reward_processes, "environment processes up to": needs.environment_processes}
    scoring = next((f"{name} {number}" for name, number in beside.items() if number), "scoring in the flow process")
    once, kept = size(needs.stored_bytes), f"{needs.states_kept} x {size(needs.state_bytes)}"
    return [
        f"would start on {needs.device}: trainer ranks {needs.ranks}, engines {needs.engines}, "
        f"{'an engine for rewards, ' if needs.judge_bytes else ''}{scoring}",
        f"memory, without activations: {size(needs.rank_bytes)} a rank, {size(needs.engine_bytes)} an engine "
        f"({needs.parameters:,} weights)" + (f", {size(needs.judge_bytes)} the judge" if needs.judge_bytes else ""),
        f"disk, without samples: {size(needs.disk_bytes)} (model and prompts {once}, states {kept})",
    ]


def _example(table: pa.Table, row: int, codec: TextCodec) -> Example:
    first = table.slice(row, 1).to_pylist()[0]
    same = {name: first[name] for name in ("prompt_id", "prompt", "answer")}
    trained = None if first["answer_tokens"] is None else _tokens(first["answer_tokens"], codec)
    return Example(**same, tokens=_tokens(first["prompt_tokens"], codec), trained=trained)


def _solved(table: pa.Table | None, codec: TextCodec) -> Example | None:
    row = -1 if table is None else table["answer_tokens"].is_valid().index(True).as_py()
    return None if table is None or row < 0 else _example(table, row, codec)


def _tokens(tokens: Sequence[int], codec: TextCodec) -> tuple[Token, ...]:
    return tuple(Token(id=number, text=text) for number, text in zip(tokens, codec.visible(tokens), strict=True))


def _counts(prompts: Prompts) -> tuple[SourceCount, ...]:
    return tuple(
        SourceCount(table=table, source=one.name, prompts=one.rows, dropped=one.dropped)
        for table, counts in prompts.counts.items()
        for one in counts
    )


def _unsolved(prompts: Prompts) -> list[str]:
    table = prompts.tables.get("warmup")
    without = 0 if table is None else table["answer"].null_count
    of = "" if table is None else f"{without} of {table.num_rows} warm-up records have no answer"
    return [f"{of}, so they are left out of it"] if without else []


def of_kinds(prompts: Prompts, codec: TextCodec, shown: Collection[str]) -> Iterator[Example]:
    """The first record of each kind, of the warm-up if that has one: there it is trained on."""
    found: dict[str, tuple[str, str]] = {}
    for table, counted in sorted(prompts.counts.items(), reverse=True):
        for one in counted:
            found = {**{kind: (table, name) for kind, name in one.kinds.items()}, **found}
    for kind, (table, name) in found.items():
        places = [one for one in (table, "held_out") if one in prompts.tables]  # prompts may have been split off
        rows = [(one, prompts.tables[one]["prompt_id"].index(name).as_py()) for one in places]
        there = next(((one, row) for one, row in rows if row >= 0), None)
        if there is not None and name not in shown:
            made = _example(prompts.tables[there[0]], there[1], codec)
            yield made.model_copy(update={"kind": kind, **({} if table == "warmup" else {"trained": None})})


def notes_of(config: RunConfig, codec: TextCodec, train: pa.Table) -> list[str]:
    """A text that a chat model is given without its template, unless `data.chat = false` says that it is meant."""
    (first,) = train.slice(0, 1).to_pylist()
    record = json.loads(first["record"])
    plain = [
        one.prompt is not None or record.get(one.prompt_field) == first["prompt"]
        for one in config.data.sources("train")
        if not (one.chat or one.system)
    ]
    if not (codec.has_template and any(plain)) or "chat" in config.data.model_fields_set:
        return []
    fact = "the tokenizer has a chat template, and the first prompt is a text, which is given without it"
    return [f"{fact}: set data.chat = true, or data.chat = false if that is intended"]
