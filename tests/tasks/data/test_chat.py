"""Conversations through a chat template: the given answer is trained, or it is refused."""

import pytest

from storage.errors import InputError
from tasks.config.data import DataSection
from tasks.data.files import Read
from tasks.data.prompts import Room, mapped, prompt_batches
from tasks.data.rendering import Renderer
from tasks.data.tokenizer import TextCodec
from tests.tasks.data.chat_model import chat_model

ASKED = [{"role": "user", "content": "1+1?"}]
WITH_SYSTEM = [{"role": "system", "content": "Be brief."}, *ASKED]
BLOCK = "<think>\nx\n</think>\n\n2"
CALLS = [{"function": {"name": "f", "arguments": {"a": {"b": [1, None, 'x"y']}}}}]
TOOLS = [{"type": "function", "function": {"name": "get", "description": 'Gets "it".', "parameters": {"city": {}}}}]
PLAIN = "{{ m.content }}"
OPENED = "{% if add_generation_prompt %}<|assistant|><think>\n{% endif %}"


def template(content=PLAIN, opening="{% if add_generation_prompt %}<|assistant|>{% endif %}", end="<|end|>\n", only=""):
    return f"{{% for m in messages {only} %}}<|{{{{ m.role }}}}|>{content}{end}{{% endfor %}}{opening}"


DROPS = template("{{ m.content.split('</think>')[-1] }}", OPENED)
SPLITS = template(
    "{% if m.role == 'assistant' and loop.last %}{% set r = m.reasoning_content or '' %}"
    "{% if '</think>' in m.content %}{% set r = m.content.split('</think>')[0].split('<think>')[-1] %}{% endif %}"
    "<think>\n{{ r.strip('\n') }}\n</think>\n\n{{ m.content.split('</think>')[-1].strip('\n') }}"
    "{% else %}{{ m.content }}{% endif %}"
)
SPLITS_OPENED = SPLITS.replace("<|assistant|>{% endif %}", "<|assistant|><think>\n{% endif %}")
WITH_CALLS = template(
    "{{ m.content }}{% for t in m.tool_calls or [] %}[{{ t.function.name }} {{ t.function.arguments | tojson }}]"
    "{% endfor %}"
)
INST = (
    "{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
    "{% elif m.role == 'assistant' %} {{ m.content }}<|end|>{% endif %}{% endfor %}"
)
ENDED = template(opening="{% if add_generation_prompt %}<|assistant|>{% else %}<|close|>{% endif %}")


def answered(content="2", **more):
    return {"prompt": [*ASKED, {"role": "assistant", "content": content, **more}]}


def earlier(content, **more):
    return {"prompt": [*ASKED, {"role": "assistant", "content": content, **more}, *ASKED], "answer": "2"}


def made(folder, chat_template, record, table="warmup", stop=None, accept=(), **section):
    """The row of a record, its tokens as texts, and the notes on it."""
    codec = TextCodec.from_directory(chat_model(folder, template=chat_template), stop)
    source = DataSection(train="unused", **section).sources("train")[0]
    renderer = Renderer(source, codec, table, table == "warmup", accept)
    (row,) = mapped(prompt_batches([Read("record 1", record)], renderer, Room(1000, 1))).to_pylist()
    trained = row["answer_tokens"]
    shown = None if trained is None else "".join(codec.visible(trained))
    assert "".join(codec.visible(row["prompt_tokens"])) == row["prompt"]
    return row["prompt"], shown, list(renderer.notes.sentences(table))


TRAINED = {
    "as given": (template(), {"prompt": WITH_SYSTEM, "answer": "2"}, "2<|end|>"),
    "text as a turn": (template(), {"prompt": "1+1?", "answer": "2"}, "2<|end|>"),
    "empty": (template(), {"prompt": ASKED, "answer": ""}, None),
    "block dropped": (DROPS, {"prompt": ASKED, "answer": BLOCK}, "x\n</think>\n\n2<|end|>"),
    "block only closed": (DROPS, {"prompt": ASKED, "answer": "x</think>2"}, "x</think>2<|end|>"),
    "block written": (SPLITS, {"prompt": ASKED, "answer": BLOCK}, f"{BLOCK}<|end|>"),
    "empty block written": (SPLITS, {"prompt": ASKED, "answer": "2"}, "<think>\n\n</think>\n\n2<|end|>"),
    "block opened and written": (SPLITS_OPENED, {"prompt": ASKED, "answer": BLOCK}, "x\n</think>\n\n2<|end|>"),
    "reasoning": (SPLITS, answered(reasoning_content="one"), "<think>\none\n</think>\n\n2<|end|>"),
    "reasoning by another name": (SPLITS_OPENED, answered(reasoning="one"), "one\n</think>\n\n2<|end|>"),
    "calls": (WITH_CALLS, answered(None, tool_calls=CALLS), '[f {"a": {"b": [1, null, "x\\"y"]}}]<|end|>'),
    "no generation prompt needed": (INST, {"prompt": ASKED, "answer": "2"}, " 2<|end|>"),
    "whole closed otherwise": (ENDED, {"prompt": ASKED, "answer": "2"}, "2<|end|>"),
    "two stop tokens": (template(end="<|end|><|close|>"), {"prompt": ASKED, "answer": "2"}, "2<|end|>"),
    "tool that must be JSON": (
        template("{{ raise_exception('no') if m.role == 'tool' and m.content[0] != '{' else m.content }}"),
        {"prompt": [*ASKED, {"role": "tool", "content": "{}"}], "answer": "2"},
        "2<|end|>",
    ),
    "fence opened": (
        template(opening="{% if add_generation_prompt %}<|assistant|>```\n{% endif %}"),
        {"prompt": ASKED, "answer": "```\nx\n```"},
        "x\n```<|end|>",
    ),
    "line feed of the header": (
        template(opening="{% if add_generation_prompt %}<|assistant|>\n{% endif %}"),
        {"prompt": ASKED, "answer": "2"},
        "2<|end|>",
    ),
}


