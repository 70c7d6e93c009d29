"""Checks of a run's reward before anything expensive starts: its functions, calls on real records, gold answers."""

import functools
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from storage.errors import InputError, StageFailed
from tasks.config.reward import RewardFunction, RewardSection
from tasks.data.tokenizer import TextCodec
from tasks.rewards.calling import NotCallable, parameters_of
from tasks.rewards.code import SECONDS, check_programs
from tasks.rewards.judge import Judge
from tasks.rewards.pool import Refused, Response, Worker, score_in_processes
from tasks.rewards.resolve import find_reward, own_function, values_of
from tasks.rewards.sample import Score
from tasks.rewards.scoring import failures_allowed, order_of, own_judges, score_responses, scoring_processes
from trainer_core.effects import Unused, without_effect

WRONG = "I do not know."  # the response that is wrong for every record
_RECORDS = 3
_SHOWN = 3
_EXCERPT = 60
_BESIDE_TESTS_S = 1.0  # seconds of a call beyond those of its tests
_MOST_PROCESSES = 8


class _Reader(NamedTuple):
    function: str  # beside the function that scores; it tells whether a record can be read
    field: str  # default of their argument `field`
    reads: str  # name of what is in it, for messages


_READERS = {
    "tasks.rewards.math:math_verify": _Reader("reads_gold", "answer", "answers"),
    "tasks.rewards.code:code_tests": _Reader("reads_tests", "tests", "tests"),
}  # our functions that read more of a record than a text


@dataclass(frozen=True)
class Call:
    prompt_id: str
    own: bool  # True if the response is the record's own answer
    response: str
    score: Score


def check_reward(section: RewardSection) -> None:
    """Refuse functions that cannot be used. What is not ours is imported in a process of its own, with a deadline.
    Raises InputError: naming the setting and the reason."""
    _checked(section.model_dump_json())


@functools.lru_cache(maxsize=1)  # the command line and the flow both check; a refusal is not cached
def _checked(document: str) -> None:
    section = RewardSection.model_validate_json(document)
    if found := without_effect(section, _UNUSED, "reward."):
        raise InputError("\n".join(found))
    for part in section.parts:
        order = order_of(section, part)
        if order.target.traits.needs_sandbox:
            check_programs(str(part.arguments.get("image", "")))
            _check_seconds(section, part)
        try:
            if order.target.traits.asks and not order.target.traits.values:
                Judge.of(values_of(part.arguments))
            if order.target.version is not None:
                parameters_of(own_function(order.target), values_of(part.arguments), part.batch)
            else:
                with Worker(order):
                    pass
        except (Refused, NotCallable) as reason:
            raise InputError(
                f"{part.key} {order.target.name!r} cannot be used: {reason}. Fix it, set its arguments, or name "
                "another one"
            ) from None


def _check_seconds(section: RewardSection, part: RewardFunction) -> None:
    """Refuse tests that may take longer than the call: a slow program would have no score instead of 0."""
    seconds = part.arguments.get("seconds", SECONDS)
    least = float(seconds) + _BESIDE_TESTS_S if isinstance(seconds, int | float) else 0.0
    if section.deadline_s < least:
        fact = f"the tests of {part.key} {part.function!r} may take {seconds} s, but reward.deadline_s is"
        raise InputError(f"{fact} {section.deadline_s:g}. Set it to {least:g} or more, or give the tests fewer seconds")


def _in_process(section: RewardSection) -> str | None:
    return None if scoring_processes(section) else "functions that are scored in the calling process (processes = 0)"


_UNUSED = (Unused("deadline_s", _in_process), Unused("start_deadline_s", _in_process))


def call_reward(section: RewardSection, prompts: pa.Table, codec: TextCodec) -> list[Call]:
    """Call the reward on a few records, with the record's own answer and with a wrong one; none if it is left out.
    `prompts` has the columns `prompt_id`, `answer` and `record` of the prompt schema; `codec` is for functions that
    look at tokens. Raises InputError: more calls than `reward.max_failures` have no score, or the function cannot be
    used."""
    if not section.tried or own_judges(section):
        return []
    rows = sorted({int(row) for row in np.linspace(0, len(prompts) - 1, _RECORDS)})
    asked = [one for row in rows for one in _responses(prompts, row, codec)]
    try:
        found = score_responses(section, [response for _, response in asked], patient=True).scores
    except StageFailed as reason:
        raise InputError(f"{reason}. Fix it, or name another one") from None
    pairs = zip(asked, found, strict=True)
    calls = [Call(one.prompt_id, own, one.text, score) for (own, one), score in pairs if score is not None]
    failed = [call for call in calls if call.score.reward is None]
    if len(failed) > failures_allowed(section.max_failures, len(calls)) or len(failed) == len(calls):
        named = " and ".join(f"{part.key} {find_reward(part.function, part.key).name!r}" for part in section.parts)
        lines = "".join(f"  {shown(call)}\n" for call in failed[:_SHOWN])
        allowed = "" if len(failed) == len(calls) else "allow failures with reward.max_failures, "
        raise InputError(
            f"{named} was called on {len(rows)} records before the run, and {len(failed)} of {len(calls)} calls have "
            f"no score:\n{lines}Nothing was started. Fix the function, its arguments or its weights, {allowed}or leave "
            "these calls out with reward.try = false"
        )
    return calls


