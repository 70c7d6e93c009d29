"""Requests that are refused: typed, recorded, bounded, in the form of OpenAI."""

import asyncio
import json
import socket
import time
from contextlib import suppress
from dataclasses import replace

import httpx
import pytest
from tokenizers import Tokenizer, decoders, models

from storage.errors import WorkerLost
from tasks.data.backends import Plain
from tests.tasks.endpoint.talking import codec_of, talking


@pytest.fixture(scope="module")
def codec(tmp_path_factory):
    return codec_of(tmp_path_factory.mktemp("model"))


GOOD = {"model": "policy", "messages": [{"role": "user", "content": "one"}]}


TOOL = {"type": "function", "function": {"name": "add"}}


def post(url, key, body):
    sent = body if isinstance(body, bytes) else json.dumps(body).encode()
    answer = httpx.post(f"{url}/chat/completions", content=sent, headers={"authorization": f"Bearer {key}"})
    return answer.status_code, answer.json().get("error")


def with_arguments(text):
    call = {"id": "a", "type": "function", "function": {"name": "add", "arguments": text}}
    return {**GOOD, "messages": [*GOOD["messages"], {"role": "assistant", "tool_calls": [call]}]}


def with_message(**more):
    return {**GOOD, "messages": [{"role": "user", "content": "one", **more}]}


FLAWED = {
    "another model": ({**GOOD, "model": "gpt-9"}, 404, "model_not_found", "model"),
    "unknown parameter": ({**GOOD, "tempreature": 1}, 400, "unknown_parameter", "tempreature"),
    "other type": ({**GOOD, "n": "many"}, 400, "invalid_value", "n"),
    "too many": ({**GOOD, "n": 1000}, 400, "invalid_value", "n"),
    "no messages": ({**GOOD, "messages": []}, 400, "invalid_value", "messages"),
    "unknown role": (with_message(role="oracle"), 400, "invalid_value", "messages.0.role"),
    "image": (with_message(content=[{"type": "image_url"}]), 400, "unsupported_content", "messages[0].content"),
    "field of a message": (with_message(cache=1), 400, "unknown_parameter", "messages[0].cache"),
    "1 MB of text": (with_message(content="one " * 300_000), 413, "request_too_large", None),
    "longer than the model": (with_message(content="one " * 9000), 400, "context_length_exceeded", "messages"),
    "broken UTF-8": (json.dumps(GOOD).encode().replace(b"one", b"\xff\xfe"), 400, "invalid_encoding", None),
    "no JSON": (b"{", 400, "invalid_json", None),
    "deep": (b"[" * 16_000, 400, "invalid_json", None),
    "no table": (b"[]", 400, "invalid_value", ""),
    "stop texts without end": ({**GOOD, "stop": "one " * 70}, 400, "invalid_value", "stop"),
    "many stop texts": ({**GOOD, "stop": [f"{n} one" for n in range(50)]}, 400, "invalid_value", "stop"),
    "NaN": (json.dumps({**GOOD, "temperature": float("nan")}).encode(), 400, "invalid_json", None),
    "key twice": (b'{"model": "policy", "model": "policy", "messages": []}', 400, "invalid_json", None),
    "deep metadata": (
        json.dumps({**GOOD, "metadata": 0}).replace(" 0", '{"a":' * 900 + "1" + "}" * 900).encode(),
        400,
        "invalid_value",
        "metadata.dict.a.dict.a.dict.a.dict",
    ),
    "tool without a name": ({**GOOD, "tools": [{"type": "function", "function": {}}]}, 400, "invalid_value", "tools.0"),
    "endless": (b"[" * 200_000, 413, "request_too_large", None),
    "many tools": ({**GOOD, "tools": [TOOL] * 129}, 400, "invalid_value", "tools"),
    "long tools": ({**GOOD, "tools": [{**TOOL, "text": "one " * 70_000}]}, 400, "invalid_value", "tools"),
    "many messages": ({**GOOD, "messages": GOOD["messages"] * 2049}, 400, "invalid_value", "messages"),
    "many values": ({**GOOD, "logit_bias": dict.fromkeys(map(str, range(17_000)), 1)}, 413, "request_too_large", None),
    "many parts": (with_message(content=[{"type": "text", "text": ""}] * 9000), 413, "request_too_large", None),
    "many values in calls": (with_arguments(json.dumps([0] * 17_000)), 400, "invalid_value", "messages"),
    "infinity": (json.dumps({**GOOD, "top_p": 7}).replace("7", "1e999").encode(), 400, "invalid_value", "top_p"),
    "lone surrogate": (
        b'{"model": "policy", "messages": [{"role": "user", "content": "\\ud800"}]}',
        400,
        "invalid_encoding",
        None,
    ),
}


