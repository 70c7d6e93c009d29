"""moto's S3 behind a real socket on loopback, with a layer that drops or refuses answers on the way."""

import logging
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import s3fs
from moto.server import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import make_server

from storage.backends.root import Root, open_root

BUCKET = "ratchet"
logging.getLogger("werkzeug").setLevel(logging.WARNING)


class Faults:
    """WSGI layer: the next writing requests meet, in turn, a status to answer with before or "lost" after the work."""

    def __init__(self) -> None:
        self.application = DomainDispatcherApplication(create_backend_app)
        self.pending: list[str] = []
        self.requests: list[str] = []

    def __call__(self, environ, start_response):
        writing = environ["REQUEST_METHOD"] in ("PUT", "POST")
        self.requests.append(f"{environ['REQUEST_METHOD']} {environ['PATH_INFO']}?{environ['QUERY_STRING']}")
        step = self.pending.pop(0) if writing and self.pending else "ok"
        if step == "ok":
            return self.application(environ, start_response)
        if step == "lost":
            list(self.application(environ, lambda status, headers, *_: None))
            step = "500 InternalError"
        else:
            environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
        code = step.split(" ", 1)[1]
        start_response(step, [("Content-Type", "application/xml")])
        return [f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>{code}</Message></Error>".encode()]


class S3Server:
    """The server, and roots on it."""

    def __init__(self, faults: Faults, port: int) -> None:
        self.faults = faults
        self.options = {
            "key": "test",
            "secret": "test",
            "client_kwargs": {"endpoint_url": f"http://127.0.0.1:{port}", "region_name": "us-east-2"},
        }
        location = {"LocationConstraint": "us-east-2"}
        fs = s3fs.S3FileSystem(**self.options)
        if not fs.exists(BUCKET):  # moto's buckets are those of the process, whichever server made them
            fs.call_s3("create_bucket", Bucket=BUCKET, CreateBucketConfiguration=location)

    def root(self, prefix: str, bucket: str = BUCKET) -> Root:
        return open_root(f"s3://{bucket}/{prefix}", options=self.options)

    def fail_next(self, steps: Iterable[str]) -> None:
        self.faults.pending = list(steps)


@contextmanager
def s3_server() -> Iterator[S3Server]:
    faults = Faults()
    server = make_server("127.0.0.1", 0, faults, threaded=True)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield S3Server(faults, server.server_port)
    finally:
        server.shutdown()
        thread.join()
