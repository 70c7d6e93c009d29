"""Answers by their kind: a choice, a text, or a value with its unit; and the equality of two of them."""

import functools
import re
from dataclasses import dataclass
from typing import Any

from math_verify import LatexExtractionConfig, parse, verify  # slow to import: not at the first sample
from sympy import Eq, Expr, FiniteSet, Union, nan, zoo
from sympy.core.relational import Relational

from tasks.rewards.notation import detexted, is_balanced, latex, unwrapped, words_of

_CHOICE = re.compile(
    r"(?:[Oo]ption |[Cc]hoice )?\(?([A-J])\)?[.:)]?|\(?([a-j])\)|\(([A-J])\)\s.*|([A-J])[):]\s.*|([A-D])\.\s.*"
)
_CHOSEN = re.compile(r"(?:option|choice|answer)?\s*(?:\(([a-j])\)(?:\s.*)?|([a-j])[.:)](?:\s.*)?|([a-j]))")
_BASED = re.compile(r"([0-9A-Za-z]+)\s*_\s*(?:\{\s*([0-9]+)\s*\}|([0-9]+))")
_WORD = re.compile(r"(?<![\\A-Za-z])[^\W\d_]{2,}")
_COMMAND = re.compile(r"\\(?:begin|end|mathbb|mathcal)\s*\{[^{}]*\}|\\[A-Za-z]+")
_FUNCTIONS = frozenset(
    ["sin", "cos", "tan", "cot", "sec", "csc", "ln", "log", "exp", "arcsin", "arccos", "arctan", "sqrt", "pi", "inf",
     "infinity", "oo", "or", "and", "min", "max", "gcd", "lcm", "det", "mod"]
)  # fmt: skip
_CURRENCY = re.compile(
    r"^(-?)\s*(?:US)?(?:\\?\$|[€£¥₹]|\\(?:pounds|euro)\b|(?:USD|EUR|GBP|Rs\.?)(?![A-Za-z]))\s*|\s*(?:[€£¥₹$]|USD|EUR|GBP|INR|CNY|JPY)$"
)
_PERCENT = re.compile(r"\s*(?:\\?%|\bper ?cent(?:age)?)\s*$")
_DEGREES = re.compile(r"\s*(?:\^\s*\{?\s*\\circ\s*\}?|°|\\degree)\s*([CF]?)$")
_UNIT = re.compile(r"(?:(?<=[\d})\]!])\s*|\s+)([^\W\d_]+(?:[ /.·*-]+[^\W\d_]+){0,4})\s*(?:\^\s*\{?\s*(-?\d)\s*\}?)?$")
_SIGN = re.compile(r"\\(?:pm|mp)(?![A-Za-z])")
_NUMBER = re.compile(r"[-+]?(?:\d+\.?\d*|\.\d+)")
_SMALL_WORD = re.compile(
    r"so|it|is|we|the|get|of|are|to|be|by|if|as|at|was|has|for|not|can|you|he|she|his|her|its|but|all"
)
LONGEST, _LONGEST_TEXT = 500, 10  # characters, words

_SCALES = {
    "length": {"mm": 0.001, "millimeter": 0.001, "cm": 0.01, "centimeter": 0.01, "m": 1, "meter": 1, "metre": 1,
               "km": 1000, "kilometer": 1000, "in": 0.0254, "inch": 0.0254, "inche": 0.0254, "ft": 0.3048,
               "foot": 0.3048, "feet": 0.3048, "yd": 0.9144, "yard": 0.9144, "mi": 1609.344, "mile": 1609.344},
    "mass": {"mg": 1e-6, "g": 0.001, "gram": 0.001, "kg": 1, "kilogram": 1, "lb": 0.45359237, "pound": 0.45359237},
    "time": {"s": 1, "sec": 1, "second": 1, "min": 60, "minute": 60, "h": 3600, "hr": 3600, "hour": 3600, "day": 86400,
             "week": 604800},
    "volume": {"ml": 0.001, "milliliter": 0.001, "l": 1, "liter": 1, "litre": 1},
}  # fmt: skip
_KNOWN = {name: (kind, factor) for kind, scale in _SCALES.items() for name, factor in scale.items()}


