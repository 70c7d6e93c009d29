"""A calculator as a tool, over problems whose answer is a number."""

import ast
import json
import operator
import re
from collections.abc import Mapping
from typing import Any

_CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)
_NUMBER = re.compile(r"-?\d+(?:\.\d+)?")
_LONGEST = 200  # characters of an expression; so no number in it is huge
_OPERATORS = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
    ast.USub: operator.neg,
}  # fmt: skip
_EXPRESSION = {"type": "string", "description": "numbers with + - * / and parentheses"}
_TOOL = {
    "name": "calculator",
    "description": "Calculates the value of an expression.",
    "parameters": {"type": "object", "properties": {"expression": _EXPRESSION}, "required": ["expression"]},
}


class Calculator:
    """Show the record's `prompt`. An answer with a call is given its result; one without is the last, and is right if
    its last number is the record's `answer`. A wrong call is told what is wrong with it."""

    def __init__(self, call: str = "") -> None:
        """With `call`, a call is this text and an expression, for models without tools, as "=" for `=47+38`."""
        self._call = call
        self.tools = () if call else ({"type": "function", "function": _TOOL},)

    async def reset(self, record: Mapping[str, Any], seed: int) -> Any:
        self._answer = str(record["answer"])
        return record["prompt"]

    async def step(self, action: str) -> tuple[list[dict[str, str]] | None, float, bool]:
        if (called := self._called(action)) is not None:
            return [{"role": "tool", "content": called}], 0.0, False
        numbers = _NUMBER.findall(action)
        return None, float(bool(numbers) and float(numbers[-1]) == float(self._answer)), True

    async def replay(self, turns: object) -> None:
        """Do nothing: a turn leaves nothing behind."""

    def _called(self, action: str) -> str | None:
        """The result of the call in an answer; None if there is none."""
        if self._call:
            _, there, expression = action.partition(self._call)
            return calculated(expression.strip()) if there else None
        if (found := _CALL.search(action)) is None:
            return None
        try:
            return calculated(str(json.loads(found[1])["arguments"]["expression"]))
        except (ValueError, KeyError, TypeError):
            return 'error: a call is {"name": "calculator", "arguments": {"expression": "1+2"}}'


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
