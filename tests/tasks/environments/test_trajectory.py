"""Trajectories, the rendering of new messages, and the sampling of single answers by small engines."""

import asyncio

import numpy as np
import pytest

from storage.errors import InputError, SyncMismatch, WorkerLost
from storage.schema import ROLLOUT, TURN
from storage.unfinished import TurnEvent
from tasks.config.model import GeneratedModel
from tasks.config.run import WorkersSection
from tasks.data.generated import generate_tokenizer
from tasks.data.tokenizer import TextCodec
from tasks.engine.protocol import Sampling
from tasks.environments.conversation import Conversation, Limits, called_with, failed_with
from tasks.environments.hosting import EnvironmentFailed
from tasks.environments.rendering import Renderer
from tasks.environments.sampler import EngineSampler
from tasks.environments.trajectory import Answer, Trajectory, columns_of
from tasks.workers.interface import EngineHandle
from tests.small.here import GroupHere
from tests.small.workers import SmallEngine
from tests.tasks.data.chat_model import END, TEMPLATE, chat_model

SAMPLING = Sampling(max_tokens=6, stop_token_ids=(1,))


def answered(*tokens, reason="stop", version=3):
    return Answer(np.array(tokens, np.int32), -np.array(tokens, np.float32), reason, version)


def test_turns_of_a_trajectory_become_a_row_of_a_rollout():
    one, none = Trajectory([5, 6]), Trajectory([7])
    one.answer(answered(8, 9), calls="[]")
    one.observe([4], "tool", results="[3]", seconds=0.5)
    one.answer(answered(2, reason="length", version=None))
    assert (one.tokens.tolist(), one.answers, one.length) == ([5, 6, 8, 9, 4, 2], 2, 4)
    found = {name: column.to_pylist() for name, column in columns_of([one, none]).items()}
    assert found.keys() == {"prompt_tokens", "response_tokens", "sampled", "logprobs", "weight_version", "turns"}
    assert found["prompt_tokens"] == [[5, 6], [7]]
    assert found["response_tokens"] == [[8, 9, 4, 2], []]
    assert found["sampled"] == [[True, True, False, True], []]
    assert found["logprobs"] == [[-8, -9, 0, -2], []]
    assert found["weight_version"] == [[3, 3, -1, -1], []]
    given = [{name: value for name, value in turn.items() if value is not None} for turn in found["turns"][0]]
    assert given == [
        {"role": "assistant", "begin": 0, "end": 2, "finish_reason": "stop", "calls": "[]"},
        {"role": "tool", "begin": 2, "end": 3, "results": "[3]", "seconds": 0.5},
        {"role": "assistant", "begin": 3, "end": 4, "finish_reason": "length"},
    ]
    for name, column in columns_of([one]).items():
        assert column.type == ROLLOUT.field(name).type
    assert found["turns"][1] == []
    assert set(found["turns"][0][0]) == {field.name for field in TURN}


def test_blocks_of_earlier_turns_are_eligible_for_the_prefix_cache():
    one = Trajectory(list(range(10)))
    one.answer(answered(*range(7))._replace(cached=(8, 4)))  # of another conversation with this prompt
    assert (one.hits, one.eligible) == (0, 0)
    one.observe([1], "tool")
    one.answer(answered(5)._replace(cached=(12, 4)))  # of 16, which the last of 17 tokens does not fill
    assert (one.hits, one.eligible) == (3, 4)
    one.answer(answered(5)._replace(cached=None))
    assert (one.hits, one.eligible) == (3, 4)


USER, SAID = {"role": "user", "content": "one and one"}, {"role": "assistant", "content": "is two"}
MORE = {"role": "user", "content": "and three"}


@pytest.fixture(scope="module")
def chat_codec(tmp_path_factory):
    return TextCodec.from_directory(chat_model(tmp_path_factory.mktemp("chat")), [END])


@pytest.mark.parametrize("ended", [True, False])
def test_only_new_messages_are_rendered_and_the_whole_text_is_that_of_the_template(chat_codec, ended):
    renderer = Renderer(chat_codec)
    sampled = chat_codec.encode("is t") + chat_codec.encode("wo") + [END] * ended  # not as the tokenizer cuts it
    assert sampled[: -1 if ended else None] != chat_codec.encode("is two")
    first = renderer.first([USER])
    more = renderer.after([USER, SAID], [MORE], last=sampled[-1])
    assert more.kept
    before, after = "<|begin|><|user|>one and one<|end|>", "<|user|>and three<|end|>"
    assert chat_codec.backend.decode([[*first, *sampled, *more.tokens]]) == [
        f"{before}\n<|assistant|>is two<|end|>\n{after}\n<|assistant|>"
    ]


def test_a_turn_whose_beginning_was_rendered_before_is_rendered_alike(chat_codec):
    renderer = Renderer(chat_codec)
    text = renderer.after([USER, SAID], [MORE], last=END).text
    for said in ("is three", ""):
        messages = [USER, SAID, MORE, {**SAID, "content": said}]
        alike = renderer.after(messages, [USER], last=END, opened=text)
        assert alike == renderer.after(messages, [USER], last=END)
        assert alike.kept


def test_a_template_that_changes_what_was_said_before_asks_for_a_new_segment(tmp_path):
    folder = chat_model(tmp_path, template=TEMPLATE.replace("message['content']", "message['content'].split('#')[-1]"))
    codec = TextCodec.from_directory(folder, [END])
    thought = {"role": "assistant", "content": "hm#two"}
    found = Renderer(codec).after([USER, thought], [MORE], last=END)
    assert not found.kept
    assert found.tokens == Renderer(codec).after([USER, SAID], [MORE], last=END).tokens


