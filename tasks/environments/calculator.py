"""A calculator as a tool, over problems whose answer is a number."""

import ast
import operator
import re
from collections.abc import Mapping, Sequence

from tasks.environments.tools import Tools

_NUMBER = re.compile(r"-?\d+(?:\.\d+)?")
_LONGEST = 200  # characters of an expression; so no number in it is huge
_OPERATORS = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
    ast.USub: operator.neg,
}  # fmt: skip


class Calculator(Tools):
    """Show the record's `prompt`. An answer with a call is given its result; one without is the last, and is right if
    its last number is the record's `answer`. A wrong call is told what is wrong with it."""

    def __init__(self, call: str = "") -> None:
        """With `call`, a call is this text and an expression, for models without tools, as "=" for `=47+38`."""
        super().__init__([] if call else [calculator])
        self._call = call

    async def step(
        self, action: str, calls: Sequence[Mapping[str, str]] = ()
    ) -> tuple[list[dict[str, str]] | None, float | None, bool]:
        if self._call and self._call in action:
            expression = action.partition(self._call)[2].strip()
            return [{"role": "tool", "content": calculated(expression)}], 0.0, False
        return await super().step(action, calls)

    async def judge(self, answer: str) -> float:
        numbers = _NUMBER.findall(answer)
        return float(bool(numbers) and float(numbers[-1]) == float(str(self.record["answer"])))


def calculator(expression: str) -> str:
    """Calculates the value of an expression.

    Args:
        expression: numbers with + - * / and parentheses
    """
    return calculated(expression)


def calculated(expression: str) -> str:
    """The value of an expression as text, whole numbers without a point; an error begins with `error: `."""
    if len(expression) > _LONGEST:
        return f"error: it has more than {_LONGEST} characters"
    try:
        value = _value(ast.parse(expression, mode="eval").body)
        return str(int(value)) if value == int(value) else f"{value:.10g}"
    except (SyntaxError, ValueError, ArithmeticError, RecursionError, MemoryError) as error:
        return f"error: {error or type(error).__name__}"


def _value(node: ast.AST) -> float:
    match node:
        case ast.Constant(value=bool()):
            pass
        case ast.Constant(value=int() | float() as number):
            return number
        case ast.UnaryOp(op=sign, operand=inner) if type(sign) in _OPERATORS:
            return _OPERATORS[type(sign)](_value(inner))
        case ast.BinOp(left=left, op=sign, right=right) if type(sign) in _OPERATORS:
            return _OPERATORS[type(sign)](_value(left), _value(right))
    raise ValueError("it holds more than numbers, + - * / and parentheses")