@pytest.mark.parametrize(("chat_template", "record", "trained"), TRAINED.values(), ids=TRAINED)
def test_an_answer_is_trained_as_it_was_given(tmp_path, chat_template, record, trained):
    assert made(tmp_path, chat_template, record, chat=True)[1] == trained


REFUSED = {
    "block not closed": (DROPS, {"prompt": ASKED, "answer": "2"}, "the prompt goes on with '<think>\\n', where the"),
    "block opened otherwise": (
        DROPS,
        {"prompt": ASKED, "answer": "<think>x</think>2"},
        "Give an answer that continues",
    ),
    "block written otherwise": (SPLITS, {"prompt": ASKED, "answer": "<think>x</think>2"}, "would not be that answer"),
    "reasoning dropped": (template(), answered(reasoning_content="one"), "the answer's reasoning_content, 'one'"),
    "upper": (template("{{ m.content | upper }}"), answered("two"), "makes 'TWO<|end|>\\n' of the answer 'two'"),
    "twice": (template("{{ m.content }}{% if m.role == 'assistant' %}{{ m.content }}{% endif %}"), answered(), "once"),
    "answer dropped": (template("{{ m.content if m.role == 'user' else '' }}"), answered("n"), "does not write the"),
    "calls dropped": (template(), answered("ok", tool_calls=CALLS), "the answer's tool calls, 'f'"),
    "numbered": ("{{ messages | length }}" + template(), answered(), "goes on with '1<|user|>"),
    "at random": ("{{ range(10000) | random }}" + template(), answered(), "another text of the same messages"),
    "stop token within": (template(), answered("2<|end|>3"), "holds the stop token '<|end|>'"),
    "stop token at the end": (template(), answered("2<|end|>"), "holds the stop token '<|end|>'"),
}


@pytest.mark.parametrize(("chat_template", "record", "fact"), REFUSED.values(), ids=REFUSED)
def test_another_answer_than_was_given_is_refused(tmp_path, chat_template, record, fact):
    with pytest.raises(InputError) as caught:
        made(tmp_path, chat_template, record)
    assert str(caught.value).startswith("warmup, record 1: ")
    assert fact in str(caught.value)


def test_an_answer_that_is_not_trained_is_no_error(tmp_path):
    assert made(tmp_path / "a", DROPS, {"prompt": ASKED, "answer": "2"}, "train")[1] is None
    assert made(tmp_path / "b", template(), answered("2<|end|>3"), "train")[1] is None


LOST = {
    "system": (template(only="if m.role != 'system'"), {"prompt": WITH_SYSTEM}, "the system's text (message 1), 'Be"),
    "a letter": (
        template(only="if m.role != 'system'"), {"prompt": [{"role": "system", "content": "a"}, *ASKED]}, "'a'",
    ),
    "all but the last": ("<|user|>{{ messages[-1].content }}<|assistant|>", earlier("two"), "the assistant's text"),
    "tool": (
        template(only="if m.role != 'tool'"), {"prompt": [*ASKED, {"role": "tool", "content": "33"}]}, "the tool's",
    ),
    "calls": (template(), earlier("", tool_calls=CALLS), "the tool calls of message 2, 'f'"),
    "tools": (template(), {"prompt": ASKED, "tools": TOOLS}, "the tools, 'get'"),
    "system in upper case": (
        template("{{ m.content | upper if m.role == 'system' else m.content }}"), {"prompt": WITH_SYSTEM}, "system's",
    ),
    "header": (template(opening=""), {"prompt": ASKED}, "ends before '<|assistant|>', which the model would have to"),
    "exception": ("{{ 1 // 0 }}", {"prompt": ASKED}, "refuses the messages: ZeroDivisionError"),
    "recursion": ("{% macro r() %}{{ r() }}{% endmacro %}{{ r() }}", {"prompt": ASKED}, "messages: RecursionError"),
    "attribute": ("{{ messages[0].content.one.two }}", {"prompt": ASKED}, "refuses the messages: 'str object' has no"),
    "range": ("{% for i in range(10**9) %}{% endfor %}", {"prompt": ASKED}, "refuses the messages: OverflowError"),
    "no tools": (template(), {"prompt": ASKED, "tools": "get"}, "field 'tools' is 'get', but a list of tables"),
}  # fmt: skip


