"""The built-in engine: vLLM as a server of requests, and the reception of weights inside it. Only
`tasks/engine/start.py` imports this folder, and nothing outside it imports vLLM."""

from typing import Literal

Runner = Literal["first", "second"]
"""The model runner of vLLM. The second one runs on cards only."""
STOP_TEXTS = "stop"
"""Name of a request's stop texts among the arguments that vLLM passes on unread."""
BEGUN = "begun"
"""That of the number of tokens at the end of its prompt that are the beginning of its response."""
EVERY = "every"
"""That of the tokens and seconds after which it is told while it goes on; None if it is not."""
ROUTES = "ratchet_routes"
"""Name of `EngineSpec.routes` in vLLM's `additional_config`."""
ADAPTER = "ratchet_adapter"
"""That of `EngineSpec.adapter`, as JSON."""
