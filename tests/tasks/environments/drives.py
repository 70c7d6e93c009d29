"""Functions that drive conversations with the unmodified `openai` client."""

import asyncio
import sys

import openai


async def sums(base_url, api_key, record, seed, turns=3):
    """Say a sum after each answer; the reward is the length of the last one."""
    async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0) as client:
        messages = [{"role": "user", "content": record["prompt"]}]
        for turn in range(turns):
            found = await client.chat.completions.create(model="policy", messages=messages, temperature=0.5)
            messages += [found.choices[0].message, {"role": "user", "content": f"+{turn}{seed % 7}="}]
        return len(messages[-2].content)


async def failing(base_url, api_key, record, seed):
    """Fail after the first answer for some records."""
    reward = await sums(base_url, api_key, record, seed, turns=1)
    if seed % 2 == 0:
        raise ConnectionError("the sandbox is gone")
    return reward


async def tireless(base_url, api_key, record, seed):
    """Ask until it is refused."""
    return await sums(base_url, api_key, record, seed, turns=50)


async def impatient(base_url, api_key, record, seed):
    """Ask twice, and wait for the second answer no longer than for the first token of it."""
    async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0) as client:
        messages = [{"role": "user", "content": record["prompt"]}]
        found = await client.chat.completions.create(model="policy", messages=messages)
        messages += [found.choices[0].message, {"role": "user", "content": "+1="}]
        late = asyncio.ensure_future(client.chat.completions.create(model="policy", messages=messages))
        await asyncio.sleep(0.1)  # it is sent
        late.cancel()
        return 1.0


async def recovering(base_url, api_key, record, seed):
    """Go on with less after a refusal, and then fail."""
    async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0) as client:
        messages = [{"role": "user", "content": record["prompt"]}]
        try:
            await client.chat.completions.create(model="policy", messages=[{**messages[0], "content": "1+" * 200}])
        except openai.BadRequestError:
            await client.chat.completions.create(model="policy", messages=messages)
        raise ConnectionError("the sandbox is gone")


async def editing(base_url, api_key, record, seed):
    """Ask the second question twice, then forget the first answer; the reward is the length of the last one."""
    async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0) as client:

        async def ask(*messages):
            found = await client.chat.completions.create(model="policy", messages=messages, temperature=0.5)
            return found.choices[0].message

        first = {"role": "user", "content": record["prompt"]}
        second = {"role": "user", "content": f"+{seed % 7}="}
        answer = await ask(first)
        await ask(first, answer, second)
        await ask(first, answer, second)
        last = await ask({"role": "user", "content": "1+1="}, {"role": "assistant", "content": "2"}, first)
        return len(last.content)


async def textual(base_url, api_key, record, seed):
    """Return what is not a number."""
    await sums(base_url, api_key, record, seed, turns=1)
    return "good"


async def importing(base_url, api_key, record, seed):
    """Stream an answer; the reward is the number of modules that were imported for it, and of certificates."""
    before = set(sys.modules)
    async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        loaded = client._client._transport._pool._ssl_context.cert_store_stats()["x509"]
        given = {"model": "policy", "messages": [{"role": "user", "content": record["prompt"]}]}
        await client.chat.completions.create(**given)
        _ = [one async for one in await client.chat.completions.create(**given, stream=True)]
    return len(set(sys.modules) - before) + loaded


async def silent(base_url, api_key, record, seed):
    """Ask nothing."""
    return 1.0


async def strange(url, record):
    """Have another signature."""
