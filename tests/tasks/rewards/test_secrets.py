"""A scoring process is given no secret that it was not meant to have, and none of its outputs contains one."""

import base64
import os
from urllib.parse import quote

import pytest

from storage.errors import InputError
from tasks.config.environment import scoring_environment, without_secrets
from tasks.config.reward import RewardSection
from tasks.rewards.trying import check_reward
from tests.tasks.rewards.orders import order, scores

SECRETS = {
    "PREFECT_API_AUTH_STRING": ("ratchet:Nb7Qe2", "Nb7Qe2"),
    "PREFECT_API_KEY": ("pnu_41abc", "pnu_41abc"),
    "PREFECT_API_DATABASE_CONNECTION_URL": ("postgresql+asyncpg://me:hunter2@db/prefect", "hunter2"),
    "AWS_SECRET_ACCESS_KEY": ("/ab/CD+ef12gh34IJ56", "/ab/CD+ef12gh34IJ56"),
    "AWS_ACCESS_KEY_ID": ("AKIAIOSFODNN7EXAMPLE", "AKIAIOSFODNN7EXAMPLE"),
    "HF_TOKEN": ("hf_abcdef", "hf_abcdef"),
    "WANDB_API_KEY": ("0123abcd", "0123abcd"),
    "OPENAI_API_KEY_PROD": ("proj-4711-abcd", "proj-4711-abcd"),
    "ANTHROPIC_KEY": ("a nt-key", "a nt-key"),
    "MYSQL_PWD": ("letmein", "letmein"),
    "PGPASSWORD": ("pgpass1", "pgpass1"),
    "HOOKS": ("https://hooks.slack.com/services/T0/B0/Xk29fLq0ZpV7mYt4Rw8C", "Xk29fLq0ZpV7mYt4Rw8C"),
    "DB_PASS": ("it's \\me", "it's \\me"),
    "JUDGE_HEADER": ("Bearer eyJhbGciOi.eyJz.c2ln", "eyJhbGciOi.eyJz.c2ln"),
    "AUTHORIZATION": ("Bearer four-seven", "four-seven"),
    "SENTRY_DSN": ("https://4f2c9@o1.ingest/2", "https://4f2c9@o1.ingest/2"),
    "REDIS": ("redis://:pa%2Fss9@host:6379/0", "pa/ss9"),
    "BLOB": ("https://x.blob/a?sig=Zm9vYmFy", "https://x.blob/a?sig=Zm9vYmFy"),
    "HTTPS_PROXY": ("http://me:secret7@proxy:3128", "secret7"),
    "NOTHING_SPECIAL": ("ghp_16C7e42F292c6912E7710c838347Ae178B4a", "ghp_16C7e42F292c6912E7710c838347Ae178B4a"),
    "RANDOM": ("Xk29fLq0ZpV7mYt4Rw8B", "Xk29fLq0ZpV7mYt4Rw8B"),
    "DEPLOY_KEY": ("-----BEGIN PRIVATE KEY-----\nMIIEvQIBADAN\n-----END PRIVATE KEY-----", "MIIEvQIBADAN"),
}
PLAIN = {
    "MAX_TOKENS": "131072",
    "STOP_TOKEN": "<|endoftext|>",
    "RAY_AUTH_MODE": "disabled",
    "SSH_AUTH_SOCK": "/tmp",
    "MY_TOKENIZER": "gpt2-large",
    "KEYMAP": "us-intl",
    "RUN_ID": "0aa1b2c3-1111-2222-3333-444455556666",
    "CUDA_VISIBLE_DEVICES": "GPU-8F2e7a31-aaaa-bbbb-cccc-0123456789ab",
    "RATCHET_SITE": "/home/me/.ratchet/site",
    "PASSWORD": "short",
    "HOSTNAME": "ratchet-7d9f8b6c5d-abcde",
}


@pytest.fixture
def environment(monkeypatch):
    for name, value in {**{name: value for name, (value, _) in SECRETS.items()}, **PLAIN}.items():
        monkeypatch.setenv(name, value)


@pytest.mark.usefixtures("environment")
@pytest.mark.parametrize("name", SECRETS)
def test_a_value_of_the_environment_that_looks_like_a_secret_is_not_shown(name):
    value, secret = SECRETS[name]
    encoded = base64.b64encode(secret.encode()).decode()
    for form in (value, secret, repr(secret)[1:-1], quote(secret, safe=""), encoded):
        assert form not in without_secrets(f"401 for {form}: {form!r} and {form!s}")


@pytest.mark.usefixtures("environment")
@pytest.mark.parametrize("name", PLAIN)
def test_other_values_are_shown(name):
    assert without_secrets(f"it is {PLAIN[name]}.") == f"it is {PLAIN[name]}."


@pytest.mark.usefixtures("environment")
def test_a_scoring_process_is_given_no_secret_but_those_it_refers_to():
    given = scoring_environment(["WANDB_API_KEY", "NOT_SET"])
    assert given.keys() & SECRETS.keys() == {"WANDB_API_KEY"}
    assert {"PATH", "HOME", "PYTHONPATH", "CUDA_VISIBLE_DEVICES", "RATCHET_SITE"} <= given.keys()
    assert not given.keys() & (PLAIN.keys() - {"CUDA_VISIBLE_DEVICES", "RATCHET_SITE"})


TELLING = """
import os
import sys

def f(record, response, key="", how=""):
    secret = record["secret"]
    if response == "environment":
        return {name: 1.0 for name in os.environ}
    if response == "raise":
        raise ValueError("." * 970 + secret)
    if response == "name":
        return {secret[:60]: 1.0}
    if response == "list":
        return [secret]
    if response == "die":
        print("." * 480 + secret + "." * 490, flush=True)
        os._exit(3)
    if response == "exit":
        sys.exit(secret)
    if response == "none":
        return {secret * 9: 1.0}
    return secret
"""


@pytest.mark.usefixtures("environment")
def test_whatever_leaves_a_scoring_process_contains_no_secret(tmp_path):
    (tmp_path / "telling.py").write_text(TELLING)
    asked = ["environment", "raise", "name", "list", "die", "exit", "none", "text"]
    secret = SECRETS["NOTHING_SPECIAL"][0]
    given = order(f"{tmp_path}/telling.py:f", {"key": "env:HF_TOKEN"})
    seen, *others = scores(given, asked, {"secret": secret})
    assert seen.components is not None
    assert seen.components.keys() & SECRETS.keys() == {"HF_TOKEN"}
    assert [one.reason for one in others] == ["exception", None, "no_number", "exit", "exit", "no_number", "no_number"]
    said = [text for one in others for text in (one.detail, *(one.components or {}))]
    parts = [secret[start : start + 6] for start in range(len(secret) - 5)]
    assert not [text for text in said if any(part in text for part in parts)]
    assert others[1].components == {"***": 1.0}


def test_a_refusal_contains_no_secret(tmp_path, monkeypatch):
    monkeypatch.setenv("JUDGE_TOKEN", "four-seven-eleven")
    (tmp_path / "own.py").write_text("raise RuntimeError('no access with four-seven-eleven')")
    with pytest.raises(InputError, match=r"RuntimeError: no access with \*\*\* \(own.py, line 1\)"):
        check_reward(RewardSection(function=f"{tmp_path}/own.py:f"))
    assert os.environ["JUDGE_TOKEN"] == "four-seven-eleven"
