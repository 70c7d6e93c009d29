"""An environment of `verifiers`, of two turns, some of whose parts fail as they are told to."""

import datasets
import openai
import verifiers as vf

NOBODY = "http://127.0.0.1:9/v1"


class Sums(vf.MultiTurnEnv):
    def __init__(self, fails, **more):
        super().__init__(max_turns=2, **more)
        self.fails = fails

    async def env_response(self, messages, state, **more):
        if self.fails == "sandbox":
            raise vf.SandboxError("the sandbox is gone")
        if self.fails == "call":
            raise vf.ToolParseError("no such call")
        return [{"role": "user", "content": "and"}]


def right(completion, answer):
    return float(completion[-1]["content"] == answer)


async def judged(judge, prompt, completion, answer, state):
    return float(await judge(prompt, completion, answer, state) == "yes")


def ranked(completions):
    return [1.0 for _ in completions]


def load_environment(fails=""):
    data = datasets.Dataset.from_list([{"question": "one", "answer": "two"}])
    rubric = vf.Rubric(funcs=[ranked if fails == "group" else right])
    if fails == "judge":
        rubric = vf.JudgeRubric(judge_client=openai.AsyncOpenAI(base_url=NOBODY, api_key="none", max_retries=0))
        rubric.add_reward_func(judged)
    return Sums(fails, dataset=data, rubric=rubric)
