"""Requests of the OpenAI form: their fields, the flaws for which one is refused, and what of them cannot be obeyed."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, JsonValue, ValidationError, field_validator

from tasks.config.rollout import STOP_BYTES
from tasks.data.values import flaw
from tasks.data.values import parsed as json_of
from tasks.engine.protocol import Sampling
from tasks.rewards.words import shortened, shown

REASONING = ("reasoning_content", "reasoning")
_UNREADABLE = (UnicodeDecodeError, UnicodeEncodeError)
_DEEPEST = 8  # parts of the place of a flaw that are told
_TEXT_PARTS = ("text", "input_text", "output_text")
_VALUES = 1 << 14  # of JSON in a request, and in the arguments of the calls that it repeats
_MESSAGES = 1 << 11
_TOOLS, _TOOLS_BYTES = 128, 1 << 18
_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"', re.DOTALL)


class Refused(Exception):
    """A request that is answered with an error of the OpenAI form, whose texts are bounded: they are stored."""

    def __init__(self, message: str, code: str, status: int = 400, param: str | None = None) -> None:
        super().__init__(shortened(message))
        self.code, self.status, self.param = code, status, shortened(param) if param else param

    def document(self) -> dict[str, Any]:
        """The body of the answer."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}


class Call(NamedTuple):
    id: str
    name: str
    arguments: str  # JSON as the model wrote it


@dataclass(frozen=True)
class Message:
    """One message, in one form however a client writes it."""

    role: str
    content: str = ""
    calls: tuple[Call, ...] = ()
    call_id: str | None = None  # of the call that a message of a tool answers
    name: str | None = None
    reasoning: str | None = field(default=None, compare=False)  # clients may leave it out

    def repeats(self, ours: "Message") -> bool:
        """True if a client has sent our message back unchanged; reasoning may be left out."""
        return self == ours and self.reasoning in (None, ours.reasoning)

    def rendered(self) -> dict[str, Any]:
        """The message as chat templates take it: arguments as a table where they are one."""
        calls = [
            {"id": one.id, "type": "function", "function": {"name": one.name, "arguments": _table(one.arguments)}}
            for one in self.calls
        ]
        more = {"tool_calls": calls, "tool_call_id": self.call_id, "name": self.name, REASONING[0]: self.reasoning}
        return {"role": self.role, "content": self.content, **{key: one for key, one in more.items() if one}}


class _Function(BaseModel, frozen=True):
    name: str
    arguments: str = ""


class _Called(BaseModel, frozen=True):
    id: str = ""
    type: Literal["function"] = "function"
    function: _Function


class _Message(BaseModel, frozen=True):
    model_config = ConfigDict(extra="allow")
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[dict[str, JsonValue]] | None = None
    tool_calls: list[_Called] | None = None
    tool_call_id: str | None = None
    name: str | None = None

    def canonical(self, place: str) -> Message:
        """Raises Refused: it has what no template is given."""
        more = {key: one for key, one in (self.model_extra or {}).items() if one}
        reasoning = next((str(more.pop(key)) for key in REASONING if key in more), None)
        for key in more:
            raise Refused(f"{place}.{key} is not supported: leave it out", "unknown_parameter", param=f"{place}.{key}")
        calls = tuple(Call(one.id, one.function.name, one.function.arguments) for one in self.tool_calls or ())
        role = "system" if self.role == "developer" else self.role
        return Message(role, _text(self.content, place), calls, self.tool_call_id, self.name, reasoning)


def _offered(tool: dict[str, JsonValue]) -> dict[str, JsonValue]:
    """A tool as it is given: templates show all of it, in its order."""
    if isinstance(function := tool.get("function"), dict) and isinstance(function.get("name"), str):
        return tool
    raise ValueError("a tool is a function with a name")


class StreamOptions(BaseModel, frozen=True):
    """Options of a streamed answer."""

    include_usage: bool = False


