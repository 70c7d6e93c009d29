"""A learning task with long responses for the loop's bench: count in steps. Numbers have three digits, the ones first.
So `740+830<002:` (from 47 in steps of 38, below 200) has the answer `580,321,161,991`.

    python -m infra.bench.counting FOLDER [--small]
    ratchet run FOLDER/counting.toml --run warm --set run.iterations=0
    ratchet export warm --to FOLDER/warm
    ratchet bench loop FOLDER/counting.toml --iterations 12 --set model.source=FOLDER/warm --set warmup.steps=0

Numbers of terms are geometric, on average a quarter of the most. The warm-up's examples forget to carry in some terms,
and each term follows from the one before, so a mistake spoils all that come after it. The model has 100 million
parameters (`--small`: 0.4 million). The same seed gives the same files.
"""

import argparse
import random
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tasks.rewards.sample import Sample

MOST, SHORTEST = 200, 4
"""Most and fewest terms of a task."""
MISTAKES = 0.1
"""Share of the terms of the warm-up's examples that forget to carry."""
HELD_OUT, PROMPTS, SOLVED = 128, 8192, 16384
HERE = Path(__file__).resolve().parent


@dataclass(frozen=True)
class Task:
    """Count from `first` in steps of `step` while the number is below `limit`."""

    first: int
    step: int
    limit: int

    @property
    def prompt(self) -> str:
        return f"{written(self.first)}+{written(self.step)}<{written(self.limit)}:"

    @property
    def answer(self) -> str:
        return ",".join(map(written, range(self.first + self.step, self.limit, self.step)))

    def solution(self, rng: random.Random) -> str:
        """The terms, some of them added without carrying."""
        terms, last = list[int](), self.first
        while last + self.step < self.limit and len(terms) < MOST:
            last = uncarried(last, self.step) if rng.random() < MISTAKES else last + self.step
            terms.append(last)
        return ",".join(map(written, terms))


def written(number: int) -> str:
    """Three digits, the ones first."""
    return f"{number:03d}"[::-1]


def uncarried(one: int, other: int) -> int:
    """The sum of two numbers without carrying from the ones, at least 1 above `one`."""
    return max(one + 1, one + other - 10 * (one % 10 + other % 10 > 9))


def tasks(rng: random.Random, number: int, most: int) -> Iterator[Task]:
    """Random tasks; their numbers of terms are geometric with a mean of a quarter of `most`."""
    for _ in range(number):
        terms = min(most, SHORTEST + int(rng.expovariate(1 / (most / 4 - SHORTEST))))
        first, step = rng.randint(10, 99), rng.randint(3, max(3, min(99, 800 // terms)))
        yield Task(first, step, first + step * terms + rng.randint(1, step))


def leading(record: Mapping[str, Any], response: str, sample: Sample) -> float:
    """The reward: the share of terms before the first wrong one; terms too many count as wrong."""
    right, said = record["answer"].split(","), response.split(",")
    wrong = (place for place, (one, other) in enumerate(zip(right, said, strict=False)) if one != other)
    return next(wrong, min(len(right), len(said))) / max(len(right), len(said))


def main() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM  # imports torch

    from infra.examples.chat.make import BEGIN, END, PAD, make_tokenizer, write_lines

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where the files go")
    parser.add_argument("--small", action="store_true", help="a small model and short responses, for CPU")
    given = parser.parse_args()
    most, layers, hidden = (40, 2, 128) if given.small else (MOST, 14, 768)
    rng = random.Random(0)
    train, held_out = list(tasks(rng, PROMPTS, most)), list(tasks(rng, HELD_OUT, most))
    given.folder.mkdir(parents=True, exist_ok=True)
    for name, split in (("train", train), ("test", held_out)):
        lines = ({"id": f"{name}-{n}", "prompt": one.prompt, "answer": one.answer} for n, one in enumerate(split))
        write_lines(given.folder / f"{name}.jsonl", lines)
    solved = ({"prompt": one.prompt, "answer": one.solution(rng)} for one in tasks(rng, SOLVED, most))
    write_lines(given.folder / "solved.jsonl", solved)
    shutil.copy(HERE / "counting.toml", given.folder)
    tokenizer = make_tokenizer([one.prompt for one in train], vocabulary=0)
    ids = tokenizer.get_vocab()
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=hidden, intermediate_size=hidden * 8 // 3, num_hidden_layers=layers,
        num_attention_heads=hidden // 64, num_key_value_heads=hidden // 64, head_dim=64, max_position_embeddings=1024,
        bos_token_id=ids[BEGIN], eos_token_id=ids[END], pad_token_id=ids[PAD], tie_word_embeddings=True,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(given.folder / "model")
    tokenizer.save_pretrained(given.folder / "model")


if __name__ == "__main__":
    main()
