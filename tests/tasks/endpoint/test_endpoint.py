"""The endpoint under the unmodified `openai` client."""

import asyncio
import json
import time
from pathlib import Path

import openai
import pytest

from tasks.config.reward import EnvironmentSection
from tasks.environments.hosting import Host
from tests.tasks.endpoint.talking import DROPPING, Policy, Stopping, check_rows, codec_of, talking

ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": {}}}}}


@pytest.fixture(scope="module")
def codec(tmp_path_factory):
    return codec_of(tmp_path_factory.mktemp("model"))


def client(url, session):
    return openai.AsyncOpenAI(base_url=url, api_key=session.key, max_retries=0)


def user(text):
    return {"role": "user", "content": text}


def ask(url, session, messages, **more):
    async def once():
        async with client(url, session) as one:
            return await one.chat.completions.create(model="policy", messages=messages, **more)

    return asyncio.run(once())


async def at_once(url, session, messages, *more):
    """Answers or errors of requests at once."""
    async with client(url, session) as one:
        asks = [one.chat.completions.create(model="policy", messages=messages, **given) for given in more]
        return await asyncio.gather(*asks, return_exceptions=True)


def leave(url, session, messages, begun, requests=1):
    """Ask, and be gone before there is an answer, once `begun()`."""

    async def asked():
        async with client(url, session) as one:
            asks = [
                asyncio.ensure_future(one.chat.completions.create(model="policy", messages=messages))
                for _ in range(requests)
            ]
            while not begun():
                await asyncio.sleep(0.01)
            for ask in asks:
                ask.cancel()
            await asyncio.gather(*asks, return_exceptions=True)

    asyncio.run(asked())


def until(condition):
    begun = time.monotonic()
    while not condition():
        assert time.monotonic() < begun + 30
        time.sleep(0.01)


def test_a_conversation_with_tools_keeps_the_sampled_tokens(codec):
    def says(text, seed):
        return "it is 3" if "<|tool|>" in text else 'so <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'

    with talking(codec, says) as (endpoint, policy, url):
        session = endpoint.open(5)
        messages = [user("one and two")]
        first = ask(url, session, messages, tools=[ADD]).choices[0]
        assert first.finish_reason == "tool_calls"
        (call,) = first.message.tool_calls
        assert (call.function.name, json.loads(call.function.arguments)) == ("add", {"a": 1})
        messages += [first.message, {"role": "tool", "tool_call_id": call.id, "content": "3"}]
        last = ask(url, session, messages, tools=[ADD])
        assert last.choices[0].message.content == "it is 3"
        asyncio.run(endpoint.close(session))
    (branch,) = session.sampled
    assert [turn["role"] for turn in branch.row.turns] == ["assistant", "tool", "assistant"]
    assert json.loads(branch.row.turns[0]["calls"]) == [{"name": "add", "arguments": '{"a": 1}'}]
    assert json.loads(branch.row.turns[1]["results"]) == [{"id": call.id, "content": "3"}]
    assert last.usage.prompt_tokens == len(policy.asked[1][0])
    check_rows(session, policy)


def test_each_of_many_turns_is_appended_to_those_before(codec):
    with talking(codec, lambda text, seed: f"there are {text.count('<|user|>')}") as (endpoint, policy, url):
        session, messages = endpoint.open(5), []
        for turn in range(4):
            messages.append(user(f"and {turn}"))
            answer = ask(url, session, messages).choices[0].message
            assert answer.content == f"there are {turn + 1}"
            messages.append({"role": "assistant", "content": answer.content})
        asyncio.run(endpoint.close(session))
    (branch,) = session.sampled
    assert branch.row.answers == 4
    check_rows(session, policy)


def test_an_edited_history_begins_a_branch(codec):
    with talking(codec, lambda text, seed: f"three {seed % 1000}") as (endpoint, policy, url):
        session = endpoint.open(5)
        first = ask(url, session, [user("one")]).choices[0].message
        second = ask(url, session, [user("one"), first, user("two")]).choices[0].message
        edited = [user("one"), {"role": "assistant", "content": "other"}, user("two")]
        ask(url, session, edited)
        ask(url, session, [user("one"), first, user("two"), second, user("two")])
        ask(url, session, [user("one"), first, user("two")])
    branches = session.sampled
    assert [(one.why, one.parent) for one in branches] == [("first", None), ("edited", None), ("again", 0)]
    assert [one.row.answers for one in branches] == [3, 1, 2]
    assert len({one.seed for one in branches}) == 3
    check_rows(session, policy)