class _Request(BaseModel, frozen=True):
    """Fields of both kinds. Those that only tell who asks are accepted and have no effect."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)
    model: str
    n: int = Field(default=1, ge=1, le=16)
    stop: str | list[str] | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    max_tokens: int | None = Field(default=None, ge=1)
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    user: JsonValue = None
    metadata: JsonValue = None
    store: JsonValue = None
    service_tier: JsonValue = None
    safety_identifier: JsonValue = None
    prompt_cache_key: JsonValue = None

    @field_validator("stop")
    @classmethod
    def _bounded(cls, stop: str | list[str] | None) -> str | list[str] | None:
        if len("".join(stop or ()).encode()) > STOP_BYTES:
            raise ValueError(f"at most {STOP_BYTES} bytes of texts that end an answer are looked for")
        return stop

    @property
    def stops(self) -> tuple[str, ...]:
        """Texts that end an answer."""
        given = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return tuple(one for one in given if one)

    @property
    def tells_usage(self) -> bool:
        """True if the last chunk of a streamed answer tells the number of tokens."""
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def limit(self) -> int | None:
        """Most tokens of an answer."""
        return self.max_tokens


class CompletionRequest(_Request, frozen=True):
    """A request of `/v1/completions`."""

    prompt: str = Field(min_length=1)
    echo: Literal[False] = False
    best_of: Literal[1] | None = None
    suffix: None = None
    logprobs: Literal[0] | None = None


class ChatRequest(_Request, frozen=True):
    """A request of `/v1/chat/completions`."""

    messages: list[_Message] = Field(min_length=1, max_length=_MESSAGES)
    tools: list[Annotated[dict[str, JsonValue], AfterValidator(_offered)]] | None = Field(None, max_length=_TOOLS)
    tool_choice: JsonValue = "auto"
    parallel_tool_calls: bool | None = None
    max_completion_tokens: int | None = Field(default=None, ge=1)
    response_format: dict[str, JsonValue] | None = None
    reasoning_effort: str | None = None
    logprobs: Literal[False] | None = None
    top_logprobs: Literal[0] | None = None

    @field_validator("messages")
    @classmethod
    def _few_values(cls, messages: list[_Message]) -> list[_Message]:
        calls = [call for one in messages for call in one.tool_calls or ()]
        if (held := sum(_values_in(call.function.arguments.encode()) for call in calls)) > _VALUES:
            raise _too_much("messages", f"arguments of calls have {held} values of JSON", _VALUES)
        return messages

    @field_validator("tools")
    @classmethod
    def _short(cls, tools: list[Any] | None) -> list[Any] | None:
        if (size := len(json.dumps(tools))) > _TOOLS_BYTES:
            raise _too_much("tools", f"tools have {size} bytes of JSON", _TOOLS_BYTES)
        return tools

    @property
    def limit(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    def canonical(self) -> tuple[Message, ...]:
        """The messages. Raises Refused: one cannot be shown to the model."""
        return tuple(one.canonical(f"messages[{place}]") for place, one in enumerate(self.messages))


def parsed[R: _Request](kind: type[R], body: bytes, most: int) -> R:
    """A request from its body. Raises Refused: it is too long or has too many values, is no UTF-8, no JSON, or has
    fields that are unknown or of another kind."""
    if len(body) > most:
        fact = f"the request has {len(body)} bytes, and at most {most} are accepted"
        raise Refused(f"{fact}: send less text", "request_too_large", 413)
    if (held := _values_in(body)) > _VALUES:
        fact = f"the request has {held} values of JSON, and at most {_VALUES} are accepted"
        raise Refused(f"{fact}: send fewer messages, tools or parameters", "request_too_large", 413)
    try:
        document = json_of(body.decode())
        if b"\\ud" in body.lower():  # half of a surrogate pair is not text
            json.dumps(document, ensure_ascii=False).encode()
        return kind.model_validate(document)
    except UnicodeError as error:
        fact = f"the request is not UTF-8 ({error.reason if isinstance(error, _UNREADABLE) else error})"
        raise Refused(f"{fact}: encode it so", "invalid_encoding") from None
    except ValidationError as flaws:
        first = flaws.errors(include_url=False)[0]
        place = ".".join(map(str, first["loc"][:_DEEPEST]))
        unknown = first["type"] == "extra_forbidden"
        code = "unknown_parameter" if unknown else "invalid_value"
        fact = f"{place} is not a parameter that is known here" if unknown else f"{place}: {first['msg']}"
        raise Refused(f"{fact} (given: {shown(first['input'])})", code, param=place) from None
    except (ValueError, RecursionError) as error:
        raise Refused(f"the request is not JSON: {error}", "invalid_json") from None


def disobeyed(request: ChatRequest | CompletionRequest, how: Sampling) -> dict[str, JsonValue]:
    """Parameters of sampling that the trainer cannot follow, as it would train tokens under another distribution than
    they were sampled from; empty if there are none."""
    follow: dict[str, Sequence[JsonValue]] = {
        **{name: (None, vars(how)[name]) for name in ("temperature", "top_p", "top_k", "min_p")},
        **dict.fromkeys(("seed", "reasoning_effort"), (None,)),
        **dict.fromkeys(("presence_penalty", "frequency_penalty"), (None, 0)),
        "repetition_penalty": (None, 1),
        "parallel_tool_calls": (None, True),
        "logit_bias": (None, {}),
        "response_format": (None, {"type": "text"}),
        "tool_choice": (None, "auto", "none"),
    }
    given = vars(request)
    return {name: given[name] for name, same in follow.items() if given.get(name) not in same}


def narrowed(request: ChatRequest | CompletionRequest, how: Sampling) -> Sampling:
    """The run's sampling with what a request may decide: fewer tokens, and texts that end an answer."""
    most = min(how.max_tokens, request.limit or how.max_tokens)
    return how.model_copy(update={"max_tokens": most, "stop": (*how.stop, *request.stops)})


def _too_much(name: str, fact: str, most: int) -> Refused:
    return Refused(f"{fact}, and at most {most} are accepted: send less", "invalid_value", param=name)


def _values_in(text: bytes) -> int:
    """Values of a JSON text, or a few more, without building them."""
    marks = _STRING.sub(b"", text)
    return 1 + sum(map(marks.count, (b",", b"[", b"{")))


def _text(content: str | Sequence[Mapping[str, JsonValue]] | None, place: str) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    for one in content:
        if one.get("type") not in _TEXT_PARTS or not isinstance(one.get("text"), str):
            fact = f"{place}.content has a part of type {shown(one.get('type'))}"
            raise Refused(f"{fact}, but the model reads text alone", "unsupported_content", param=f"{place}.content")
    return "".join(str(one["text"]) for one in content)


def _table(arguments: str) -> JsonValue:
    try:
        return table if isinstance(table := json_of(arguments), dict) and flaw(table) is None else arguments
    except (ValueError, RecursionError):
        return arguments
