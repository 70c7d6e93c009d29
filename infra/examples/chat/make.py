"""Makes what this example needs, on the spot: a small random chat model with its tokenizer, and word problems as chats.

    python infra/examples/chat/make.py [FOLDER]

Nothing is downloaded. The model is what transformers writes for a Llama of this size; the tokenizer is a byte-pair
encoding learned from the problems, with a chat template. The same seed gives the same files.
"""

import argparse
import itertools
import json
import random
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

SYSTEM = "End with #### and the answer."
BEGIN, END, PAD = "<|begin|>", "<|end|>", "<|pad|>"
ROLES = ("<|system|>", "<|user|>", "<|assistant|>")
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] + eos_token }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
NAMES = ("Ann", "Ben", "Carla", "David", "Emma", "Finn", "Grace", "Hugo")
THINGS = ("apples", "books", "coins", "marbles", "pens", "shells", "stamps", "stickers")
MORE = ("buys", "finds", "gets", "wins")
LESS = ("breaks", "loses", "sells", "spends")
PROBLEM = "{name} has {first} {things} and {verb} {second}. How many {things} does {name} have now?"
HERE = Path(__file__).resolve().parent
MISTAKES = 0.6
"""Share of the solved examples that forget to carry or to borrow, which the reward has to correct."""


@dataclass(frozen=True)
class Problem:
    """A word problem over two numbers."""

    text: str
    first: int
    second: int
    adds: bool

    @property
    def answer(self) -> int:
        return self.first + self.second if self.adds else self.first - self.second

    def solution(self, careful: bool) -> str:
        """Solve digit by digit, as 7+8=15, 4+3+1=8 for 47 and 38; a careless one forgets to carry: 7+8=15, 4+3=7."""
        sign = 1 if self.adds else -1
        (tens, ones), (more_tens, more_ones) = divmod(self.first, 10), divmod(self.second, 10)
        carried = ones + more_ones > 9 if self.adds else ones < more_ones
        if carried and not self.adds:
            ones += 10
        low, high = ones + sign * more_ones, tens + sign * more_tens + sign * (carried and careful)
        mark = "+" if self.adds else "-"
        carry = f"{mark}1" if carried and careful else ""
        result = 10 * high + low % 10
        return f"{ones}{mark}{more_ones}={low}, {tens}{mark}{more_tens}{carry}={high}\n#### {result}"


def problems(rng: random.Random) -> list[Problem]:
    """One problem for each pair of two-digit numbers and operation, in random order."""
    made: list[Problem] = []
    for first, second, adds in itertools.product(range(10, 100), range(10, 100), (True, False)):
        if adds or second <= first:
            words = {
                "name": rng.choice(NAMES),
                "things": rng.choice(THINGS),
                "verb": rng.choice(MORE if adds else LESS),
            }
            made.append(Problem(PROBLEM.format(first=first, second=second, **words), first, second, adds))
    rng.shuffle(made)
    return made


def messages(problem: Problem, solution: str | None = None) -> list[dict[str, str]]:
    """A problem as a chat, with its solution as the assistant's turn if it is given."""
    chat = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": problem.text}]
    return chat if solution is None else [*chat, {"role": "assistant", "content": solution}]


def records(split: Sequence[Problem], name: str) -> Iterator[dict[str, object]]:
    """Prompts with their answers."""
    for number, problem in enumerate(split):
        yield {"id": f"{name}-{number}", "messages": messages(problem), "answer": str(problem.answer)}


def demonstrations(split: Sequence[Problem], rng: random.Random) -> Iterator[dict[str, object]]:
    """Solved examples, most of them careless."""
    for number, problem in enumerate(split):
        yield {"id": f"solved-{number}", "messages": messages(problem, problem.solution(rng.random() >= MISTAKES))}


def write_lines(path: Path, lines: Iterable[Mapping[str, object]]) -> None:
    """A JSONL file."""
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


def make_tokenizer(texts: Sequence[str], vocabulary: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer in which each digit is a token, with a chat template."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(  # pyright: ignore[reportAttributeAccessIssue]
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[BEGIN, END, PAD, *ROLES],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=BEGIN, eos_token=END, pad_token=PAD)
    fast.chat_template = TEMPLATE
    return fast


def make_model(folder: Path, tokenizer: PreTrainedTokenizerFast, seed: int) -> None:
    """A Llama of one million parameters with random weights, as transformers saves it."""
    torch.manual_seed(seed)
    ids = tokenizer.get_vocab()
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=32,
        max_position_embeddings=128,
        bos_token_id=ids[BEGIN],
        eos_token_id=ids[END],
        pad_token_id=ids[PAD],
        tie_word_embeddings=True,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def asked(description: str | None, here: Path) -> tuple[Path, int]:
    """The folder for the files, by default `here`, which is made, and the seed, from the command line."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, default=here, help="where the files go")
    parser.add_argument("--seed", type=int, default=0, help="seed of the model and the problems")
    given = parser.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    return given.folder, given.seed


def main() -> None:
    folder, seed = asked(__doc__, HERE)
    rng = random.Random(seed)
    all_problems = problems(rng)
    test, train = all_problems[:256], all_problems[256:]
    write_lines(folder / "train.jsonl", records(train, "train"))
    write_lines(folder / "test.jsonl", records(test, "test"))
    write_lines(folder / "solved.jsonl", demonstrations(train, rng))
    texts = [SYSTEM, *(f"{one.text}\n{one.solution(careful=True)}" for one in train[:4000])]
    if folder.resolve() != HERE:
        for name in ("chat.toml", "lora.toml", "judge.toml"):
            shutil.copy(HERE / name, folder)
    make_model(folder / "model", make_tokenizer(texts, vocabulary=512), seed)


if __name__ == "__main__":
    main()