def test_branches_of_one_history_do_not_share_noise(codec):
    with talking(codec, lambda text, seed: str(seed)) as (endpoint, _, url):
        session, twin = endpoint.open(5), endpoint.open(5)
        texts = [[c.message.content for c in ask(url, one, [user("one")], n=4).choices] for one in (session, twin)]
        other = ask(url, endpoint.open(6), [user("one")]).choices[0].message.content
    assert len({*texts[0], other}) == 5
    assert texts[0] == texts[1]  # a session that is repeated has the same noise


def test_a_template_that_drops_what_was_sampled_begins_a_branch(tmp_path):
    codec = codec_of(tmp_path, DROPPING)
    with talking(codec, lambda text, seed: "<think>one</think>two") as (endpoint, policy, url):
        session = endpoint.open(5)
        first = ask(url, session, [user("one")]).choices[0].message
        assert (first.content, first.reasoning_content) == ("two", "one")
        ask(url, session, [user("one"), {"role": "assistant", "content": "two"}, user("two")])
    assert [one.why for one in session.sampled] == ["first", "template"]
    check_rows(session, policy)


def test_requests_at_once_of_one_history(codec):
    async def several(url, session):
        async with client(url, session) as one:
            asks = [one.chat.completions.create(model="policy", messages=[user(str(n % 3))]) for n in range(12)]
            first = await asyncio.gather(*asks)
            more = [
                one.chat.completions.create(
                    model="policy", messages=[user(str(n % 3)), found.choices[0].message, user("two")]
                )
                for n, found in enumerate(first)
            ]
            return await asyncio.gather(*more)

    with talking(codec, lambda text, seed: f"one {seed % 7}") as (endpoint, policy, url):
        session = endpoint.open(5)
        asyncio.run(several(url, session))
    assert session.counts["answers"] == 24
    check_rows(session, policy)


def test_streams_and_stop_texts(codec):
    async def streamed(url, session):
        async with client(url, session) as one:
            found = await one.chat.completions.create(
                model="policy", messages=[user("one")], stream=True, stop=["is"], stream_options={"include_usage": True}
            )
            return [chunk async for chunk in found]

    with talking(codec, lambda text, seed: "and one " * 20 + "is two") as (endpoint, policy, url):
        session = endpoint.open(5)
        chunks = asyncio.run(streamed(url, session))
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        ask(url, session, [user("one"), {"role": "assistant", "content": text}, user("two")])
    assert text == "and one " * 20
    assert len(chunks) > 3
    assert chunks[-1].usage.completion_tokens == len(policy.asked[0][1])
    assert policy.asked[0][3].stop == ("is",)
    assert [one.row.answers for one in session.sampled] == [2]
    check_rows(session, policy)


def test_texts_are_completed(codec):
    def complete(url, session, prompt, **more):
        with openai.OpenAI(base_url=url, api_key=session.key, max_retries=0) as one:
            return one.completions.create(model="policy", prompt=prompt, **more).choices[0].text

    with talking(codec, lambda text, seed: "two") as (endpoint, policy, url):
        session = endpoint.open(5)
        said = complete(url, session, "one and ")
        complete(url, session, f"one and {said}<|end|> is")
        complete(url, session, f"one and {said} is")  # without the stop token that was sampled
    assert [(one.why, one.row.answers) for one in session.sampled] == [("first", 2), ("template", 1)]
    check_rows(session, policy)


def test_a_request_repeated_after_a_lost_connection_is_not_sampled_again(codec):
    with talking(codec, lambda text, seed: "two") as (endpoint, policy, url):
        session = endpoint.open(5)
        for count in ("0", "1"):
            ask(url, session, [user("one")], extra_headers={"x-stainless-retry-count": count})
        assert len(policy.asked) == 1
        ask(url, session, [user("one")])
    assert [one.why for one in session.sampled] == ["first", "again"]