@pytest.fixture(scope="module")
def served(codec):
    with talking(codec, lambda text, seed: "two") as found:
        yield found


@pytest.mark.parametrize("text", ['{"a": "\\ud800"}', '{"a": 1e999}', '{"a": [' + "[" * 2000 + "]" * 2000 + "]}", "{"])
def test_arguments_of_a_call_that_are_no_table_are_shown_as_they_were_written(served, text):
    endpoint, policy, url = served
    assert post(url, endpoint.open(5).key, with_arguments(text)) == (200, None)
    assert json.dumps(text)[1:-1] in policy.codec.backend.decode([policy.asked[-1][0]])[0]


@pytest.mark.parametrize("name", FLAWED)
def test_flawed_requests(served, name):
    endpoint, policy, url = served
    body, status, code, param = FLAWED[name]
    session, before = endpoint.open(5), len(policy.asked)
    found, error = post(url, session.key, body)
    assert (found, error["type"]) == (status, "invalid_request_error")
    assert (error["code"], error["param"]) == (code, param)
    assert len(error["message"]) < 500
    assert session.counts[f"refused/{code}"] == 1
    assert session.refused == [error["message"]]
    assert len(policy.asked) == before
    assert post(url, session.key, GOOD)[0] == 200  # the session goes on


@pytest.mark.parametrize(
    ("method", "path"),
    [("POST", "responses"), ("GET", "chat/completions"), ("DELETE", "models"), ("OPTIONS", "models")],
)
def test_an_address_that_is_not_served(served, method, path):
    endpoint, _, url = served
    session = endpoint.open(5)
    answer = httpx.request(method, f"{url}/{path}", headers={"authorization": f"Bearer {session.key}"})
    error = answer.json()["error"]
    assert (answer.status_code, error["type"], error["code"]) == (404, "invalid_request_error", "unknown_url")
    assert f"there is no {method} " in error["message"]
    assert session.refused == [error["message"]]
    assert httpx.request(method, f"{url}/{path}").json()["error"]["code"] == "invalid_api_key"


def test_a_long_head_of_a_request_is_refused_in_the_form_of_openai(served):
    endpoint, policy, url = served
    session, before = endpoint.open(5), len(policy.asked)
    known = {"authorization": f"Bearer {session.key}"}
    found = [
        httpx.post(f"{url}/chat/completions", json=GOOD, headers={**known, "x": "a" * (1 << 14)}),
        httpx.post(f"{url}/chat/completions?{'a' * (1 << 14)}", json=GOOD, headers=known),
    ]
    assert [(one.status_code, one.json()["error"]["code"]) for one in found] == [(431, "headers_too_large")] * 2
    assert session.refused == [one.json()["error"]["message"] for one in found]
    assert len(policy.asked) == before
    assert post(url, session.key, GOOD)[0] == 200


