"""Mathematical equality by math-verify, of answers that are read by their kind."""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from tasks.rewards.answers import LONGEST, Answer, Unreadable, chosen, equal, expressions_in, read, same
from tasks.rewards.notation import boxed

_AFTER = re.compile(r"####\s*(.+)")
_TAGGED = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_BEFORE = re.compile(r"^(?:the )?(?:final |correct )?answer(?: is|:| is:)\s*", re.IGNORECASE)
_ANCHOR = re.compile(
    r"(?:answer|option|choice)\b(?:\s*(?:(?:must|should|would|will|has to) be|is|are|was|equals)\b)?\s*[:=]?[\s*]*",
    re.IGNORECASE,
)
_SPAN = re.compile(r"(\$\$?)(.+?)\1|\\\((.+?)\\\)|\\\[(.+?)\\\]", re.DOTALL)
_SENTENCE_END = re.compile(r"\.(?=\s|$)|\n|,? (?:because|since|so|which|as|for)\b|;")


def math_verify(record: Mapping[str, Any], response: str, *, field: str = "answer") -> float:
    r"""1.0 if the response's answer is the record's; else 0.0.

    The record's answer may be LaTeX or plain, in a box or in dollar signs or neither, or the end of a solution: its
    last box, or what follows ####. Choices (B) and texts are compared as such, values by math-verify: fractions,
    roots, intervals, sets, tuples, matrices, equations, inequalities, percentages, quantities with a unit.
    The response's answer is in its last box, else in <answer>, else after ####, else after "answer is", else its last
    line, else the last expression that math-verify finds; what is thought before </think> does not count.
    math-verify's own time-outs are signal alarms, which work only in the main thread: they are off, and the deadline
    of the scoring process applies instead. Raises as `gold_answer`, which is no score.
    """
    gold = gold_answer(record, field)
    for text in _candidates(response):
        try:
            given = read(text)
        except Unreadable:
            continue
        if given.expression is not None if gold.expression is not None else chosen(given) or not gold.choice:
            return float(same(gold, given))
    box = boxed(response)
    if gold.expression is None or (box is not None and len(box) > LONGEST):
        return 0.0
    wholes = (gold.expression, gold.expression / 100) if gold.percent else (gold.expression,)
    return float(any(equal(whole, one) for one in expressions_in(response) for whole in wholes))


def gold_answer(record: Mapping[str, Any], field: str = "answer") -> Answer:
    """The record's answer. Raises KeyError, TypeError, ValueError: it has none, or one that cannot be read."""
    value = record[field]
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise TypeError(f"{field} {value!r} is a {type(value).__name__}: give a text or a number")
    text = str(value)
    found = boxed(text) or next(iter(_AFTER.findall(text)[-1:]), _BEFORE.sub("", text))
    try:
        return read(found)
    except Unreadable as flaw:
        raise ValueError(f"{field} {text!r} {flaw}") from None


def reads_gold(record: Mapping[str, Any], response: str, *, field: str = "answer") -> float:
    """1.0 if the record's answer can be read. Raises as `gold_answer`."""
    return float(gold_answer(record, field) is not None)


def _candidates(response: str) -> Iterator[str]:
    """Places of a response's answer, in the order in which they count."""
    response = response.rpartition("</think>")[2].strip() or response
    if (box := boxed(response)) is not None:
        yield box
        return
    yield from _TAGGED.findall(response)[-1:]
    yield from _AFTER.findall(response)[-1:]
    for anchor in list(_ANCHOR.finditer(response))[-1:]:
        tail = response[anchor.end() :]
        span = _SPAN.match(tail)
        yield next(filter(None, span.groups()[1:])) if span else _SENTENCE_END.split(tail, maxsplit=1)[0].rstrip("* ")
    yield from response.strip().splitlines()[-1:]
    yield from re.findall(r"\([A-J]\)", response)[-1:]
