"""A line to a server that can be cut and restored, for tests of an unreachable server."""

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from urllib.parse import urlsplit

_CHUNK = 1 << 16


class Link:
    """Forwards connections to the server of a URL; while it is cut, it closes them at once."""

    def __init__(self, url: str) -> None:
        self._target = (str(urlsplit(url).hostname), int(urlsplit(url).port or 80))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}/api"
        self._open: list[socket.socket] = []
        self._cut = threading.Event()
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self) -> None:
        """Make the server unreachable."""
        self._cut.set()
        for one in self._open:
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    def restore(self) -> None:
        """Make the server reachable again."""
        self._cut.clear()

    def close(self) -> None:
        """Close the link and its connections."""
        self._listener.close()
        self.cut()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                ours, _ = self._listener.accept()
                if self._cut.is_set():
                    ours.close()
                    continue
                theirs = socket.create_connection(self._target)
                self._open += [ours, theirs]
                for one, other in ((ours, theirs), (theirs, ours)):
                    threading.Thread(target=_forward, args=(one, other), daemon=True).start()


def _forward(one: socket.socket, other: socket.socket) -> None:
    with suppress(OSError):
        while data := one.recv(_CHUNK):
            other.sendall(data)
    with suppress(OSError):
        other.shutdown(socket.SHUT_RDWR)


@contextmanager
def linked(url: str) -> Iterator[Link]:
    """A link to the server of `url`."""
    link = Link(url)
    try:
        yield link
    finally:
        link.close()
