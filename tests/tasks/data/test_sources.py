"""The prompts of a run: from several sources, held out, dropped, tokenized once, and without much memory."""

import json
import re
import threading
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest

from storage.errors import InputError
from tasks.checks import prompt_notes
from tasks.config.document import located, parse_config
from tasks.data.sources import Counted, prompts_of, text_codec
from tests.tasks.data.chat_model import TEMPLATE, chat_model

LEAST = """
[run]
seed = 3
[model.generate]
[train]
max_length = 128
[train.optimizer]
learning_rate = 1e-3
[engine]
max_model_len = 128
"""


def write_jsonl(path, records):
    path.write_text("".join(f"{json.dumps(record)}\n" for record in records))
    return str(path)


def sums(count, start=0):
    return [{"id": f"s{n}", "prompt": f"{n}+1=", "answer": str(n + 1)} for n in range(start, start + count)]


def config_of(data, **more):
    return parse_config({**tomllib.loads(LEAST), "data": data, **more}, "test")


def made(data, **more):
    config = config_of(data, **more)
    return prompts_of(config, text_codec(config))


def ids(prompts, table="train"):
    return prompts.tables[table]["prompt_id"].to_pylist()


def test_one_source_keeps_its_ids(tmp_path):
    prompts = made({"train": write_jsonl(tmp_path / "a.jsonl", sums(3))})
    assert ids(prompts) == ["s0", "s1", "s2"]
    assert prompts.counts == {"train": (Counted("a", 3),)}


def test_the_ids_of_several_sources_are_qualified(tmp_path):
    first, second = (write_jsonl(tmp_path / f"{name}.jsonl", sums(2)) for name in "ab")
    prompts = made({"train": [first, {"source": second, "name": "own"}]})
    assert ids(prompts) == ["a/s0", "a/s1", "own/s0", "own/s1"]
    assert prompts.counts["train"] == (Counted("a", 2), Counted("own", 2))
    assert len(prompts.digests["train"]) == 2


def test_two_sources_of_one_name_are_refused(tmp_path):
    (tmp_path / "b").mkdir()
    first, second = write_jsonl(tmp_path / "a.jsonl", sums(2)), write_jsonl(tmp_path / "b" / "a.jsonl", sums(2))
    with pytest.raises(InputError, match=r"data\.train: two sources are called 'a': give each its own name"):
        made({"train": [first, second]})


def test_held_out_prompts_are_split_off_and_counted(tmp_path):
    first, second = (write_jsonl(tmp_path / f"{name}.jsonl", sums(20, 20 * n)) for n, name in enumerate("ab"))
    prompts = made({"train": [first, second], "hold_out": 10})
    assert not set(ids(prompts)) & set(ids(prompts, "held_out"))
    assert len(ids(prompts, "held_out")) == 10
    assert sum(one.rows for one in prompts.counts["train"]) == len(ids(prompts)) == 30
    assert {name.partition("/")[0] for name in ids(prompts)[: prompts.counts["train"][0].rows]} == {"a"}


def test_dropped_prompts_are_counted(tmp_path):
    url = write_jsonl(tmp_path / "a.jsonl", [*sums(2), {"prompt": "1" * 200}])
    assert made({"train": url, "overlong": "drop"}).counts["train"] == (Counted("a", 2, dropped=1),)
    with pytest.raises(InputError, match=r'drop such prompts with data\.overlong = "drop"'):
        made({"train": url})
    with pytest.raises(InputError, match="all 1 prompts are too long"):
        made({"train": write_jsonl(tmp_path / "a.jsonl", [{"prompt": "1" * 200}]), "overlong": "drop"})


def test_an_empty_source_is_refused(tmp_path):
    with pytest.raises(InputError, match="is empty: give at least one record"):
        made({"train": [write_jsonl(tmp_path / "a.jsonl", sums(1)), write_jsonl(tmp_path / "b.jsonl", [])]})


