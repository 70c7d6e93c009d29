"""A configuration names its secrets and never holds one; no output contains one."""

import tomllib

import pytest
from pydantic import ValidationError

from storage.errors import InputError
from tasks.config.credentials import check_root_url, is_secret, shown, shown_setting, shown_text
from tasks.config.document import load_config
from tasks.config.environment import resolve, without_secrets
from tasks.config.run import RunConfig
from tests.tasks.config.test_run import MINIMAL, config_file

SECRET = "sk-7d1f-very-secret"


@pytest.mark.parametrize(
    "name",
    ["api_key", "apiKey", "APIKEY", "X-Api-Key", "aws_secret_access_key", "HF_TOKEN", "token", "accessToken",
     "password", "db-passwd", "clientSecret", "secrets", "Authorization", "credentials", "judge.api_key"],
)  # fmt: skip
def test_names_of_secrets(name):
    assert is_secret(name)


@pytest.mark.parametrize(
    "name",
    ["key", "answer_key", "max_tokens", "stop_token", "eos_token", "pad_token_id", "api_key_variable", "secretary",
     "credentials_file", "author", "tokenizer", "field", ""],
)  # fmt: skip
def test_names_of_other_things(name):
    assert not is_secret(name)


@pytest.mark.parametrize(
    ("url", "as_shown"),
    [
        ("https://user:pw@host/a?b=c", "https://***@host/a?b=c"),
        ("https://ghp_token@host/a", "https://***@host/a"),
        ("s3://AKIA1:se/cr+et@bucket/a", "s3://***@bucket/a"),
        ("https://u:p@ss@host/a@b", "https://***@host/a@b"),
        ("https://b.s3.amazonaws.com/a?X-Amz-Date=1&X-Amz-Signature=ab12", "https://b.s3.amazonaws.com/a?X-Amz-Date=1&X-Amz-Signature=***"),
        ("https://x.blob.core.windows.net/a?sv=1&sig=ab%2B", "https://x.blob.core.windows.net/a?sv=1&sig=***"),
        ("https://host/a?access_token=ab#token=cd", "https://host/a?access_token=***#token=***"),
        ("simplecache::https://u:p@host/a", "simplecache::https://***@host/a"),
        ("'http://u:p@h' and 'http://u:q@h'", "'http://***@h' and 'http://***@h'"),
    ],
)  # fmt: skip
def test_credentials_in_urls_are_masked(url, as_shown):
    assert shown_text(url) == as_shown


def test_a_long_text_is_masked_in_linear_time():
    text = "x" * 300_000 + "://a:b" * 1000 + " https://u:p@h"
    assert shown_text(text).endswith(" https://***@h")


@pytest.mark.parametrize(
    "url",
    ["s3://bucket/prefix", "https://host:8080/a@b", "http://[::1]:8080/a@b", "sftp://user@host/a", "file:///a:b/c@d",
     "https://host/a?version=3&mail=a@b", "ed:word@host", "data/a=b.jsonl"],
)  # fmt: skip
def test_other_urls_are_shown_as_they_are(url):
    assert shown_text(url) == url


@pytest.mark.parametrize(
    ("setting", "place"),
    [
        (f"reward.arguments.api_key={SECRET}", "reward.arguments.api_key"),
        ("reward.arguments.password=123456789", "reward.arguments.password"),
        (f'reward.arguments.headers={{Authorization="Bearer {SECRET}"}}', "reward.arguments.headers.Authorization"),
        (f'reward.arguments.credentials=["judge", "{SECRET}"]', "reward.arguments.credentials[1]"),
        (f"reward.arguments.endpoint=https://judge:{SECRET}@host", "reward.arguments.endpoint"),
        ("reward.arguments.api_key=***", "reward.arguments.api_key"),
        (f"model.source=https://u:{SECRET}@host/model", "model.source"),
        (f"data.train=https://host/a.jsonl?X-Amz-Signature={SECRET}", "data.train"),
        (f"data.held_out=https://host/a.jsonl?sig={SECRET}", "data.held_out"),
        (f"data.warmup=https://host/a.jsonl?token={SECRET}", "data.warmup"),
    ],
)
def test_a_literal_secret_is_refused_by_name(tmp_path, setting, place):
    with pytest.raises(InputError) as refused:
        load_config(config_file(tmp_path), [setting])
    message = str(refused.value)
    assert f"  {place}" in message or f"and {place}" in message
    assert '"env:NAME"' in message
    assert SECRET not in message
    assert "123456789" not in message


