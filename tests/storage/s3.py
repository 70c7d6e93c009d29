"""moto's S3 behind a real socket on loopback, with a layer that drops, refuses or changes answers on the way."""

import logging
import re
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
    """WSGI layer: the next writing requests get, in turn, a status instead of the work, or "lost" after it."""

    def __init__(self) -> None:
        self.application = DomainDispatcherApplication(create_backend_app)
        self.pending: list[str] = []
        self.requests: list[str] = []
        self.no_uploads: str | None = None
        """Status with which a request for the list of uploads in parts is refused."""
        self.away = False
        """True if every request is refused with 503, as a load balancer with no server behind it does."""
        self.ceph = False
        """True if failed conditions are reported as by Ceph RGW 16.2: without naming the condition."""

    def __call__(self, environ, start_response):
        writing = environ["REQUEST_METHOD"] in ("PUT", "POST")
        self.requests.append(f"{environ['REQUEST_METHOD']} {environ['PATH_INFO']}?{environ['QUERY_STRING']}")
        step = self.pending.pop(0) if writing and self.pending else "ok"
        if self.no_uploads and environ["QUERY_STRING"].startswith("uploads&"):
            step = self.no_uploads
        if self.away:
            step = "503 ServiceUnavailable"
        if step == "ok":
            return self._as_ceph(environ, start_response) if self.ceph else self.application(environ, start_response)
        if step == "lost":
            list(self.application(environ, lambda status, headers, *_: None))
            step = "500 InternalError"
        else:
            environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
        code = step.split(" ", 1)[1]
        start_response(step, [("Content-Type", "application/xml")])
        return [f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>{code}</Message></Error>".encode()]

    def _as_ceph(self, environ, start_response):
        said = []
        body = b"".join(self.application(environ, lambda status, headers, *_: said.append((status, headers))))
        status, headers = said[0]
        if status.startswith("412"):
            body = re.sub(rb"<Condition>.*?</Condition>", b"", body)
            headers = [(name, value) for name, value in headers if name.lower() != "content-length"]
        start_response(status, headers)
        return [body]


class S3Server:
    """The server, and roots on it."""

    def __init__(self) -> None:
        self.faults = Faults()
        self._port = 0
        self.start()
        self.options = {
            "key": "test",
            "secret": "test",
            "client_kwargs": {"endpoint_url": f"http://127.0.0.1:{self._port}", "region_name": "us-east-2"},
        }
        location = {"LocationConstraint": "us-east-2"}
        fs = s3fs.S3FileSystem(**self.options)
        if not fs.exists(BUCKET):  # moto's buckets belong to the process, whichever server made them
            fs.call_s3("create_bucket", Bucket=BUCKET, CreateBucketConfiguration=location)

    def root(self, prefix: str, bucket: str = BUCKET) -> Root:
        return open_root(f"s3://{bucket}/{prefix}", options=self.options)

    def fail_next(self, steps: Iterable[str]) -> None:
        self.faults.pending = list(steps)

    def start(self) -> None:
        """Serve, on the same port each time; moto keeps the stored objects."""
        self._server = make_server("127.0.0.1", self._port, self.faults, threaded=True)
        self._port = self._server.server_port
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Refuse connections."""
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    @contextmanager
    def gone_for(self, seconds: float) -> Iterator[None]:
        """Stay stopped for that time from the beginning of a block."""
        self.stop()
        again = threading.Timer(seconds, self.start)
        again.start()
        try:
            yield
        finally:
            again.join()


@contextmanager
def s3_server() -> Iterator[S3Server]:
    server = S3Server()
    try:
        yield server
    finally:
        server.stop()