def test_a_name_that_is_no_utf8_is_refused(tmp_path):
    """The configuration that names it, which could not be recorded, is refused, and so is a pattern that finds it."""
    write_jsonl(tmp_path / "p\udcff.jsonl", sums(1))
    with pytest.raises(InputError, match=r"p\\udcff' in it is not UTF-8, so it cannot be recorded\. Rename the file"):
        config_of({"train": f"{tmp_path}/p\udcff.jsonl"})
    with pytest.raises(InputError, match=r"p\\udcff\.jsonl' is not UTF-8, so .*: rename the file"):
        made({"train": f"{tmp_path}/*.jsonl"})


def test_a_name_that_is_too_long_is_no_file(tmp_path):
    with pytest.raises(InputError, match="aaa does not exist"):
        made({"train": "a" * 5000})
    assert located("a" * 5000, tmp_path) == "a" * 5000


@pytest.mark.parametrize("setting", ["id_field", "answer_field"])
def test_the_name_of_a_field_has_an_effect(tmp_path, setting):
    first = write_jsonl(tmp_path / "a.jsonl", sums(2))
    second = write_jsonl(tmp_path / "b.jsonl", [{"prompt": "1", "x": str(n)} for n in range(2)])
    made({"train": [first, second], setting: "x"})  # one of them has it
    made({"train": first, "warmup": second, setting: "x"})
    for data in ({"train": first, setting: "x"}, {"train": [{"source": first, setting: "x"}, second]}):
        with pytest.raises(InputError, match=rf'data\.{setting} = "x" has no effect where no record has such a field'):
            made(data)


CONVERSATION = [{"prompt": [{"role": "user", "content": "one?"}], "t": [], "answer": "three"}]


@pytest.mark.parametrize(
    ("records", "data", "fact"),
    [
        (sums(2), {"tools_field": "t"}, 'data.tools_field = "t" has no effect where no record has such a field'),
        (CONVERSATION, {"tools_field": "t"}, 'data.tools_field = "t" has no effect where no conversation has'),
        (CONVERSATION, {"accept": ["end"]}, 'data.accept = ["end"] has no effect where the chat template makes no'),
    ],
)
def test_a_setting_of_which_nothing_makes_use_is_refused(tmp_path, records, data, fact):
    model = {"source": str(chat_model(tmp_path / "model"))}
    with pytest.raises(InputError) as caught:
        made({"train": write_jsonl(tmp_path / "a.jsonl", records), **data}, model=model)
    assert fact in str(caught.value)
    assert "leave it out" in str(caught.value)


def test_hiding_no_tokens_is_refused(tmp_path):
    data = {"train": write_jsonl(tmp_path / "a.jsonl", sums(2))}
    config = config_of(data, rollout={"special_tokens": "hidden"})
    codec = text_codec(config)
    prompts_of(config, codec)
    with pytest.raises(InputError, match=r'special_tokens = "hidden" has no effect with a tokenizer .* = "shown"'):
        prompts_of(config, replace(codec, left_out=frozenset(codec.stop_tokens)))


def test_the_first_record_of_each_kind_is_known(tmp_path):
    template = "{% if tools %}{{ tools | tojson }}{% endif %}" + TEMPLATE
    ask, tools = [{"role": "user", "content": "one?"}], [{"name": "get"}]
    told = [{"role": "system", "content": "Add."}, *ask]
    records = [{"prompt": ask}, {"prompt": told}, {"prompt": ask, "tools": tools}, {"prompt": told, "tools": tools}]
    data = {"train": write_jsonl(tmp_path / "a.jsonl", records)}
    prompts = made(data, model={"source": str(chat_model(tmp_path / "model", template=template))})
    assert dict(prompts.counts["train"][0].kinds) == {"a system text": "2", "tools": "3"}


def test_weights_are_checked_before_the_start(tmp_path):
    first, second = (write_jsonl(tmp_path / f"{name}.jsonl", sums(2)) for name in "ab")
    with pytest.raises(InputError, match="give small whole numbers"):
        made({"train": [{"source": first, "weight": 1.0}, {"source": second, "weight": 0.00001}]})