def test_a_head_without_end_is_not_kept(served):
    _, _, url = served
    with socket.create_connection(("127.0.0.1", int(url.split(":")[2].split("/")[0]))) as client:
        client.settimeout(30)
        client.sendall(b"POST /v1/models HTTP/1.1\r\nx: ")
        with suppress(OSError):  # the endpoint has closed the connection
            for _ in range(64):
                client.sendall(b"a" * (1 << 16))
        head, _, body = client.recv(1 << 16).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 431 ")
    assert json.loads(body)["error"]["code"] == "headers_too_large"


def test_a_client_that_goes_in_the_middle_of_its_request(served):
    endpoint, policy, url = served
    session, before = endpoint.open(5), len(policy.asked)
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {session.key}\r\n"
    with socket.create_connection(("127.0.0.1", int(url.split(":")[2].split("/")[0]))) as client:
        client.sendall(f'{head}content-length: 999\r\n\r\n{{"model": '.encode())
    until = time.monotonic() + 30
    while not session.counts["disconnected"] and time.monotonic() < until:
        time.sleep(0.01)
    assert session.counts == {"disconnected": 1}
    assert len(policy.asked) == before
    assert post(url, session.key, GOOD)[0] == 200


@pytest.mark.parametrize("body", [{**GOOD, "model": "other" * 9999}, {**GOOD, "other" * 9999: 1}])
def test_what_is_recorded_of_a_refusal_is_bounded(served, body):
    endpoint, _, url = served
    session = endpoint.open(5)
    _, error = post(url, session.key, body)
    assert 0 < len(error["message"]) <= 1000 >= len(error["param"])
    assert session.refused == [error["message"]]


def test_stop_texts_that_an_engine_cannot_look_for(codec):
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    tokenizer.decoder = decoders.Sequence([decoders.Fuse(), decoders.Replace("ab", "c")])
    long = [f"{number} {'one ' * 60}" for number in range(5)]
    for these, texts, code in (
        (codec, [*long[:3], *long], "too_many_stops"),
        (replace(codec, backend=Plain(tokenizer)), ["one"], "unsupported_stop"),
    ):
        with talking(these, lambda text, seed: "two") as (endpoint, _, url):
            session = endpoint.open(5)
            found = [post(url, session.key, {**GOOD, "stop": [one, "is"]}) for one in texts]
            assert {status for status, _ in found[:-1]} <= {200}
            assert (found[-1][0], found[-1][1]["code"], found[-1][1]["param"]) == (400, code, "stop")


def test_a_foreign_session(codec):
    with talking(codec, lambda text, seed: "two") as (endpoint, policy, url):
        session = endpoint.open(5)
        asyncio.run(endpoint.close(session))
        for key in ("sk-other", session.key, "Bearer"):
            assert post(url, key, GOOD)[1]["code"] == "invalid_api_key"
        assert endpoint.strangers == 3
        assert not policy.asked


def test_limits_of_a_session(codec):
    with talking(codec, lambda text, seed: "two") as (endpoint, _, url):
        few, short = endpoint.open(5, turns=2), endpoint.open(5, tokens=6)
        found = [post(url, few.key, {**GOOD, "n": n})[0] for n in (3, 2, 1)]
        assert found == [400, 200, 400]
        assert [len(equal) for equal in few.under_way.values()] == [1]  # what was refused is not held
        assert [post(url, short.key, GOOD)[0] for _ in range(3)] == [200, 200, 400]
        assert [sum(len(one.row.tokens) - len(one.row.prompt) for one in short.sampled)] == [6]


def test_engines_that_are_lost_are_no_answer(codec):
    def lost(text, seed):
        raise WorkerLost("the engine has ended")

    with talking(codec, lost) as (endpoint, _, url):
        session = endpoint.open(5)
        assert post(url, session.key, GOOD) == (503, {
            "message": "the engines cannot answer; the run says why", "type": "server_error", "param": None,
            "code": "unavailable",
        })  # fmt: skip
        assert not session.sampled
        with pytest.raises(WorkerLost):
            asyncio.run(endpoint.close(session))