def shown(call: Call) -> str:
    which = "its own answer" if call.own else "a wrong answer"
    text = call.response if len(call.response) <= _EXCERPT else f"{call.response[:_EXCERPT]}..."
    parts = ", ".join(f"{name} {value:.4g}" for name, value in (call.score.components or {}).items())
    score = call.score
    result = f"{score.reason}: {score.detail}" if score.reward is None else f"{score.reward:.4g}"
    return f"prompt {call.prompt_id!r}, {which} {text!r}: {result}{f' ({parts})' if parts else ''}"


def blind(calls: Sequence[Call]) -> list[str]:
    """A note if no record's own answer scores more than a wrong one."""
    scored = [(call.own, call.prompt_id, call.score.reward) for call in calls if call.score.reward is not None]
    own = {name: reward for is_own, name, reward in scored if is_own}
    other = {name: reward for is_own, name, reward in scored if not is_own}
    if not own or any(own[name] > other.get(name, float("-inf")) for name in own):
        return []
    return ["the reward gives no record's own answer more than a wrong one: is it what you mean?"]


def check_golds(section: RewardSection, tables: Sequence[pa.Table]) -> None:
    """Refuse records with an answer or tests that one of our functions cannot read, which would be no score. Raises
    InputError: naming the first such records."""
    for part in section.parts:
        if (reader := _READERS.get(find_reward(part.function, part.key).path)) is not None:
            field = str(part.arguments.get("field", reader.field))
            golds = [one for table in tables for one in _golds(table, field)]
            _check_golds(section, part, reader, field, golds)


def _check_golds(
    section: RewardSection, part: RewardFunction, reader: _Reader, field: str, golds: Sequence[Response]
) -> None:
    different = {json.dumps(one.record): one for one in reversed(golds)}
    responses, asked = list(reversed(different.values())), order_of(section, part)
    target = replace(asked.target, name=f"{part.function} of {field}", attribute=reader.function)
    order = replace(asked, target=target, arguments={"field": field}, weights={}, batch=False)
    found = score_in_processes(order, responses, min(len(os.sched_getaffinity(0)), _MOST_PROCESSES)).scores
    bad = [(one, score) for one, score in zip(responses, found, strict=True) if score is None or score.reward is None]
    if bad:
        lines = [f"  prompt {one.prompt_id!r}: {'' if score is None else score.detail}" for one, score in bad[:_SHOWN]]
        more = f"\n  and {len(bad) - _SHOWN} more" if len(bad) > _SHOWN else ""
        fact = f"{part.key} {part.function!r} cannot read the {reader.reads} of {len(bad)} records"
        raise InputError(
            f"{fact}, which would have no score:\n"
            + "\n".join(lines)
            + f"{more}\nFix or remove these records, or name a reward that reads them"
        )


def _golds(table: pa.Table, field: str) -> Iterator[Response]:
    for name, text in zip(table["prompt_id"].to_pylist(), table["record"].to_pylist(), strict=True):
        record = json.loads(text)
        yield Response({field: record[field]} if field in record else {}, "", name)


def _responses(prompts: pa.Table, row: int, codec: TextCodec) -> Iterator[tuple[bool, Response]]:
    """The responses to try on a record, each with True if it is the record's own answer."""
    name, answer = (prompts[column][row].as_py() for column in ("prompt_id", "answer"))
    record: Mapping[str, Any] = json.loads(prompts["record"][row].as_py())
    own = record.get("answer") if answer is None else answer
    texts = [(True, str(own))] if isinstance(own, str | int | float) else []
    for number, (is_own, text) in enumerate([*texts, (False, WRONG)]):
        yield is_own, Response(record, text, name, number, 1, "stop", codec.closed(codec.encode_batch([text])[0]))
