"""An engine of few lines: the next token depends on the last one alone, by the rows of the model's output layer.

In the configuration: [engine]
                      function = "engine.py:LastToken"
"""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file

from ratchet import BaseEngine, EngineSpec, Response, Sampling

HEAD, INPUT = "lm_head.weight", "model.embed_tokens.weight"


class LastToken(BaseEngine):
    """Logits are the product of the last token's embedding and the output layer."""

    def __init__(self, spec: EngineSpec) -> None:
        super().__init__(spec)
        files = sorted(Path(spec.model_dir).glob("*.safetensors"))
        self._weights = {name: one for file in files for name, one in load_file(file, device=spec.device).items()}

    def parameters(self) -> Mapping[str, torch.Tensor]:
        """Every tensor of the model, also those that this engine does not compute with."""
        return self._weights

    def sample(self, prompts: Sequence[Sequence[int]], seeds: Sequence[int], sampling: Sampling) -> Sequence[Response]:
        """Token after token, with a generator for each response."""
        return [self._response(prompt, seed, sampling) for prompt, seed in zip(prompts, seeds, strict=True)]

    def logprobs(self, sequences: Sequence[Sequence[int]]) -> list[np.ndarray]:
        """(T - 1,) float32 for each sequence of T tokens."""
        return [np.array([self._next(last)[token] for last, token in pairwise(one)], np.float32) for one in sequences]

    def _next(self, last: int, temperature: float = 1.0) -> np.ndarray:
        """Log-probability of each token of the vocabulary, (V,) float32."""
        logits = self._weights[HEAD].float() @ self._weights[INPUT][last].float() / temperature
        return torch.log_softmax(logits, 0).cpu().numpy()

    def _response(self, prompt: Sequence[int], seed: int, sampling: Sampling) -> Response:
        random, tokens, logprobs = np.random.default_rng(seed), list(prompt[-1:]), list[float]()
        room = min(sampling.max_tokens, self.spec.max_model_len - len(prompt))
        while len(logprobs) < room and not (logprobs and tokens[-1] in sampling.stop_token_ids):
            known = self._next(tokens[-1], sampling.temperature or 1.0)
            likeliest, drawn = int(known.argmax()), int((known + random.gumbel(size=known.size)).argmax())
            tokens.append(drawn if sampling.temperature else likeliest)
            logprobs.append(float(known[tokens[-1]]))
        reason = "stop" if tokens[-1] in sampling.stop_token_ids else "length"
        return Response(tokens[1:], logprobs, reason)