def test_equal_requests_that_are_repeated_while_they_are_answered_have_an_answer_each(codec):
    class Late(Policy):
        """Takes longer for an answer than a client waits at first."""

        async def sample(self, prompt, seed, sampling):
            await asyncio.sleep(0.5)
            return await super().sample(prompt, seed, sampling)

    again = {"extra_headers": {"x-stainless-retry-count": "1"}}
    with talking(codec, lambda text, seed: str(seed), policy=Late) as (endpoint, policy, url):
        session = endpoint.open(5)
        lost = asyncio.run(at_once(url, session, [user("one")], {"timeout": 0.2}, {"timeout": 0.2}))
        assert {type(one) for one in lost} == {openai.APITimeoutError}
        found = asyncio.run(at_once(url, session, [user("one")], again, again))
        late = ask(url, session, [user("one")], **again)  # as if the first answer had not arrived
    given = [one.choices[0].message.content for one in (*found, late)]
    assert sorted(given[:2]) == sorted(str(seed) for _, _, seed, _ in policy.asked)
    assert len(set(given)) == len(policy.asked) == 2
    check_rows(session, policy)


def test_a_conversation_neither_imports_a_client_again_nor_reads_all_certificates(codec, monkeypatch):
    for name in ("SSL_CERT_FILE", "SSL_CERT_DIR"):
        monkeypatch.delenv(name, raising=False)

    async def driven():
        async with await host.open() as opened:
            asked = {"url": url, "key": endpoint.open(5).key, "record": {"prompt": "one"}, "seed": 0}
            return await opened.ask(60.0, "the drive", **asked)

    drives = Path(__file__).parents[1] / "environments/drives.py:importing"
    with (
        talking(codec, lambda text, seed: "two") as (endpoint, _, url),
        Host(EnvironmentSection(function=str(drives))) as host,
    ):
        assert asyncio.run(driven()) == {"reward": 0.0}


def test_requests_at_once_have_no_more_tokens_than_their_session(codec):
    for words, answers in (("two", [4, 4, 2]), ("and one " * 9, [10])):
        with talking(codec, lambda text, seed, words=words: words) as (endpoint, policy, url):
            session = endpoint.open(5, tokens=10)
            found = asyncio.run(at_once(url, session, [user("one")], {"n": 2}, {}, {}, {}, {}))
        assert [len(tokens) for _, tokens, _, _ in policy.asked] == answers
        refused = [one.code for one in found if isinstance(one, openai.BadRequestError)]
        assert set(refused) == {"session_limit"}
        assert session.counts["tokens"] == 10


def test_sampling_of_the_run_is_kept(codec):
    with talking(codec, lambda text, seed: "two") as (endpoint, policy, url):
        session = endpoint.open(5)
        given = {"temperature": 0.2, "seed": 1, "parallel_tool_calls": False}
        ask(url, session, [user("one")], **given, max_tokens=7, top_p=1.0, presence_penalty=0)
        how = policy.asked[0][3]
    assert (how.temperature, how.max_tokens) == (1.0, 7)
    assert session.overridden == given
    session.override({"temperature": 0.3, "logit_bias": {str(token): 1 for token in range(100_000)}})
    assert session.overridden["temperature"] == 0.3
    assert session.overridden["logit_bias"].startswith('{"0": 1, ')
    assert len(session.overridden["logit_bias"]) < 250
    with talking(codec, lambda text, seed: "two", sampling="refuse") as (endpoint, policy, url):
        session = endpoint.open(5)
        with pytest.raises(openai.BadRequestError) as refused:
            ask(url, session, [user("one")], temperature=0.2)
        assert (refused.value.code, refused.value.param) == ("sampling_of_the_run", "temperature")
        assert not policy.asked
        assert session.counts["refused/sampling_of_the_run"] == 1


def test_a_question_that_is_asked_again_has_noise_of_its_own(codec):
    class Dropping(Policy):
        """Drops the first answer."""

        async def sample(self, prompt, seed, sampling):
            answer, first = await super().sample(prompt, seed, sampling), not self.asked[1:]
            return answer._replace(finish_reason="abort") if first else answer

    with talking(codec, lambda text, seed: str(seed), policy=Dropping) as (endpoint, policy, url):
        session = endpoint.open(5)
        found = asyncio.run(at_once(url, session, [user("one")], {}, {}, {}))
        assert sum(isinstance(one, openai.InternalServerError) for one in found) == 1
        ask(url, session, [user("one")], n=2)
        seeds = [one.seed for one in session.sampled]
        assert len(set(seeds)) == len(seeds) == 4
        assert policy.asked[0][2] in seeds  # that of the answer that was dropped is used again


