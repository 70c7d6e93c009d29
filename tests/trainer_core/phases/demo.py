"""The demo's task with a sampler of a few lines instead of an engine: objectives teach a model, in one process."""

from pathlib import Path

import numpy as np

from tasks.config.data import GeneratedAddition
from tasks.config.model import GeneratedModel
from tasks.data.generated import character_tokenizer, generate_addition, generate_model
from tests.trainer_core.models import examples_of
from tests.trainer_core.oracle import export
from trainer_core.batches.sequences import Samples

STOP, RESPONSE = 1, 4
PROMPTS, SAMPLES = 48, 16


def make_demo_model(directory):
    generate_model(directory, GeneratedModel(max_positions=64), seed=0)


def taught(trainer, directory, objectives, warm_up, iterations, folder):
    """Share of held-out sums that are right before and after some iterations of each objective, after one warm-up."""
    from transformers import Qwen3ForCausalLM

    from trainer_core.phases.policy import PolicyPhase

    model = Qwen3ForCausalLM.from_pretrained(directory).eval()
    encode = character_tokenizer().encode
    section = GeneratedAddition(held_out=256, warmup=8000, warmup_mistakes=0.75)
    tables = {
        name: [(encode(row["prompt"]).ids, [*encode(row["answer"]).ids, STOP]) for row in rows]
        for name, rows in generate_addition(section, seed=0).items()
    }
    trainer.import_model()
    trainer.train_supervised(examples_of(tables["warmup"]), *warm_up)
    trainer.save(f"{folder}/start")
    trainer.load_reference(f"{folder}/start", "start")
    found = {}
    for name, policy in objectives.items():
        trainer.load(f"{folder}/start")
        scores = [_accuracy(_with_live_weights(model, trainer, folder), tables["held_out"])]
        for iteration in range(iterations):
            rows = tables["train"][iteration * PROMPTS : (iteration + 1) * PROMPTS]
            samples = _rollout(_with_live_weights(model, trainer, folder), rows, iteration)
            phase = PolicyPhase(trainer._passes, trainer._optimizer, policy, 1.0, (iteration,))
            phase.run(samples, trainer._reference_logprobs(samples, 1.0) if policy.needs_reference else None)
        found[name] = [*scores, _accuracy(_with_live_weights(model, trainer, folder), tables["held_out"])]
    return found


def _with_live_weights(model, trainer, folder):
    """Give transformers' model the trainer's weights."""
    from safetensors.torch import load_file

    export(trainer, folder)
    for path in Path(folder).glob("*.safetensors"):
        model.load_state_dict(load_file(path), strict=False)
    return model


def _generate(model, prompts, generator=None):
    """Tokens and log-probabilities of responses to prompts of one length, (N, RESPONSE); greedy without a generator."""
    import torch

    tokens, chosen = torch.tensor(prompts), []
    with torch.no_grad():
        for _ in range(RESPONSE):
            logprobs = model(tokens).logits[:, -1].float().log_softmax(-1)
            best = logprobs.argmax(-1, keepdim=True)
            drawn = torch.multinomial(logprobs.exp(), 1, generator=generator) if generator else best
            tokens = torch.cat((tokens, drawn), dim=1)
            chosen.append(logprobs.gather(1, drawn))
    return tokens[:, -RESPONSE:].numpy(), torch.cat(chosen, dim=1).numpy()


def _cut(tokens):
    """(N, RESPONSE) -> (N,) length of each response, with its stop token."""
    stopped = tokens == STOP
    return np.where(stopped.any(1), stopped.argmax(1) + 1, RESPONSE)


def _accuracy(model, rows):
    tokens, _ = _generate(model, [prompt for prompt, _ in rows])
    return float(np.mean([found.tolist() == answer for found, (_, answer) in zip(tokens, rows, strict=True)]))


def _rollout(model, rows, iteration):
    import torch

    prompts = [prompt for prompt, _ in rows for _ in range(SAMPLES)]
    answers = [answer for _, answer in rows for _ in range(SAMPLES)]
    tokens, logprobs = _generate(model, prompts, torch.Generator().manual_seed(iteration))
    lengths = _cut(tokens)
    kept = np.arange(RESPONSE) < lengths[:, None]
    whole = [[*prompt, *row[:size]] for prompt, row, size in zip(prompts, tokens.tolist(), lengths, strict=True)]
    return Samples(
        tokens=np.concatenate([np.array(one, dtype=np.int32) for one in whole]),
        prompt_lengths=np.array([len(prompt) for prompt in prompts]),
        response_lengths=lengths.astype(np.int64),
        engine_logprobs=logprobs[kept],
        rewards=np.array([row == answer for row, answer in zip(tokens.tolist(), answers, strict=True)], np.float32),
        groups=np.repeat(np.arange(len(rows)), SAMPLES).astype(np.int32),
        usable=np.ones(len(prompts), dtype=bool),
    )
