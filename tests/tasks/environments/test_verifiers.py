"""Environments of the real package `verifiers`, against the endpoint over a policy that says what it is told to."""

import asyncio
from pathlib import Path

import pytest

from storage.errors import InputError
from tasks.environments.playing import find_environment, loaded, made_by
from tests.tasks.endpoint.talking import check_rows, codec_of, talking

vf = pytest.importorskip("verifiers", reason="the extra `verifiers` is not installed: CI leaves it out")


@pytest.fixture(autouse=True)
def here(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parent)


def made(fails=""):
    return environment(environment="vf-sums", arguments={"fails": fails})


def environment(**arguments):
    found = find_environment("tasks.environments.verifiers_rollouts:Verifiers")
    return made_by(found, loaded(found).function, arguments)


def driven(folder, fails="", turns=9):
    """The reward of a rollout about the first record of the data set; the session and the policy."""
    record = vf.load_environment("vf-sums").get_dataset()[0]
    with talking(codec_of(folder), lambda text, seed: "two" if "two" in text else "one two") as (endpoint, policy, url):
        session = endpoint.open(5, turns)
        try:
            return asyncio.run(made(fails).drive(url, session.key, record, 3)), session, policy
        except InputError as error:
            return error, session, policy


def test_a_rollout_is_driven_through_the_endpoint_and_scored_by_its_rubric(tmp_path):
    reward, session, policy = driven(tmp_path)
    assert reward == 1.0
    (branch,) = session.sampled
    assert [turn["role"] for turn in branch.row.turns] == ["assistant", "user", "assistant"]
    check_rows(session, policy)


@pytest.mark.parametrize(("fails", "said"), [("sandbox", "the sandbox is gone"), ("judge", "Judge model API error")])
def test_failures_of_a_sandbox_and_of_a_judge_are_no_numbers(tmp_path, fails, said):
    failure, _, _ = driven(tmp_path, fails)
    assert isinstance(failure, InputError)
    assert said in str(failure)


def test_a_wrong_call_of_the_policy_is_scored(tmp_path):
    assert driven(tmp_path, "call")[0] == 0.0


def test_a_limit_of_the_session_is_told_by_its_refusal(tmp_path):
    failure, session, _ = driven(tmp_path, turns=1)
    assert isinstance(failure, InputError)
    assert session.counts["refused/session_limit"] == 1  # for which the driver gives 0


def test_what_cannot_be_scored_or_loaded_is_refused_before_the_start():
    with pytest.raises(InputError, match="'vf-sums' scores whole groups by ranked, but a conversation is scored alone"):
        made("group")
    with pytest.raises(InputError, match=r"verifiers cannot load 'vf-none': .*is installed"):
        environment(environment="vf-none")
