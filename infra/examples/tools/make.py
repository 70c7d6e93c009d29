"""Makes what this example needs, on the spot: a small random chat model, and word problems that want a calculator.

    python -m infra.examples.tools.make [FOLDER]

Run it in the checkout. Nothing is downloaded. The same seed gives the same files.
"""

import itertools
import json
import random
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from infra.examples.chat.make import NAMES, THINGS, asked, make_model, make_tokenizer, write_lines
from tasks.environments.calculator import Calculator, calculated

TEMPLATE = (
    "{{ bos_token }}{% for tool in tools or [] %}<|system|>{{ tool.function.name }}: {{ tool.function.description }}"
    "{% for name, about in tool.function.parameters.properties.items() %} {{ name }}: {{ about.description }}"
    "{% endfor %}"
    "{{ eos_token }}{% endfor %}"
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] + eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
PROBLEM = "{name} has {first} boxes of {second} {things}. How many {things} does {name} have?"
TOOLS = list(Calculator().tools)
CALLS = 0.15
"""Share of the first answers in solved examples that call the calculator; the others guess with round numbers."""
HELD_OUT = 256
HERE = Path(__file__).resolve().parent


@dataclass(frozen=True)
class Problem:
    """A word problem that is a product."""

    text: str
    first: int
    second: int

    @property
    def expression(self) -> str:
        return f"{self.first}*{self.second}"

    @property
    def call(self) -> str:
        call = {"name": "calculator", "arguments": {"expression": self.expression}}
        return f"<tool_call>{json.dumps(call)}</tool_call>"

    @property
    def guess(self) -> str:
        """The product of both numbers rounded to tens, as one who does not calculate would say."""
        return str(round(self.first, -1) * round(self.second, -1))


def problems(rng: random.Random) -> list[Problem]:
    """One problem for each pair of two-digit numbers, in random order."""
    made: list[Problem] = []
    for first, second in itertools.product(range(11, 100), repeat=2):
        words = {"name": rng.choice(NAMES), "things": rng.choice(THINGS), "first": first, "second": second}
        made.append(Problem(PROBLEM.format(**words), first, second))
    rng.shuffle(made)
    return made


def records(split: Sequence[Problem], name: str) -> Iterator[dict[str, object]]:
    """Prompts with their answers."""
    for number, one in enumerate(split):
        chat = [{"role": "user", "content": one.text}]
        answer = calculated(one.expression)
        yield {"id": f"{name}-{number}", "prompt": one.text, "messages": chat, "tools": TOOLS, "answer": answer}


def demonstrations(split: Sequence[Problem], rng: random.Random) -> Iterator[dict[str, object]]:
    """Two examples for each problem: a first answer, mostly a guess and sometimes a call, and the answer after a call,
    which repeats the result."""
    for number, one in enumerate(split):
        asked, result = {"role": "user", "content": one.text}, calculated(one.expression)
        called = {"role": "assistant", "content": one.call}
        first = called if rng.random() < CALLS else {"role": "assistant", "content": one.guess}
        told = [{"role": "tool", "content": result}, {"role": "assistant", "content": result}]
        for place, messages in enumerate(([asked, first], [asked, called, *told])):
            yield {"id": f"solved-{number}-{place}", "messages": messages, "tools": TOOLS}


def main() -> None:
    folder, seed = asked(__doc__, HERE)
    rng = random.Random(seed)
    all_problems = problems(rng)
    test, train = all_problems[:HELD_OUT], all_problems[HELD_OUT:]
    write_lines(folder / "train.jsonl", records(train, "train"))
    write_lines(folder / "test.jsonl", records(test, "test"))
    write_lines(folder / "solved.jsonl", demonstrations(train, rng))
    shown = " ".join(f"<|tool|> {tool['function']}" for tool in TOOLS)
    tokenizer = make_tokenizer([f"{shown} {one.text} {one.call}" for one in train[:2000]], vocabulary=512)
    tokenizer.chat_template = TEMPLATE
    if folder.resolve() != HERE:
        shutil.copy(HERE / "tools.toml", folder)
    make_model(folder / "model", tokenizer, seed)


if __name__ == "__main__":
    main()
