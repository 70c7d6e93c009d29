"""Functions that drive conversations with the unmodified `openai` client."""

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
    """Return what is no number."""
    await sums(base_url, api_key, record, seed, turns=1)
    return "good"


async def silent(base_url, api_key, record, seed):
    """Ask nothing."""
    return 1.0


async def strange(url, record):
    """Have another signature."""