@pytest.mark.parametrize(
    "setting",
    ["reward.arguments.api_key=env:KEY", "reward.arguments.api_key=''", "reward.arguments.password=false",
     "reward.arguments.max_tokens=512", "reward.arguments.stop_token='</s>'", "data.held_out=env:HELD_OUT_URL"],
)  # fmt: skip
def test_what_is_no_literal_secret_is_accepted(tmp_path, setting):
    load_config(config_file(tmp_path), [setting])


@pytest.mark.parametrize(
    "setting",
    [f"reward.deadline_s={{api_key='{SECRET}'}}", f"reward.api_key={SECRET}", f"train.seed=https://u:{SECRET}@h",
     f"reward.processes={{endpoint='http://h?sig={SECRET}'}}", f"reward.function.api_key={SECRET}"],
)  # fmt: skip
def test_other_mistakes_do_not_show_a_secret(tmp_path, setting):
    given = config_file(tmp_path, f"{MINIMAL}\n[reward]\nfunction = 'regex'\n")
    with pytest.raises(InputError) as refused:
        load_config(given, [setting])
    assert SECRET not in str(refused.value)


def test_pydantic_itself_shows_no_value():
    document = tomllib.loads(MINIMAL) | {"reward": {"arguments": {"api_key": SECRET}, "deadline_s": "soon"}}
    with pytest.raises(ValidationError) as refused:
        RunConfig.model_validate(document)
    assert SECRET not in str(refused.value)


@pytest.mark.parametrize("url", [f"s3://AKIA:{SECRET}@bucket/a", f"https://host/a?sig={SECRET}"])
def test_a_root_with_credentials_is_refused(url):
    with pytest.raises(InputError, match="has credentials in its URL") as refused:
        check_root_url(url)
    assert SECRET not in str(refused.value)
    check_root_url("s3://bucket/a")


def test_what_is_shown_of_values_and_settings():
    value = {"api_key": SECRET, "auth": {"user": "me", "tokens": [SECRET]}, "url": "http://u:p@h", "n": [1, None, True]}
    assert shown(value) == {
        "api_key": "***", "auth": {"user": "***", "tokens": ["***"]}, "url": "http://***@h", "n": [1, None, True]
    }  # fmt: skip
    assert shown("env:KEY", "api_key") == "env:KEY"
    assert shown_setting(f"reward.arguments.api_key={SECRET}") == "reward.arguments.api_key=***"
    assert shown_setting('reward.arguments.api_key="env:KEY"') == 'reward.arguments.api_key="env:KEY"'
    assert shown_setting("data.train=http://u:p@h/a=b") == "data.train=http://***@h/a=b"
    assert shown_setting("rollout.samples=4") == "rollout.samples=4"


def test_a_reference_is_resolved_where_it_is_used_and_hidden_from_then_on(monkeypatch):
    monkeypatch.setenv("RATCHET_TEST_KEY", SECRET)
    value = {"api_key": "env:RATCHET_TEST_KEY", "list": ["env:RATCHET_TEST_KEY", 1], "text": "not env:RATCHET_TEST_KEY"}
    expected = {"api_key": SECRET, "list": [SECRET, 1], "text": "not env:RATCHET_TEST_KEY"}
    assert resolve(value, "reward.arguments") == expected
    assert without_secrets(f"401 for {SECRET} at http://u:p@h") == "401 for *** at http://***@h"


@pytest.mark.parametrize("value", [None, ""])
def test_a_variable_that_is_not_set_is_named_with_its_key(monkeypatch, value):
    monkeypatch.delenv("RATCHET_TEST_KEY", raising=False)
    if value is not None:
        monkeypatch.setenv("RATCHET_TEST_KEY", value)
    with pytest.raises(
        InputError, match=r"reward\.arguments\.api_key is env:RATCHET_TEST_KEY, but RATCHET_TEST_KEY is"
    ):
        resolve({"api_key": "env:RATCHET_TEST_KEY"}, "reward.arguments")
