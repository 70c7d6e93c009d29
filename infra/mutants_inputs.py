"""Faults in what is read from files, prompts and samples, that `infra.mutants` knows."""

from infra.mutants_known import Mutant

_VALUES = ("tests/tasks/data/test_values.py",)
_REWARDS = ("tests/tasks/rewards/test_rewards.py",)

INPUTS = (
    Mutant(
        "answer-by-str",
        "an answer that is a list or a number with a point becomes the text that Python writes of it",
        "tasks/data/values.py",
        "    return str(value) if type(value) is int else None\n",
        "    return None if value is None else str(value)\n",
        _VALUES,
    ),
    Mutant(
        "gold-by-str",
        "a response is compared with what Python writes of an answer that is no text",
        "tasks/rewards/match.py",
        '    text = (text_of(record.get(field)) or "").strip()\n    if not text:\n',
        "    text = str(record.get(field)).strip()\n    if False:\n",
        _REWARDS,
    ),
    Mutant(
        "empty-answer-is-solved",
        "an empty field of a CSV is a solved answer: the model is trained to end at once",
        "tasks/data/rendering.py",
        "    return answer if answer.strip() else None\n",
        "    return answer\n",
        _VALUES,
    ),
    Mutant(
        "messages-as-text",
        "messages that are no JSON are given to the model as they are written",
        "tasks/data/rendering.py",
        "    if not _LIKE_MESSAGES.match(text):\n",
        '    if not text.lstrip().startswith("[{\\"role"):\n',
        _VALUES,
    ),
    Mutant(
        "nulls-of-columns",
        "tool calls have a null for each key that another row of the column has",
        "tasks/data/files.py",
        "without_nulls(one) if name in messages else one for",
        "one for",
        _VALUES,
    ),
    Mutant(
        "flaws-are-stored",
        "values that JSON or UTF-8 cannot hold are found by whoever meets them",
        "tasks/data/forms.py",
        "    if found is None:\n        return values\n",
        "    if found is None or values:\n        return values\n",
        _VALUES,
    ),
    Mutant(
        "key-twice",
        "of a key that an object has twice the last counts",
        "tasks/data/values.py",
        "    if len(found) < len(pairs):\n",
        "    if False:\n",
        _VALUES,
    ),
    Mutant(
        "column-twice",
        "of a field that a header has twice the last counts",
        "tasks/data/forms.py",
        "    if twice is not None:\n",
        "    if False:\n",
        _VALUES,
    ),
    Mutant(
        "suffix-of-a-url",
        "the name of a local file ends where a URL would have its query",
        "tasks/data/files.py",
        'if address.startswith(("http://", "https://")) else address\n',
        "if address else address\n",
        _VALUES,
    ),
    Mutant(
        "suffix-in-capitals",
        "TRAIN.CSV is read as JSONL",
        "tasks/data/forms.py",
        ".suffix.lower())\n\n\nclass LeftOut",
        ".suffix)\n\n\nclass LeftOut",
        _VALUES,
    ),
    Mutant(
        "codec-errors-escape",
        "what a codec raises about a damaged file ends the command with a traceback",
        "tasks/data/files.py",
        "    except Exception as error:  # noqa: BLE001 - whatever filesystems",
        "    except (OSError, ValueError) as error:  # whatever filesystems",
        _VALUES,
    ),
    Mutant(
        "no-answers-no-tokens",
        "a tokenizer of transformers is asked for the tokens of no text at all",
        "tasks/data/backends.py",
        "        if not texts:  # transformers asks for the type of the first\n            return []\n",
        "",
        _VALUES,
    ),
)
