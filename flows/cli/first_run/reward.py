"""The reward of this run. Change it as you like: what is not scored yet is scored by the new function."""


def score(record, response):
    """A number for one response.

    Args:
        record: the prompt's whole line in prompts.jsonl.
        response: the text that the model wrote.
    """
    if response == record["answer"]:
        return 1.0
    return 0.1 if response.isdigit() else 0.0
