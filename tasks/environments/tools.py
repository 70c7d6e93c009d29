"""Functions as tools: an environment whose conversations end with the first answer that calls none of them."""

import inspect
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, NotRequired, TypedDict

from pydantic import ConfigDict, PydanticUserError, TypeAdapter, ValidationError

from storage.errors import InputError
from tasks.environments.calls import OPENED, by_tags
from tasks.environments.protocol import Observation, ToolError, Turn
from tasks.rewards.resolve import find_reward
from tasks.rewards.words import shown

Definition = Mapping[str, Any]  # of a function, as OpenAI writes it
_ABOUT = re.compile(r"^ +(\w+)(?: \([^)]*\))?: +(.+)$", re.MULTILINE)
_WRONG = 'error: a call is {"name": NAME, "arguments": {NAME: VALUE}} as JSON'


class Tool(NamedTuple):
    """One tool."""

    definition: Definition
    arguments: TypeAdapter[Any]
    function: Callable[..., Any]

    @property
    def name(self) -> str:
        """The name by which the policy calls it."""
        return self.definition["function"]["name"]

    async def called(self, arguments: str) -> str:
        """The result of a call. Raises ToolError: the arguments are wrong, or the function says so; and whatever else
        it raises."""
        try:
            given = self.arguments.validate_json(arguments)
        except ValidationError as flaws:
            first = flaws.errors(include_url=False)[0]
            raise ToolError(f"{'.'.join(map(str, first['loc'])) or 'arguments'}: {first['msg']}") from None
        found = self.function(**given)
        found = await found if inspect.isawaitable(found) else found
        return found if isinstance(found, str) else json.dumps(found, ensure_ascii=False)


class Tools:
    """Show the record's prompt. Calls of an answer are made in their order, and their results are messages of tools. An
    answer without a call is the last, and `judge` gives its reward. A wrong call and a `ToolError` are told to the
    policy; any other error of a tool is a failure of the environment."""

    def __init__(
        self,
        offered: Sequence[Callable[..., Any] | tuple[Definition, Callable[..., Any]]],
        reward: str = "exact_match",
        prompt: str = "prompt",
        **arguments: Any,
    ) -> None:
        """Functions with types and a docstring, or pairs of a definition and a function. The record's field `prompt` is
        a text, or messages. `reward` and its `arguments` score the last answer where `judge` is not overridden. Raises
        InputError: one is not a tool, or the reward function is not known or takes other arguments."""
        self.offer([_tool(None, one) if callable(one) else _tool(*one) for one in offered])
        self._reward, self._prompt, self._arguments = find_reward(reward, "reward").load().function, prompt, arguments
        try:
            inspect.signature(self._reward).bind(record={}, response="", **arguments)
        except TypeError as error:
            raise InputError(f"reward = {reward!r} cannot be called with {arguments}: {error}") from None

    def offer(self, found: Sequence[Tool]) -> None:
        """Show these tools, and no others. Raises InputError: two have one name."""
        self._tools = {one.name: one for one in found}
        if len(self._tools) < len(found):
            raise InputError(f"two of the tools {', '.join(one.name for one in found)} have one name: rename one")
        self.tools = [one.definition for one in found]

    async def reset(self, record: Mapping[str, Any], seed: int) -> Observation:
        self.record = record
        return record[self._prompt]

    async def step(
        self, action: str, calls: Sequence[Mapping[str, str]] = ()
    ) -> tuple[list[dict[str, str]] | None, float | None, bool]:
        if calls:
            return [await self._made(**call) for call in calls], 0.0, False
        if self.tools and OPENED in by_tags(action, ()).content:
            return [{"role": "tool", "content": _WRONG}], 0.0, False
        return None, await self.judge(action), True

    async def judge(self, answer: str) -> float | None:
        """The reward of the last answer; None if it cannot be judged."""
        found = self._reward(record=self.record, response=answer, **self._arguments)
        return await found if inspect.isawaitable(found) else found

    async def replay(self, turns: Sequence[Turn]) -> None:
        """Do nothing: results that are recorded are not asked for again."""

    async def _made(self, name: str, arguments: str) -> dict[str, str]:
        try:
            known = name in self._tools
            said = await self._tools[name].called(arguments) if known else f"error: there is no tool {shown(name)}"
        except ToolError as error:
            said = f"error: {error}"
        return {"role": "tool", "name": name, "content": said.encode(errors="backslashreplace").decode()}


def _tool(definition: Definition | None, function: Callable[..., Any]) -> Tool:
    """A tool; without a definition it follows from the signature and the docstring."""
    name = function.__name__ if inspect.isfunction(function) or inspect.ismethod(function) else repr(function)
    try:
        arguments = _arguments(name, function, typed=definition is None)
        if definition is None:
            definition = _defined(name, inspect.getdoc(function) or "", arguments.json_schema())
    except (TypeError, NameError, PydanticUserError) as error:
        fact = f"{name} cannot be a tool: {error}"
        raise InputError(f"{fact}. Give a function whose parameters have types that JSON knows") from None
    whole = definition if "function" in definition else {"type": "function", "function": definition}
    return Tool(whole, arguments, function)


def _arguments(name: str, function: Callable[..., Any], typed: bool) -> TypeAdapter[Any]:
    """A table with the parameters of a function. Raises TypeError: one has no type, or is not a keyword argument."""
    fields: dict[str, Any] = {}
    found, more = inspect.signature(function, eval_str=True).parameters.values(), "forbid"
    for one in found:
        if one.kind is inspect.Parameter.VAR_KEYWORD and not typed:
            more = "allow"
            continue
        if one.kind not in (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY):
            raise TypeError(f"its parameter {one} cannot be given by name")
        if typed and one.annotation is one.empty:
            raise TypeError(f"its parameter {one.name} has no type")
        kind = Any if one.annotation is one.empty else one.annotation
        fields[one.name] = kind if one.default is one.empty else NotRequired[kind]
    table = TypedDict(name, fields)  # pyright: ignore[reportArgumentType] - made of what the function has
    table.__pydantic_config__ = ConfigDict(extra=more)  # pyright: ignore[reportAttributeAccessIssue]
    return TypeAdapter(table)


def _defined(name: str, text: str, schema: Mapping[str, Any]) -> Definition:
    """The definition of a function from its docstring, whose lines `NAME: ...` describe parameters."""
    found, about = _untitled(schema), dict(_ABOUT.findall(text))
    for key, value in found.get("properties", {}).items():
        found["properties"][key] = {**value, **({"description": about[key]} if key in about else {})}
    parameters = {key: found[key] for key in ("type", "properties", "required", "$defs") if key in found}
    described = {"name": name, "description": " ".join(text.partition("\n\n")[0].split()), "parameters": parameters}
    return {"type": "function", "function": described}


def _untitled(schema: Any) -> Any:
    """A schema without the titles that pydantic makes of names."""
    if isinstance(schema, list):
        return [_untitled(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    return {key: _untitled(one) for key, one in schema.items() if not (key == "title" and isinstance(one, str))}