def test_equal_content_is_tokenized_once(tmp_path):
    data = {"train": write_jsonl(tmp_path / "a.jsonl", sums(3))}
    first = made(data)
    assert made(data) is first
    assert made(data, run={"seed": 3, "iterations": 9}) is first
    assert made({**data, "answer_field": "prompt"}) is not first


def test_what_was_tokenized_is_not_used_for_other_content(tmp_path):
    data = {"train": write_jsonl(tmp_path / "a.jsonl", sums(3))}
    before = made(data).digests
    write_jsonl(tmp_path / "a.jsonl", sums(3, 5))
    after = made(data)
    assert ids(after) == ["s5", "s6", "s7"]
    assert after.digests != before


def test_a_chat_model_is_given_messages(tmp_path):
    asked = [{"messages": [{"role": "user", "content": f"{n} and one?"}], "answer": "three"} for n in range(4)]
    data = {"train": write_jsonl(tmp_path / "a.jsonl", asked), "prompt_field": "messages", "system": "Add."}
    prompts = made(data, model={"source": str(chat_model(tmp_path / "model"))})
    row = prompts.tables["train"].slice(1, 1).to_pylist()[0]
    assert row["prompt"] == "<|begin|><|system|>Add.<|end|>\n<|user|>1 and one?<|end|>\n<|assistant|>"
    codec = text_codec(config_of(data, model={"source": str(tmp_path / "model")}))
    assert "".join(codec.visible(row["prompt_tokens"])) == row["prompt"]
    assert codec.visible(row["answer_tokens"]) == ["thr", "ee", "<|end|>"]
    assert json.loads(row["record"]) == asked[1]


def test_what_is_done_with_prompts_is_told_when_a_run_begins(tmp_path):
    trims = TEMPLATE.replace("message['content']", "(message['content'] | trim)")
    asked = [{"prompt": f"{n} and one?", "answer": " three"} for n in range(4)]
    url = write_jsonl(tmp_path / "a.jsonl", asked)
    config = config_of(
        {"train": url, "hold_out": 1, "warmup": url, "chat": True, "accept": ["blanks"]},
        model={"source": str(chat_model(tmp_path / "model", template=trims))},
    )
    (note,) = prompts_of(config, text_codec(config)).notes
    assert note.startswith("warmup, ")
    assert "record 1 and 3 more: the chat template leaves blanks around the answer out" in note
    assert prompt_notes(config, None) == (note,)


def test_a_plain_text_begins_with_what_the_tokenizer_puts_there(tmp_path):
    prompts = made(
        {"train": write_jsonl(tmp_path / "a.jsonl", [{"prompt": "one", "answer": "two"}])},
        model={"source": str(chat_model(tmp_path / "model"))},
    )
    row = prompts.tables["train"].to_pylist()[0]
    assert row["prompt"] == "one"
    assert row["prompt_tokens"][0] == 0
    assert row["answer_tokens"][-1] == 1  # the first stop token, that of config.json


class Peak:
    """Peak anonymous memory of this process, above that at the start; sampled."""

    def __enter__(self):
        self._end, self._thread = threading.Event(), threading.Thread(target=self._sample)
        self._start, self.bytes = self._now(), 0
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._end.set()
        self._thread.join()

    def _sample(self):
        while not self._end.wait(0.005):
            self.bytes = max(self.bytes, self._now() - self._start)

    def _now(self):
        status = Path("/proc/self/status").read_text()
        return int(re.search(r"RssAnon:\s+(\d+) kB", status).group(1)) << 10


@pytest.mark.slow
def test_a_large_source_takes_little_memory(tmp_path):
    """Only one batch of records at a time is in memory; the table is a file. As objects these take 150 MiB."""
    rows = 100_000
    with (tmp_path / "a.jsonl").open("w") as file:
        file.writelines(f'{{"id": {n}, "prompt": "{n}+1="}}\n' for n in range(rows))
    with Peak() as peak:
        prompts = made({"train": str(tmp_path / "a.jsonl"), "hold_out": 10})
    assert prompts.tables["train"].num_rows == rows - 10
    assert peak.bytes < 60 << 20
