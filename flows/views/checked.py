"""Whether a configuration can be run, what its prompts look like, and what the run would take: `ratchet check`."""

import json
from collections.abc import Mapping

import pyarrow as pa
from pydantic import BaseModel, ConfigDict

from flows.views.needs import Needs, needs_of
from flows.views.trackers import check_trackers
from tasks.checks import advice, check_content, check_scratch, model_facts, reward_calls
from tasks.config.environment import Settings
from tasks.config.run import RunConfig
from tasks.data.checking import check_prompts
from tasks.data.parameters import count_parameters
from tasks.data.sources import Prompts, text_codec
from tasks.data.tokenizer import TextCodec
from tasks.rewards.scoring import notices
from tasks.rewards.trying import blind, shown

_GIB = 1 << 30
_SHOWN_TOKENS = 400


class Token(BaseModel):
    """A token and its text."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    id: int
    text: str


class Example(BaseModel):
    """One prompt as the model is given it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    prompt_id: str
    prompt: str
    tokens: tuple[Token, ...]
    answer: str | None
    """The solved answer, if the record has one."""


class SourceCount(BaseModel):
    """Prompts of one source of a table."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    table: str
    """train, held_out or warmup."""
    source: str
    prompts: int
    dropped: int
    """Prompts that were too long."""


class Checked(BaseModel):
    """A configuration that can be run."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    example: Example
    """The first training prompt."""
    longest: int
    """Tokens of the longest training prompt."""
    context: int
    """Longest sequence, prompt and response, in tokens."""
    stop_tokens: tuple[Token, ...]
    sources: tuple[SourceCount, ...]
    reward: tuple[str, ...]
    """The reward's calls on a few records: their own answer and a wrong one. None if reward.try is false."""
    notes: tuple[str, ...]
    """What may be a mistake."""
    needs: Needs


def checked(config: RunConfig) -> Checked:
    """Make all checks that need no storage root.

    Raises:
        InputError: what cannot work.
    """
    check_scratch()
    check_content(config)
    check_trackers(config.report)
    codec, prompts = text_codec(config.model, config.rollout.stop_tokens), check_prompts(config)
    train = prompts.tables["train"]
    parameters = count_parameters(config.model, model_facts(config))
    size = sum(table.nbytes for table in prompts.tables.values())
    return Checked(
        example=_example(train.slice(0, 1), codec),
        longest=int(train["prompt_tokens"].combine_chunks().value_lengths().to_numpy(zero_copy_only=False).max()),
        context=min(config.engine.max_model_len, codec.context),
        stop_tokens=_tokens(codec.stop_tokens, codec),
        sources=_counts(prompts),
        reward=tuple(map(shown, reward_calls(config))),
        notes=(
            *notes_of(config, codec, train),
            *_unsolved(prompts),
            *advice(config),
            *notices(config.reward),
            *blind(reward_calls(config)),
        ),
        needs=needs_of(config, Settings.from_environment().device(config.device.kind), parameters, size),
    )


def lines_of(found: Checked) -> list[str]:
    """The result for people."""
    one = found.example
    visible = "|".join(token.text.replace("\n", "\\n") for token in one.tokens[:_SHOWN_TOKENS])
    more = f"|... {len(one.tokens) - _SHOWN_TOKENS} more" if len(one.tokens) > _SHOWN_TOKENS else ""
    stop = ", ".join(f"{token.id} {token.text!r}" for token in found.stop_tokens)
    return [
        f"first prompt {one.prompt_id!r}:",
        *(f"    {line}" for line in one.prompt.split("\n")),
        f"its {len(one.tokens)} tokens, separated by |:",
        f"    {visible}{more}",
        *([] if one.answer is None else [f"its answer: {one.answer}"]),
        f"stop tokens: {stop}",
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


def _needs(needs: Needs) -> list[str]:
    scoring = f"{needs.reward_processes} scoring processes" if needs.reward_processes else "scoring in the flow process"
    once, kept = _gib(needs.stored_bytes), f"{needs.states_kept} x {_gib(needs.state_bytes)}"
    return [
        f"would start on {needs.device}: {needs.ranks} trainer ranks, {needs.engines} engines, {scoring}",
        f"memory, without activations: {_gib(needs.rank_bytes)} a rank, {_gib(needs.engine_bytes)} an engine "
        f"({needs.parameters:,} weights)",
        f"disk, without samples: {_gib(needs.disk_bytes)} (model and prompts {once}, states {kept})",
    ]


def _gib(size: int) -> str:
    return f"{size / _GIB:.1f} GiB" if size >= _GIB else f"{size / (1 << 20):.1f} MiB"


def _example(row: pa.Table, codec: TextCodec) -> Example:
    first: Mapping[str, object] = row.to_pylist()[0]
    tokens = row["prompt_tokens"][0].as_py()
    return Example(
        prompt_id=str(first["prompt_id"]),
        prompt=str(first["prompt"]),
        tokens=_tokens(tokens, codec),
        answer=None if first["answer"] is None else str(first["answer"]),
    )


def _tokens(tokens: tuple[int, ...] | list[int], codec: TextCodec) -> tuple[Token, ...]:
    return tuple(Token(id=number, text=text) for number, text in zip(tokens, codec.visible(tokens), strict=True))


def _counts(prompts: Prompts) -> tuple[SourceCount, ...]:
    return tuple(
        SourceCount(table=table, source=one.name, prompts=one.rows, dropped=one.dropped)
        for table, counts in prompts.counts.items()
        for one in counts
    )


def _unsolved(prompts: Prompts) -> list[str]:
    table = prompts.tables.get("warmup")
    if table is None or not table["answer"].null_count:
        return []
    return [
        f"{table['answer'].null_count} of {table.num_rows} warm-up records have no answer, so they are left out of it"
    ]


def notes_of(config: RunConfig, codec: TextCodec, train: pa.Table) -> list[str]:
    """A text that a chat model is given without its template, unless `data.chat = false` says that it is meant."""
    (first,) = train.slice(0, 1).to_pylist()
    record = json.loads(first["record"])
    plain = [
        one.prompt is not None or record.get(one.prompt_field) == first["prompt"]
        for one in config.data.sources("train")
        if not (one.chat or one.system)
    ]
    if codec.has_template and any(plain) and "chat" not in config.data.model_fields_set:
        return [
            "the tokenizer has a chat template, and the first prompt is a text, which is given without it: set "
            "data.chat = true, or data.chat = false if that is meant"
        ]
    return []