def test_answers_that_no_client_is_given_are_no_part_of_a_session(codec):
    class Late(Policy):
        """Gives the first answer when its client has gone, and drops one of two choices at first."""

        async def sample(self, prompt, seed, sampling):
            number = len(self.seeds)
            self.seeds.append(seed)
            while (number == 0 and not self.gone) or number >= 4:
                await asyncio.sleep(0.01)
            answer = await super().sample(prompt, seed, sampling)
            return answer._replace(finish_reason="abort") if number == 2 else answer

    with talking(codec, lambda text, seed: str(seed), policy=Late) as (endpoint, policy, url):
        policy.seeds, policy.gone, session = [], False, endpoint.open(5)
        leave(url, session, [user("one")], lambda: policy.seeds)
        policy.gone = True
        answered = ask(url, session, [user("two")]).choices[0].message
        (lost,) = asyncio.run(at_once(url, session, [user("one"), answered, user("two")], {"n": 2}))
        assert isinstance(lost, openai.InternalServerError)
        until(lambda: session.counts["disconnected"])
        assert [one.row.answers for one in session.sampled] == [1]
        assert session.last.began.messages[0].content == "two"
        until(lambda: session.counts["answers"] == 3)  # they were sampled, so they count
        repeated = ask(url, session, [user("one")], extra_headers={"x-stainless-retry-count": "1"})
        assert repeated.choices[0].message.content == str(policy.seeds[0])
        assert session.last.began.messages[0].content == "one"
        sampled = len(policy.seeds)
        leave(url, session, [user("two")], lambda: len(policy.seeds) == sampled + 2, requests=2)
        asyncio.run(endpoint.close(session))
        assert all(one.task.done() for equal in session.under_way.values() for one in equal)


def test_of_several_choices_the_last_one_is_that_of_the_row(codec):
    class Uneven(Policy):
        """Answers to a later question sooner."""

        async def sample(self, prompt, seed, sampling):
            self.seeds.append(seed)
            await asyncio.sleep(0.1 / len(self.seeds))
            return await super().sample(prompt, seed, sampling)

    with talking(codec, lambda text, seed: "two", policy=Uneven) as (endpoint, policy, url):
        policy.seeds, session = [], endpoint.open(5)
        ask(url, session, [user("one")], n=3)
    assert policy.asked[-1][2] == policy.seeds[0]
    assert session.last.seed == policy.seeds[-1]


def test_a_text_that_goes_on_without_what_was_sampled_begins_a_branch(codec):
    def complete(prompt):
        with openai.OpenAI(base_url=url, api_key=session.key, max_retries=0) as one:
            return one.completions.create(model="policy", prompt=prompt, stop="is").choices[0].text

    with talking(codec, lambda text, seed: "and one is", policy=Stopping) as (endpoint, policy, url):
        session = endpoint.open(5)
        prompt = f"one {complete('one ')}"
        complete(f"{prompt}is two")  # with the stop text, which a client is not given
        complete(f"{prompt} two")
    read = [codec.backend.decode([prompt])[0] for prompt, *_ in policy.asked]
    assert [one.removeprefix(read[0][: -len("one ")]) for one in read] == ["one ", f"{prompt}is two", f"{prompt} two"]
    assert [(one.why, one.row.answers) for one in session.sampled] == [("first", 2), ("edited", 1)]
    check_rows(session, policy)


def test_a_text_is_never_appended_to_a_chat(codec):
    with talking(codec, lambda text, seed: "two", policy=Stopping) as (endpoint, policy, url):
        session = endpoint.open(5)
        ask(url, session, [user("one")])
        with openai.OpenAI(base_url=url, api_key=session.key, max_retries=0) as one:
            one.completions.create(model="policy", prompt="one two")
    assert [one.row.answers for one in session.sampled] == [1, 1]
    check_rows(session, policy)
