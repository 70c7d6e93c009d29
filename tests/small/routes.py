"""A small engine that tells the experts by which it sampled."""

import numpy as np
import pyarrow as pa

from tasks.engine.protocol import ROUTES
from tests.small.growing import responses_of
from tests.small.workers import ROUTING, SmallEngine


class RoutedEngine(SmallEngine):
    """An engine whose experts depend on its weights and on the token, whoever has begun the response."""

    def collect(self, wait_s):
        prompts = {number: rows for number, rows, *_ in self._queued}
        found = super().collect(wait_s)
        finished = [one._replace(completions=self._told(one, prompts[one.number])) for one in found.finished]
        return found._replace(finished=finished)

    def _told(self, finished, prompts):
        responses = responses_of(finished.completions)
        rows = [np.append(prompt, one.tokens) for prompt, one in zip(prompts, responses, strict=True)]
        return finished.completions.append_column(ROUTES, pa.array(map(self._experts, rows), ROUTES.type))

    def _experts(self, tokens):
        """Bytes of the experts of each token but the last."""
        first = tokens[:-1] + int(self._digest[:4], 16)
        experts = [(first + place) % ROUTING.experts for place in range(ROUTING.layers * ROUTING.chosen)]
        return np.stack(experts, axis=1).astype(np.uint8).tobytes()
