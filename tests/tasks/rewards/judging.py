"""A judge on loopback that fails as it is told to."""

import json
import re
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

RUBRIC = "Score from 0 to 9.\n{question}\n{response}"


class Judge:
    """`plan` gives, for the text of a question and the number of its earlier requests, a fault or None."""

    def __init__(self, plan=lambda text, before: None, score=lambda text: len(text) % 10):
        self.plan, self.score, self.lock = plan, score, threading.Lock()
        self.asked, self.keys = [], set()

    def answer(self, text):
        with self.lock:
            before = self.asked.count(text)
            self.asked.append(text)
        return self.plan(text, before), f"I say so. Score: {self.score(text)}"


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        judge = self.server.judge
        judge.keys.add(self.headers.get("authorization"))
        fault, said = judge.answer(body["messages"][0]["content"])
        if fault == "hang":
            judge.stop.wait(20)
        status = fault if isinstance(fault, int) else 200
        said = {"no score": "I would rather not.", "nan": "Score: nan", "html": None}.get(fault, said)
        text = "<html>" if said is None else json.dumps({"choices": [{"message": {"content": said}}]})
        try:
            self.send_response(status)
            self.send_header("retry-after", "0.01")
            self.send_header("content-length", str(len(text)))
            self.end_headers()
            self.wfile.write(text.encode())
        except OSError:  # the client has gone
            pass

    def log_message(self, *_):
        pass


class Server(ThreadingHTTPServer):
    """A server that refuses no connection of a judge's requests at once, however late it accepts them.

    Python's default is a queue of five; a busy machine resets what comes beyond.
    """

    request_queue_size = 256


@contextmanager
def judging(judge):
    """The address of the judge."""
    server = Server(("127.0.0.1", 0), Handler)
    server.judge, judge.stop = judge, threading.Event()
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1"
    finally:
        judge.stop.set()
        server.shutdown()
        thread.join()
        server.server_close()


def number_in(text):
    return int(re.findall(r"\d+", text)[-1])