class Unreadable(ValueError):
    """A text that is no answer of a kind that is known."""


@dataclass(frozen=True)
class Answer:
    """An answer. It is a value if it has an expression, else a choice or a text."""

    text: str  # as texts are compared
    choice: str = ""  # letter
    expression: Any = None  # of sympy
    percent: bool = False
    unit: tuple[str, int] = ("", 1)  # name and power


@functools.lru_cache(maxsize=4096)
def read(text: str) -> Answer:
    """The answer in a text that holds nothing else. Raises Unreadable: with the reason."""
    if len(text) > LONGEST:
        raise Unreadable(f"has more than {LONGEST} characters")
    plain = detexted(bare := unwrapped(text))
    if not plain:
        raise Unreadable("is empty")
    if not is_balanced(bare):
        raise Unreadable("has a brace that is not closed")
    if found := _CHOICE.fullmatch(plain):
        return Answer(words_of(bare), choice=next(filter(None, found.groups())).upper())
    if found := _BASED.fullmatch(plain):
        return Answer(f"{found[1].casefold()}_{found[2] or found[3]}")
    if _is_text(bare, plain):
        longest = 3 if re.search(r"\d", plain) else _LONGEST_TEXT  # July 4
        if len(plain.split()) > longest:
            raise Unreadable(f"is prose of more than {longest} words: give the answer alone, in a box, or after ####")
        return Answer(words_of(bare))
    return _value(bare)


def chosen(given: Answer) -> str:
    """The letter of the choice that an answer makes; empty if it makes none."""
    found = None if given.choice else _CHOSEN.fullmatch(given.text)
    return next(filter(None, found.groups())).upper() if found else given.choice


def same(gold: Answer, given: Answer) -> bool:
    """True if an answer is the right one."""
    if gold.choice:
        return chosen(given) == gold.choice
    if gold.expression is None or given.expression is None:
        return gold.text in (given.text, given.choice.casefold()) or gold.text.partition("_")[0] == given.text
    return _equal(gold, given)


def equal(gold: Any, given: Any) -> bool:
    """True if two expressions of sympy are mathematically equal. math-verify's own time-outs are off."""
    return verify([gold], [given], timeout_seconds=None, allow_set_relation_comp=True)


def expressions_in(text: str) -> list[Any]:
    """Expressions that math-verify finds in prose."""
    return parse(text, parsing_timeout=None)  # pyright: ignore[reportArgumentType]


def _is_text(bare: str, plain: str) -> bool:
    """True if an answer is words: with nothing to calculate, or inside of a text command, or a name before a number."""
    words = [word for word in _WORD.findall(_COMMAND.sub(" ", plain)) if word.casefold() not in _FUNCTIONS]
    if re.fullmatch(r"\d{1,2}(?::\d\d)?\s*[ap]\.?m\.?", plain.casefold()):
        return True
    if not (words or plain[:1].isalpha()) or re.search(r"[=<>^+*\\{}\[\]]", plain):
        return False
    wrapped = bare != plain and not _WORD.search(_COMMAND.sub(" ", re.sub(r"\\[A-Za-z]+\s*\{[^{}]*\}", " ", bare)))
    if not re.search(r"\d", plain):
        known = plain.casefold() in ("yes", "no", "dne", "odd")
        return known or (wrapped and bool(words)) or any(len(word) > 3 for word in words)
    if re.fullmatch(r"[A-Z][A-Za-z]*\d[A-Za-z0-9]*", plain):  # H2O
        return True
    return re.match(r"[^\W\d_]{3,}", plain) is not None and not plain.startswith(tuple(_FUNCTIONS))


