"""The process of a temporary Prefect server: `python -m flows.server.process SOCKET`.

It serves on a socket that its parent has bound and handed over, so that no other process can take the port
in between. It ends when its standard input is closed, that is with its parent, however that ends."""

import os
import socket
import sys
import threading
from typing import TYPE_CHECKING

from trainer_core.collector import paused

if TYPE_CHECKING:
    import uvicorn


def main() -> None:
    with paused():
        import uvicorn
        from prefect.server.api.server import create_app

        from flows.server.sqlite import write_lock_first

    write_lock_first()
    listener = socket.socket(fileno=int(sys.argv[1]))
    server = uvicorn.Server(uvicorn.Config(create_app(ephemeral=True, final=True), log_level="error", lifespan="on"))
    threading.Thread(target=_end_with_parent, args=(server,), daemon=True).start()
    server.run(sockets=[listener])


def _end_with_parent(server: "uvicorn.Server") -> None:
    while os.read(sys.stdin.fileno(), 1024):
        pass
    server.should_exit = True


if __name__ == "__main__":
    main()
