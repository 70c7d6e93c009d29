"""A record becomes the text of a prompt, and its answer the turn that the model should give."""

import json
from dataclasses import replace

import pytest

from storage.errors import InputError
from tasks.config.data import DataSection
from tasks.data.chat import Turn
from tasks.data.rendering import Rendered, Renderer
from tasks.data.tokenizer import TextCodec
from tests.tasks.data.chat_model import chat_model

ASKED = [{"role": "user", "content": "1+1?"}]
SOLVED = [*ASKED, {"role": "assistant", "content": "2"}]
CHAT = "<|begin|><|user|>1+1?<|end|>\n<|assistant|>"
WITH_SYSTEM = "<|begin|><|system|>Add.<|end|>\n<|user|>1+1?<|end|>\n<|assistant|>"


@pytest.fixture(scope="module")
def codec(tmp_path_factory):
    return TextCodec.from_directory(chat_model(tmp_path_factory.mktemp("chat")))


def render(codec, record, **section):
    source = DataSection(train="unused", **section).sources("train")[0]
    return replace(Renderer(source, codec, "train").render(record, "record 1"), kinds=frozenset())


@pytest.mark.parametrize(
    ("record", "section", "rendered"),
    [
        ({"prompt": "1+1="}, {}, Rendered("1+1=", None, None, chat=False)),
        ({"prompt": "1+1=", "answer": 2}, {}, Rendered("1+1=", "2", Turn("2"), chat=False)),
        ({"q": "1+1"}, {"prompt": "{q}=\n{{?}}"}, Rendered("1+1=\n{?}", None, None, chat=False)),
        ({"q": "1+1?"}, {"prompt": "{q}", "chat": True}, Rendered(CHAT, None, None, chat=True)),
        ({"prompt": "1+1?", "answer": "2"}, {"chat": True}, Rendered(CHAT, "2", Turn("2", "<|end|>\n"), chat=True)),
        ({"prompt": "1+1?"}, {"system": "Add."}, Rendered(WITH_SYSTEM, None, None, chat=True)),
        ({"m": ASKED}, {"prompt_field": "m"}, Rendered(CHAT, None, None, chat=True)),
        ({"m": json.dumps(ASKED)}, {"prompt_field": "m"}, Rendered(CHAT, None, None, chat=True)),
        ({"m": [{**ASKED[0], "name": None}]}, {"prompt_field": "m"}, Rendered(CHAT, None, None, chat=True)),
        ({"m": SOLVED, "answer": "two"}, {"prompt_field": "m"}, Rendered(CHAT, "2", Turn("2", "<|end|>\n"), chat=True)),
        ({"prompt": ASKED, "answer": SOLVED[1:]}, {}, Rendered(CHAT, "2", Turn("2", "<|end|>\n"), chat=True)),
        ({"prompt": ASKED}, {"system": "Add."}, Rendered(WITH_SYSTEM, None, None, chat=True)),
        (
            {"prompt": [{"role": "system", "content": "Add."}, *ASKED]},
            {"system": "Other."},
            Rendered(WITH_SYSTEM, None, None, chat=True),
        ),
    ],
)
def test_what_a_record_becomes(codec, record, section, rendered):
    assert render(codec, record, **section) == rendered


@pytest.mark.parametrize(
    ("record", "section", "fact"),
    [
        ({"question": "?"}, {}, "field 'prompt' is missing, but a text or messages are expected"),
        ({"prompt": ""}, {}, "field 'prompt' is ''"),
        ({"prompt": ["1+1"]}, {}, "field 'prompt' is ['1+1']"),
        ({"prompt": [{"role": "user"}]}, {}, "message 1 of field 'prompt' has content = None"),
        ({"prompt": [*ASKED, {"content": "x"}]}, {}, "message 2 of field 'prompt' has role = None"),
        ({"prompt": [{"role": "judge", "content": "x"}]}, {}, "chat template refuses the messages: unknown role"),
        ({"prompt": SOLVED[1:]}, {}, "the only message is the assistant's"),
        ({"q": None, "a": 1}, {"prompt": "{q}"}, "names the field 'q', which the record lacks: its fields are a"),
    ],
)
def test_a_record_that_is_no_prompt(codec, record, section, fact):
    with pytest.raises(InputError) as caught:
        render(codec, record, **section)
    assert str(caught.value).startswith("train, record 1: ")
    assert fact in str(caught.value)


def test_a_tokenizer_without_chat_template(tmp_path):
    codec = TextCodec.from_directory(chat_model(tmp_path, template=None))
    with pytest.raises(InputError, match="no chat template"):
        render(codec, {"prompt": ASKED})


def test_what_a_source_says_for_itself_goes_before_what_is_said_for_all(codec):
    section = DataSection.model_validate({
        "train": [{"source": "a", "prompt_field": "q"}, {"source": "b", "prompt": "{q}!"}, "c"],
        "prompt": "{q}?",
    })  # fmt: skip
    sources = section.sources("train")
    assert [Renderer(one, codec, "train").render({"q": "x"}, "record 1").text for one in sources] == ["x", "x!", "x?"]