@pytest.mark.parametrize(("chat_template", "record", "fact"), LOST.values(), ids=LOST)
def test_a_prompt_that_lacks_what_was_said_is_refused(tmp_path, chat_template, record, fact):
    with pytest.raises(InputError) as caught:
        made(tmp_path, chat_template, record, "train")
    assert str(caught.value).startswith("train, record 1: ")
    assert fact in str(caught.value)


def test_a_template_that_opens_the_turn_after_some_texts_alone_is_refused(tmp_path):
    """Messages of the same roles as those before them are looked at too."""
    opening = "{% if add_generation_prompt and messages[-1].content != 'Bye' %}<|assistant|>{% endif %}"
    codec = TextCodec.from_directory(chat_model(tmp_path, template=template(opening=opening)))
    renderer = Renderer(DataSection(train="unused").sources("train")[0], codec, "train", False)
    records = [{"prompt": [{"role": "user", "content": text}]} for text in ("Hello", "Bye")]
    reads = [Read(f"record {number}", record) for number, record in enumerate(records, 1)]
    with pytest.raises(InputError, match=r"record 2: .* ignores add_generation_prompt"):
        mapped(prompt_batches(reads, renderer, Room(1000, 1)))


NOTED = {
    "block": (DROPS, {"prompt": ASKED, "answer": BLOCK}, "the generation prompt ends with '<think>\\n'"),
    "trimmed system": (
        template("{{ m.content | trim }}"), {"prompt": [{"role": "system", "content": "Be.\n"}, *ASKED]}, "system's",
    ),
    "earlier reasoning": (DROPS, earlier("<think>x</think>two") | {"answer": BLOCK}, "the reasoning of earlier turns"),
    "earlier field": (template(), earlier("two", reasoning_content="one"), "the reasoning of earlier turns"),
    "name": (template(), {"prompt": [{**ASKED[0], "name": "Bo"}]}, "leaves the field 'name' of messages out"),
    "no generation prompt": (INST, {"prompt": ASKED}, "has no generation prompt: an answer follows"),
    "date": ("{{ strftime_now('%Y') }}" + template(), {"prompt": ASKED}, "may write the date"),
}  # fmt: skip


@pytest.mark.parametrize(("chat_template", "record", "note"), NOTED.values(), ids=NOTED)
def test_what_a_template_does_beyond_that_is_noted(tmp_path, chat_template, record, note):
    notes = made(tmp_path, chat_template, record)[2]
    assert any(one.startswith("warmup, record 1: ") and note in one for one in notes)


def test_a_template_that_does_as_asked_is_not_noted(tmp_path):
    tools = "{% if tools %}{{ tools | tojson }}{% endif %}"
    record = {"prompt": [*WITH_SYSTEM, {"role": "assistant", "content": None, "tool_calls": CALLS}, *ASKED]}
    prompt, trained, notes = made(tmp_path, tools + WITH_CALLS, {**record, "answer": "2", "tools": TOOLS})
    assert '"name": "get"' in prompt
    assert (trained, notes) == ("2<|end|>", [])


CHANGED = {
    "blanks": (template("{{ m.content | trim }}"), answered(" 2\n"), None, "leaves blanks around the answer out"),
    "end": (
        template(end="<|close|>\n"),
        answered(),
        ["<|end|>"],
        'to end them so, set rollout.stop_tokens = ["<',
    ),
}


@pytest.mark.parametrize("kind", CHANGED)
def test_another_turn_than_was_asked_is_refused_unless_that_is_accepted(tmp_path, kind):
    chat_template, record, stop, fact = CHANGED[kind]
    with pytest.raises(InputError, match=rf"or set data\.accept = \['{kind}'\]") as caught:
        made(tmp_path / "refused", chat_template, record, stop=stop)
    assert fact in str(caught.value)
    _, trained, notes = made(tmp_path / "accepted", chat_template, record, stop=stop, accept=[kind])
    assert trained == "2<|end|>"
    assert any(fact in note for note in notes)
    assert made(tmp_path / "not trained", chat_template, record, "train", stop=stop)[1] == "2<|end|>"


@pytest.mark.parametrize(
    ("answer", "trained"), [("2", "2<|close|>"), ("2<|end|>", "2<|end|>"), ("2<|end|>3", "holds the stop token")]
)
def test_an_answer_after_a_text_ends_once(tmp_path, answer, trained):
    record = {"prompt": "one", "answer": answer}
    codec = TextCodec.from_directory(chat_model(tmp_path))
    source = DataSection(train="unused").sources("train")[0]
    try:
        table = mapped(prompt_batches([Read("record 1", record)], Renderer(source, codec, "warmup"), Room(1000, 1)))
    except InputError as error:
        assert trained in str(error)
    else:
        assert "".join(codec.visible(table["answer_tokens"][0].as_py())) == trained