def _value(bare: str) -> Answer:
    text = _CURRENCY.sub(r"\1", bare).replace("$", "")
    percent = _PERCENT.search(detexted(text)) is not None
    text = _PERCENT.sub("", detexted(text)) if percent else text
    text, unit = _without_unit(text)
    words = [word.casefold() for word in _WORD.findall(_COMMAND.sub(" ", detexted(text)))]
    if any(_SMALL_WORD.fullmatch(word) or (len(word) > 3 and word not in _FUNCTIONS) for word in words):
        raise Unreadable("is prose: give the answer alone, in a box, or after ####")
    try:
        expression = _expression(latex(text))
    except (ArithmeticError, AttributeError, NotImplementedError, RecursionError, TypeError, ValueError):
        expression = None  # of sympy, for what no solver knows
    if expression is None or expression in (nan, zoo):
        raise Unreadable("cannot be read as an expression")
    return Answer(words_of(bare), "", expression, percent and isinstance(expression, Expr), unit)


def _without_unit(text: str) -> tuple[str, tuple[str, int]]:
    """A value, and the name and the power of its unit."""
    if found := _DEGREES.search(text):
        return text[: found.start()], ("degree", 1)
    plain = detexted(text)
    found = _UNIT.search(plain)
    if found is None or not re.search(r"\d|\\pi|\\sqrt", plain[: found.start()]):
        return text, ("", 1)
    name, wrapped = found[1].casefold(), plain != text and found[1] in " ".join(re.findall(r"\{([^{}]*)\}", text))
    words, known = re.findall(r"[^\W\d_]+", name), _singular(name) in _KNOWN
    apart = plain[found.start() : found.start() + 1] == " "
    is_unit = (apart and name in "knjwv") or (known and (len(name) > 1 or apart)) or "/" in name
    is_unit = is_unit or any(len(word) > 3 for word in words)
    if not (wrapped or is_unit) or not _FUNCTIONS.isdisjoint(words) or re.search(r"[=<>]", plain):
        return text, ("", 1)
    power = 2 if name.startswith(("square ", "sq ")) else 3 if name.startswith("cubic ") else int(found[2] or 1)
    return plain[: found.start()], (_singular(name), power)


def _singular(name: str) -> str:
    name = re.sub(r"^(?:square|sq|cubic) ", "", name)
    return name.removesuffix("s") if len(name) > 2 else name


def _expression(text: str) -> Any:
    r"""Expressions of sympy for LaTeX, with both signs of \pm; None if it has nothing."""
    one = _parsed(text)
    if one is None and _SIGN.search(text):
        signs = ({r"\pm": "+", r"\mp": "-"}, {r"\pm": "-", r"\mp": "+"})
        both = [_parsed(_SIGN.sub(lambda found, sign=sign: sign[found.group()], text)) for sign in signs]
        return None if None in both else FiniteSet(*both)
    relations: list[Any] = list(one.args) if isinstance(one, FiniteSet) else []
    if relations and all(isinstance(each, Relational) and not isinstance(each, Eq) for each in relations):
        return Union(*(each.as_set() for each in relations))  # x < 2 or x > 3
    return one


def _parsed(text: str) -> Any:
    text = text.lstrip("+") if _NUMBER.fullmatch(text) else text
    config = LatexExtractionConfig(boxed_match_priority=-1)
    found = parse(f"${text}$", [config], fallback_mode="no_fallback", parsing_timeout=None)  # pyright: ignore[reportArgumentType]
    return found[0] if found else None


def _equal(gold: Answer, given: Answer) -> bool:
    left, right = gold.expression, given.expression
    if gold.percent != given.percent:  # 50 % is 50 and 0.5; 0.5 is 50 %, and not 0.5 %
        share = right / 100 if given.percent else right
        wholes = (left / 100, left) if gold.percent else (left,)
        spelled = given.percent and isinstance(left, Expr) and left.is_number and abs(left) >= 1 and equal(left, right)
        return bool(spelled) or any(equal(whole, share) for whole in wholes)
    (name, power), (other, its) = gold.unit, given.unit
    if name in _KNOWN and other in _KNOWN and (name, power) != (other, its):
        (kind, factor), (its_kind, its_factor) = _KNOWN[name], _KNOWN[other]
        if kind != its_kind or power != its or not (isinstance(left, Expr) and isinstance(right, Expr)):
            return False
        return equal(left * factor**power, right * its_factor**its)
    return equal(left, right)
