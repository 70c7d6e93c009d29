"""The harness of the bench of conversations: an OpenAI client that waits for its tool after each answer."""

import asyncio
import random
from collections.abc import Mapping
from typing import Any

import openai


async def drive(
    base_url: str,
    api_key: str,
    record: Mapping[str, Any],
    seed: int,
    turns: int,
    wait_s: float,
    told: int,
    words: int,
) -> float:
    """Ask `turns` times, with `told` random words of the first `words` as the question and as each result of a tool."""
    draw = random.Random(record["id"])

    def said(role: str) -> dict[str, Any]:
        return {"role": role, "content": " ".join(f"w{draw.randrange(words)}" for _ in range(told))}

    messages: list[Any] = [said("user")]
    plain = openai.DefaultAsyncHttpxClient(
        verify=False
    )  # the certificates that it would load take longer than all requests
    async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key, http_client=plain) as client:
        for turn in range(turns):
            found = await client.chat.completions.create(model="policy", messages=messages)
            if turn + 1 < turns:
                await asyncio.sleep(wait_s)
                messages += [{"role": "assistant", "content": found.choices[0].message.content}, said("tool")]
    return 1.0
