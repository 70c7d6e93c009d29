"""A foreign model directory, without weights: a BPE tokenizer with a chat template, read by transformers."""

import json
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message['role'] not in ['system', 'user', 'assistant'] %}{{ raise_exception('unknown role') }}{% endif %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
SPECIAL = ["<|begin|>", "<|close|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>"]
BEGIN, CLOSE, END = range(3)


def chat_model(folder: Path, *, template: str | None = TEMPLATE, config: dict | None = None, **tokenizer) -> Path:
    """`config` and `tokenizer` replace fields of config.json and tokenizer_config.json; None removes one."""
    folder.mkdir(parents=True, exist_ok=True)
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=SPECIAL, initial_alphabet=alphabet)
    made.train_from_iterator(["one and one is two", "two and one is three"], trainer)
    pairs = [("<|begin|>", BEGIN), ("<|close|>", CLOSE)]
    made.post_processor = processors.TemplateProcessing(single="<|begin|> $A <|close|>", special_tokens=pairs)
    made.save(str(folder / "tokenizer.json"))
    write(folder / "tokenizer_config.json", {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|begin|>",
        "eos_token": "<|end|>",
        "chat_template": template,
        **tokenizer,
    })  # fmt: skip
    write(folder / "config.json", {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": made.get_vocab_size(),
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "eos_token_id": CLOSE,
        **(config or {}),
    })  # fmt: skip
    return folder


def write(path: Path, document: dict) -> None:
    path.write_text(json.dumps({key: value for key, value in document.items() if value is not None}))