def test_a_conversation_whose_template_changes_earlier_turns_is_marked_and_keeps_what_was_sampled(tmp_path):
    folder = chat_model(tmp_path, template=TEMPLATE.replace("message['content']", "message['content'].split('#')[-1]"))
    codec = TextCodec.from_directory(folder, [END])
    for said, marked in (("hm#two", 1), ("two", 0)):
        conversation = Conversation(codec, Renderer(codec), Limits(8, None, 60.0, 0, 400))
        conversation.add(TurnEvent(row=0, kind="begun", messages=(USER,)))
        sampled = [*codec.encode(said), END]
        for _ in range(2):
            conversation.add(called_with(answered(*sampled)._replace(cached=(4, 4))))
            conversation.add(TurnEvent(row=0, kind="told", messages=(MORE,), reward=0.0))
        assert (conversation.rewritten > 0) == marked
        assert conversation.trajectory is not None
        assert conversation.trajectory.turns[0]["end"] == len(sampled)
        assert conversation.trajectory.hits == 1


def test_a_message_that_the_template_drops_is_refused_and_the_conversation_stays_as_it_was(tmp_path):
    deaf = TEMPLATE.replace("{% for message in messages %}", "{% for message in messages if message.role != 'tool' %}")
    codec = TextCodec.from_directory(chat_model(tmp_path, template=deaf), [END])
    conversation = Conversation(codec, Renderer(codec), Limits(8, None, 60.0, 0, 400))
    failed = failed_with(EnvironmentFailed("exception", "no"), goes_on=True)
    conversation.add(TurnEvent(row=0, kind="begun", messages=(USER,), goes_on=True))
    conversation.add(called_with(answered(*codec.encode("two"), END)))
    with pytest.raises(InputError, match=r"drops or changes the tool's text \(message 3\), 'three'"):
        conversation.add(TurnEvent(row=0, kind="told", messages=({"role": "tool", "content": "three"},), reward=0.0))
    conversation.add(failed)
    assert conversation.goes_on
    assert not conversation.open
    assert conversation.trajectory is not None
    assert conversation.trajectory.length == 0  # what follows the answer is not known


def test_a_first_observation_that_is_too_long_is_a_failure_of_one_conversation(chat_codec):
    conversation = Conversation(chat_codec, Renderer(chat_codec), Limits(8, None, 60.0, 0, 4))
    with pytest.raises(InputError, match="leaves no room for an answer"):
        conversation.add(TurnEvent(row=0, kind="begun", messages=(USER,), goes_on=True))
    assert not conversation.goes_on
    conversation.add(failed_with(EnvironmentFailed("exception", "no"), goes_on=False))


def test_only_of_a_text_that_is_certainly_too_long_are_the_first_tokens_alone_made(chat_codec):
    renderer = Renderer(chat_codec, most=40)
    for text, most in (("<|close|>" * 39, 39), ("ab" * 160, 320), ("ab" * 999, 320)):
        tokens = renderer.first([{"role": "", "content": text}])
        whole = chat_codec.opened(chat_codec.encode(text))
        assert tokens == whole[: most + len(chat_codec.begin)]


def test_a_model_without_a_template_reads_contents_and_no_tools(tmp_path):
    generate_tokenizer(tmp_path, GeneratedModel())
    plain_codec = TextCodec.from_directory(tmp_path)
    renderer = Renderer(plain_codec)
    assert plain_codec.backend.decode([renderer.first([{"role": "user", "content": "1+1="}])]) == ["1+1="]
    assert plain_codec.backend.decode([renderer.after([], [{"role": "tool", "content": "2"}]).tokens]) == ["2"]
    with pytest.raises(InputError, match="no chat template that could show it tools"):
        renderer.first([USER], [{"type": "function"}])


class Dying(SmallEngine):
    """Dies when it is asked to sample."""

    def collect(self, wait_s):
        raise WorkerLost("engine 0 died")


def engines(*kinds):
    made = [kind("") for kind in kinds]
    for one in made:
        one._digest, one._version = "ab", 4
    return made, [EngineHandle(GroupHere([one], lambda _: None), WorkersSection()) for one in made]


def answers(handles, version=4):
    async def ask(sampler):
        asked = [sampler.sample([3, 4 + number % 2], number, SAMPLING) for number in range(12)]
        return await asyncio.gather(*asked)

    with EngineSampler(handles, version) as sampler:
        return asyncio.run(ask(sampler))


def test_answers_are_those_of_the_engine_whichever_engine_gives_them():
    made, handles = engines(SmallEngine, SmallEngine)
    found = answers(handles)
    expected = made[0].generate([[3, 4 + number % 2] for number in range(12)], range(12), SAMPLING)
    assert [one.tokens.tolist() for one in found] == expected["response_tokens"].to_pylist()
    assert [one.logprobs.tolist() for one in found] == expected["logprobs"].to_pylist()
    assert {(one.finish_reason, one.weight_version) for one in found} == {("stop", 4)}


def test_requests_of_a_lost_engine_go_to_another_and_fail_if_there_is_none():
    expected = answers(engines(SmallEngine)[1])
    found = answers(engines(Dying, SmallEngine)[1])
    assert [one.tokens.tolist() for one in found] == [one.tokens.tolist() for one in expected]
    with pytest.raises(WorkerLost, match="engine 0 died"):
        answers(engines(Dying)[1])


def test_answers_of_other_weights_are_not_used():
    with pytest.raises(SyncMismatch, match="version 4, but those of version 5 were asked for"):
        answers(engines(SmallEngine)[1], version=5)
