"""The server: requests of the OpenAI form over a sampler, each in the session of its API key. On loopback only."""

import asyncio
import hashlib
import itertools
import json
import secrets
import socket
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, NamedTuple

import uvicorn
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from storage.errors import InputError, RatchetError, StageFailed
from tasks.config.rollout import STOP_BYTES
from tasks.endpoint.forms import Answered, Form
from tasks.endpoint.requests import ChatRequest, CompletionRequest, Message, Refused, disobeyed, narrowed, parsed
from tasks.endpoint.sessions import Asked, History, Pending, Session, stranger
from tasks.engine.protocol import Sampling
from tasks.environments.calls import Parts, Reader, by_tags, read_by
from tasks.environments.rendering import Renderer
from tasks.environments.sampler import Sampler
from tasks.environments.trajectory import Answer

_STARTS_S = 60.0
_STOPS_BYTES = 4 * STOP_BYTES  # of all lists of stop texts in a rollout
_HEAD_BYTES = 1 << 14  # of the address and the headers of a request
_ENDLESS_BYTES = 1 << 20  # of a head that is not read to its end
_GONE = 499  # for a client that is not there to read it
_Handler = Callable[[Request, Session], Awaitable[Response]]


class _Sampled(NamedTuple):
    question: Asked
    answer: Answer
    text: str
    parts: Parts


@dataclass(frozen=True)
class Rules:
    """Settings of every session."""

    model: str  # the name that clients give
    how: Sampling  # that of the run
    context: int  # longest sequence, in tokens
    sampling: Literal["override", "refuse"] = "override"
    """Treatment of sampling parameters that the trainer cannot follow: they have no effect and are recorded, or the
    request is refused."""
    body_bytes: int = 1 << 20  # longest request


