"""A policy that says what it is told to, over a model directory with a chat template that shows tools."""

import asyncio
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from tasks.data.tokenizer import TextCodec
from tasks.endpoint.server import Endpoint, Rules, serving
from tasks.engine.protocol import Sampling
from tasks.environments.rendering import Renderer
from tasks.environments.trajectory import Answer
from tests.tasks.data.chat_model import chat_model

TEMPLATE = (
    "{% if tools %}{{ '<|system|>' + tools | tojson + '<|end|>\n' }}{% endif %}"
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] }}"
    "{% for call in message['tool_calls'] or [] %}{{ '<tool_call>' + call['function'] | tojson + '</tool_call>' }}"
    "{% endfor %}{{ '<|end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
DROPPING = TEMPLATE.replace("message['content'] }}", "message['content'].split('</think>')[-1] }}")
HOW = Sampling(max_tokens=256, stop_token_ids=(2,))


class Policy:
    """A sampler; `asked` is the recording of what engines were asked."""

    def __init__(self, codec, says):
        self.codec, self.says, self.asked, self.busy = codec, says, [], 0

    async def sample(self, prompt, seed, sampling):
        said = self.says(self.codec.backend.decode([np.asarray(prompt).tolist()])[0], seed)
        # a token a letter: not as the tokenizer would write it
        tokens = [token for letter in said for token in self.codec.encode(letter)]
        tokens = np.array([*tokens, *self.ends(sampling)][: sampling.max_tokens], np.int32)
        self.busy += 1
        await asyncio.sleep(0.01)
        self.busy -= 1
        self.asked.append((np.asarray(prompt).tolist(), tokens.tolist(), seed, sampling))
        return Answer(tokens, np.full(len(tokens), -0.5, np.float32), "stop" if tokens[-1] == 2 else "length", 3)

    def ends(self, sampling):
        return sampling.stop_token_ids[:1]


class Stopping(Policy):
    """A policy whose answers end with a text, and without a stop token."""

    def ends(self, sampling):
        return ()


def codec_of(folder: Path, template: str = TEMPLATE):
    model = chat_model(folder, template=template, config={"eos_token_id": 2, "max_position_embeddings": 4096})
    return TextCodec.from_directory(model)


@contextmanager
def talking(codec, says, sampling="override", context=4096, policy=Policy, **more):
    """An endpoint over such a policy: the endpoint, the policy and the base URL."""
    policy = policy(codec, says)
    rules = Rules("policy", HOW, context, sampling)
    endpoint = Endpoint(policy, Renderer(codec, most=context), rules, **more)
    with serving(endpoint) as url:
        yield endpoint, policy, url


def check_rows(session, policy):
    """Each token that counts as sampled was sampled after exactly those before it, and each sampled one counts once."""
    asked = [(prompt, tokens) for prompt, tokens, _, _ in policy.asked]
    for branch in session.sampled:
        row, whole = branch.row.columns(), branch.row.tokens.tolist()
        first = len(branch.row.prompt)
        for turn in branch.row.turns:
            begin, end = turn["begin"], turn["end"]
            if row["sampled"][begin:end].any():
                assert row["sampled"][begin:end].all()
                asked.remove((whole[: first + begin], whole[first + begin : first + end]))
    assert not asked
