"""The server of the viewer: loopback only, behind a token, with headers by which no foreign script ever runs."""

import secrets
import socket
from collections.abc import MutableMapping
from contextlib import suppress
from typing import Any

import uvicorn
from starlette.datastructures import MutableHeaders
from starlette.requests import Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from flows.viewer.pages import application
from storage.backends.root import Root
from storage.errors import InputError

HOST = "127.0.0.1"
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; style-src 'self'; script-src 'self'; img-src 'self'; connect-src "
    "'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}
_NO_TOKEN = "This viewer is private: open the whole address that `ratchet view` has printed, with its token.\n"


class Guard:
    """Lets requests through that come from this machine's browser with the token; answers all others itself."""

    def __init__(self, app: ASGIApp, port: int, token: str) -> None:
        self._app, self._token, self._cookie = app, token, f"ratchet-view-{port}"
        self._hosts = {f"{host}:{port}" for host in (HOST, "localhost")}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def with_headers(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(HEADERS)
            await send(message)

        refused = self._refused(Request(scope))
        await (self._app if refused is None else refused)(scope, receive, with_headers)

    def _refused(self, request: Request) -> Response | None:
        host, origin = request.headers.get("host", ""), request.headers.get("origin")
        if host not in self._hosts:
            return PlainTextResponse(f"{host!r} is not this viewer: open {HOST}, or localhost\n", 421)
        if origin is not None and origin != f"http://{host}":
            return PlainTextResponse(f"requests from {origin!r} are refused\n", 403)
        token, reads = request.query_params.get("token"), request.method in ("GET", "HEAD")
        if reads and token is not None and self._is_ours(token):
            answer = RedirectResponse(str(request.url.remove_query_params("token")), 303)
            answer.set_cookie(self._cookie, self._token, httponly=True, samesite="strict")
            return answer
        allowed = token is None and self._is_ours(request.cookies.get(self._cookie, ""))
        return None if allowed else PlainTextResponse(_NO_TOKEN, 403)

    def _is_ours(self, token: str) -> bool:
        return secrets.compare_digest(token.encode(), self._token.encode())


def listening(port: int) -> socket.socket:
    """A socket of this machine alone, on `port` or on any free one if that is 0. Raises InputError: it is taken."""
    try:
        return socket.create_server((HOST, port))
    except OSError as error:
        raise InputError(
            f"--port {port} cannot be used ({error.strerror}): give another, or 0 for a free one"
        ) from None


def serve(root: Root, server: socket.socket, token: str) -> None:
    guarded = Guard(application(root), server.getsockname()[1], token)
    config = uvicorn.Config(guarded, log_level="warning", access_log=False, server_header=False, lifespan="off")
    with suppress(KeyboardInterrupt):
        uvicorn.Server(config).run([server])