class Endpoint:
    """Sessions over a sampler. `open` and `close` are called from any thread; all else runs on the server's loop."""

    def __init__(self, sampler: Sampler, renderer: Renderer, rules: Rules, reader: Reader = by_tags) -> None:
        self._sampler, self._renderer, self._rules, self._read = sampler, renderer, rules, reader
        self._sessions: dict[str, Session] = {}
        self._stops = set[frozenset[str]]()  # for each the engines have a table, as long as they are busy
        self.strangers = 0  # requests without the key of a session

    def open(self, seed: int, turns: int = 1 << 10, tokens: int = 1 << 30, sampler: Sampler | None = None) -> Session:
        """A session with a key that cannot be guessed, for so many answers and sampled tokens; by default of the
        endpoint's own sampler."""
        key, sampler = f"sk-{secrets.token_urlsafe(32)}", sampler or self._sampler
        session = Session(key, seed, self._renderer, turns, tokens, sampler)
        self._sessions[session.key] = session
        return session

    async def close(self, session: Session) -> None:
        """Accept no more requests of a session, and give up those that are under way: from then on nothing changes it.
        Raises the error by which its engines have failed, if they have."""
        await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(self._end(session), self._loop))
        if session.failure is not None:
            raise session.failure

    async def _end(self, session: Session) -> None:
        del self._sessions[session.key]
        session.ended = True
        if left := [one.task for equal in session.under_way.values() for one in equal]:
            for one in left:
                one.cancel()
            await asyncio.wait(left)

    async def serve(self, server: uvicorn.Server, port: socket.socket) -> None:
        """Serve until the server is to exit."""
        self._loop = asyncio.get_running_loop()
        await server.serve([port])

    async def application(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, whatever its method and address; each refusal is recorded in its session."""
        request = Request(scope, receive)
        response = await self._answered(request)
        await response(scope, receive, send)

    async def _answered(self, request: Request) -> Response:
        session = self._sessions.get(request.headers.get("authorization", "").partition(" ")[2])
        if session is None:
            self.strangers += 1
            return _refused(stranger())
        try:
            return await self._handler(request)(request, session)
        except Refused as refusal:
            session.note(refusal)
            return _refused(refusal)
        except ClientDisconnect:
            session.counts["disconnected"] += 1
            return Response(status_code=_GONE)

    def _handler(self, request: Request) -> _Handler:
        """Raises Refused: nothing is at the address, or the head is too long."""
        head = [*itertools.chain.from_iterable(request.headers.raw), str(request.url)]
        if (size := sum(map(len, head))) > _HEAD_BYTES:
            raise _long_head(size)
        match request.method, request.url.path:
            case "POST", "/v1/chat/completions":
                return self._chat
            case "POST", "/v1/completions":
                return self._complete
            case "GET", "/v1/models":
                return self._models
            case method, path:
                known = "POST /v1/chat/completions, POST /v1/completions and GET /v1/models"
                raise Refused(f"there is no {method} {path}: the endpoint has {known}", "unknown_url", 404)

    async def _models(self, request: Request, session: Session) -> Response:
        return JSONResponse(
            {"object": "list", "data": [{"id": self._rules.model, "object": "model", "owned_by": "run"}]}
        )

    async def _chat(self, request: Request, session: Session) -> Response:
        body = await self._body(request)
        asked = self._accepted(parsed(ChatRequest, body, self._rules.body_bytes), session)
        history = History(asked.canonical(), json.dumps(asked.tools or []))
        form = Form(self._rules.model, chat=True, usage=asked.tells_usage)
        return _response(form, asked.stream, await self._once(request, session, body, asked, history))

    async def _complete(self, request: Request, session: Session) -> Response:
        body = await self._body(request)
        asked = self._accepted(parsed(CompletionRequest, body, self._rules.body_bytes), session)
        form = Form(self._rules.model, chat=False, usage=asked.tells_usage)
        history = History((Message("", asked.prompt),))
        return _response(form, asked.stream, await self._once(request, session, body, asked, history))

    async def _body(self, request: Request) -> bytes:
        """The body, or a little more of it than is accepted. Raises ClientDisconnect."""
        body = bytearray()
        async for piece in request.stream():
            body += piece
            if len(body) > self._rules.body_bytes:
                break
        return bytes(body)

    def _accepted[R: (ChatRequest, CompletionRequest)](self, asked: R, session: Session) -> R:
        """The request. Raises Refused: it is for another model, or its sampling must not be overridden."""
        session.counts["requests"] += 1
        if asked.model != self._rules.model:
            fact = f"there is no model {asked.model!r}: ask for {self._rules.model!r}"
            raise Refused(fact, "model_not_found", 404, "model")
        if asked.stops:
            self._check_stops(frozenset(asked.stops))
        if not (other := disobeyed(asked, self._rules.how)):
            return asked
        if self._rules.sampling == "refuse":
            fact = f"{', '.join(other)} would make samples that cannot be trained: leave out what the run decides"
            raise Refused(fact, "sampling_of_the_run", param=next(iter(other)))
        session.override(other)
        return asked

    def _check_stops(self, stops: frozenset[str]) -> None:
        """Raises Refused: the tokenizer cannot have them, or the engines would need too much memory for them."""
        if (flaw := self._renderer.unstoppable) is not None:
            raise Refused(flaw, "unsupported_stop", param="stop")
        if sum(len(one.encode()) for some in {*self._stops, stops} for one in some) > _STOPS_BYTES:
            fact = f"this rollout has had {len(self._stops)} lists of stop texts, with almost {_STOPS_BYTES} bytes"
            raise Refused(f"{fact}: give one of these lists", "too_many_stops", param="stop")
        self._stops.add(stops)

    async def _once(
        self, request: Request, session: Session, body: bytes, asked: ChatRequest | CompletionRequest, history: History
    ) -> list[Answered]:
        """The answers; a request that the client repeats because it lost the connection is not sampled again. They
        join the session when there is a client to be given them, in the order of the choices. Raises
        ClientDisconnect."""
        if session.ended:
            raise stranger()
        key = hashlib.blake2b(body).hexdigest()
        if request.headers.get("x-stainless-retry-count", "0") == "0" or not session.under_way[key]:
            one = Pending(asyncio.create_task(self._answers(session, asked, history)))
            session.under_way[key].append(one)
            one.task.add_done_callback(lambda _: _forget(session, key, one))
        else:  # of equal requests each gets an answer of its own
            one = min(session.under_way[key], key=lambda other: other.clients)
        one.clients += 1
        gone = asyncio.ensure_future(_gone(request))
        await asyncio.wait([one.task, gone], return_when=asyncio.FIRST_COMPLETED)  # the one goes on without the other
        gone.cancel()
        if session.ended:
            raise stranger()
        if gone.done():
            one.clients -= 1
            raise ClientDisconnect
        if one.given is None:
            one.given = [
                Answered(of.question, of.answer, session.answered(of.question, of.answer, of.text, of.parts))
                for of in one.task.result()
            ]
        return one.given

    async def _answers(
        self, session: Session, asked: ChatRequest | CompletionRequest, history: History
    ) -> list[_Sampled]:
        questions: list[Asked] = []
        try:
            for _ in range(asked.n):
                questions.append(session.ask(history))  # noqa: PERF401 - those before one that fails are forgotten
        except InputError as error:
            raise Refused(str(error), "invalid_messages", param="messages") from None
        finally:
            if len(questions) < asked.n:
                for one in questions:
                    session.count(None)
                    session.unanswered(one)
        found = await asyncio.gather(*(self._answer(session, asked, one) for one in questions), return_exceptions=True)
        for flaw in (one for one in found if isinstance(one, BaseException)):
            for one in questions:  # no client is given the others
                session.unanswered(one)
            raise flaw
        return [one for one in found if isinstance(one, _Sampled)]

    async def _answer(self, session: Session, asked: ChatRequest | CompletionRequest, question: Asked) -> _Sampled:
        answer, kept = None, 0
        try:
            how = self._how(asked, question)
            kept = await session.reserve(how.max_tokens)
            how = how.model_copy(update={"max_tokens": kept})
            found = await session.sampler.sample(question.tokens, question.branch.seed, how)
            if found.finish_reason == "abort":
                raise Refused("the engine has dropped the request: ask again", "aborted", 503)
            answer = found
            text = self._renderer.text(answer.tokens.tolist())
            ends = [at for one in asked.stops if (at := text.find(one)) >= 0]
            parts = await self._parts(asked, question, text[: min(ends, default=len(text))])
        except RatchetError as error:
            session.failure = session.failure or error
            raise Refused("the engines cannot answer; the run says why", "unavailable", 503) from error
        finally:
            session.count(answer, kept)
        return _Sampled(question, found, text, parts)

    async def _parts(self, asked: ChatRequest | CompletionRequest, question: Asked, text: str) -> Parts:
        if isinstance(asked, CompletionRequest):
            return Parts(text)
        tools = [] if asked.tool_choice == "none" else question.history.shown_tools
        return await read_by(self._read, text, tools)

    def _how(self, asked: ChatRequest | CompletionRequest, question: Asked) -> Sampling:
        room = self._rules.context - len(question.tokens)
        if room < 1:
            fact = f"the conversation has at least {len(question.tokens)} tokens, and the model reads"
            told = f"{fact} {self._rules.context} with the answer: shorten it"
            raise Refused(told, "context_length_exceeded", param="messages")
        how = narrowed(asked, self._rules.how)
        return how.model_copy(update={"max_tokens": min(how.max_tokens, room)})


@contextmanager
def serving(endpoint: Endpoint) -> Iterator[str]:
    """Serve on a free port of loopback, in a thread; the base URL for clients. Raises StageFailed: it cannot."""
    with socket.socket() as port:
        port.bind(("127.0.0.1", 0))
        settings = uvicorn.Config(
            endpoint.application, log_config=None, access_log=False, lifespan="off", timeout_graceful_shutdown=1,
            interface="asgi3", ws="none", proxy_headers=False, http=_Bounded,
        )  # fmt: skip
        server = uvicorn.Server(settings)
        serve, factory = endpoint.serve(server, port), settings.get_loop_factory()
        thread = threading.Thread(target=asyncio.run, args=(serve,), kwargs={"loop_factory": factory}, daemon=True)
        thread.start()
        until = time.monotonic() + _STARTS_S
        while not server.started:
            if not thread.is_alive() or time.monotonic() > until:
                raise StageFailed("the endpoint of the run does not start on loopback: the log says more; start again")
            time.sleep(0.01)
        try:
            yield f"http://127.0.0.1:{port.getsockname()[1]}/v1"
        finally:
            server.should_exit = True
            thread.join()


class _Bounded(HttpToolsProtocol):
    """A connection that is closed where the head of a request has no end: the parser would keep all of it."""

    _head: int | None = None  # bytes that came since a head began, which goes on

    def on_message_begin(self) -> None:
        self._head = 0
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._head = None
        super().on_headers_complete()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._head is not None and (size := self._head + len(data)) > _ENDLESS_BYTES:
            body = json.dumps(_long_head(size).document()).encode()
            told = (
                f"HTTP/1.1 431 \r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\nconnection: close"
            )
            self.transport.write(f"{told}\r\n\r\n".encode() + body)
            self.transport.close()
        elif self._head is not None:
            self._head = size


async def _gone(request: Request) -> None:
    """Wait until the client of a request, which has been read, is not there any more."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _long_head(size: int) -> Refused:
    fact = f"the address and the headers have {size} bytes, and at most {_HEAD_BYTES} are accepted"
    return Refused(f"{fact}: send fewer or shorter ones", "headers_too_large", 431)


def _forget(session: Session, key: str, one: Pending) -> None:
    """Leave out a request that has no answer, which holds all of its text: asked again, it is another one."""
    if one.task.cancelled() or one.task.exception():
        session.under_way[key].remove(one)
        if not session.under_way[key]:
            del session.under_way[key]


def _refused(refusal: Refused) -> Response:
    return JSONResponse(refusal.document(), refusal.status)


def _response(form: Form, stream: bool, answers: list[Answered]) -> Response:
    if not stream:
        return JSONResponse(form.whole(answers))

    async def events() -> AsyncIterator[str]:
        for chunk in form.chunks(answers):
            yield f"data: {json.dumps(chunk)}\n\n"
        yield "data: [DONE]\n\n"

    return StreamingResponse(events(), media_type="text/event-stream")
