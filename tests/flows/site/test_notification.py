"""A real server tells a webhook of flow runs that end red."""

import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from queue import Queue

import pytest
from prefect import flow, tags
from prefect.client.orchestration import get_client

from flows.server.temporary import drain
from flows.site.registration import AUTOMATION, OFF, keep_notification, webhook_url
from storage.errors import InputError

TAG = "ratchet-notified"
DEADLINE_S = 120


class Receiver:
    """A webhook of another person."""

    def __init__(self) -> None:
        self.told: Queue[tuple[str, dict]] = Queue()
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                receiver.told.put((self.headers["Content-Type"], json.loads(body)))
                self.send_response(204)
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        self.server = HTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/hook"


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    made = Receiver()
    thread = threading.Thread(target=made.server.serve_forever, daemon=True)
    thread.start()
    yield made
    made.server.shutdown()
    thread.join()
    made.server.server_close()


@flow(name="nightly", persist_result=False)
def failing(fail: bool) -> None:
    if fail:
        raise ValueError('the "reward" function failed')


@pytest.mark.slow
def test_a_flow_run_that_fails_notifies_once_and_others_do_not(prefect_api: str, receiver: Receiver):
    with get_client(sync_client=True) as client:
        for _ in range(2):  # repeated, it changes nothing
            keep_notification(client, TAG, receiver.url)
        assert len(client.read_automations_by_name(AUTOMATION)) == 1
        with tags(TAG):
            failing.with_options(flow_run_name="good")(False, return_state=True)
            failing.with_options(flow_run_name="bad")(True, return_state=True)
        failing.with_options(flow_run_name="stranger")(True, return_state=True)
        drain()
        kind, told = receiver.told.get(timeout=DEADLINE_S)
        assert kind == "application/json"
        assert (told["flow"], told["flow_run"], told["state"]) == ("nightly", "bad", "Failed")
        assert 'the "reward" function failed' in told["text"]
        assert "url" in told  # empty: this server does not know its own address, that of a site does
        time.sleep(1)
        assert receiver.told.empty()
        keep_notification(client, TAG, OFF)
        keep_notification(client, TAG, OFF)
        assert not client.read_automations_by_name(AUTOMATION)


@pytest.mark.parametrize(
    ("given", "fact"),
    [
        ("https://user:geheim@host/hook", "give it as env:NAME"),
        ("ftp://host", "not a URL of a webhook"),
        ("env:RATCHET_TEST_NO_SUCH", "export it"),
    ],
)
def test_a_url_that_cannot_be_used_is_refused(given: str, fact: str):
    with pytest.raises(InputError, match=fact) as refused:
        webhook_url(given)
    assert "geheim" not in str(refused.value)


def test_a_url_may_be_a_reference(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HOOK", "https://hooks.example/secret")
    assert webhook_url("env:HOOK") == "https://hooks.example/secret"
