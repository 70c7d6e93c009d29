"""The Arrow schemas of stored tables. Field metadata gives the meaning and unit of each field."""

import pyarrow as pa

from storage.digest import value_digest
from storage.errors import SchemaMismatch

SCHEMA_VERSION = 1


def _field(name: str, kind: pa.DataType, meaning: str, unit: str = "", nullable: bool = False) -> pa.Field:
    return pa.field(name, kind, nullable=nullable, metadata={"meaning": meaning, "unit": unit})


def _schema(table: str, *fields: pa.Field) -> pa.Schema:
    return pa.schema(fields, metadata={"table": table, "version": str(SCHEMA_VERSION)})


PROMPTS = _schema(
    "prompts",
    _field("prompt_id", pa.string(), "id of the prompt in its dataset"),
    _field("prompt", pa.string(), "text of the prompt"),
    _field("prompt_tokens", pa.list_(pa.int32()), "token ids of the prompt", "token"),
    _field("answer", pa.string(), "solved answer, if the dataset has one", nullable=True),
    _field("answer_tokens", pa.list_(pa.int32()), "token ids of the answer with the stop token", "token", True),
    _field("record", pa.string(), "the dataset's whole record as JSON, which reward functions are given"),
)

TURN = pa.struct(
    [
        _field("role", pa.string(), "who wrote it: assistant for the policy, else environment, tool or user"),
        _field("begin", pa.int32(), "place of its first token in response_tokens", "token"),
        _field("end", pa.int32(), "place after its last token", "token"),
        _field(
            "finish_reason",
            pa.string(),
            "how the engine ended it: stop, length or abort; null if not sampled",
            "",
            True,
        ),
        _field("calls", pa.string(), "calls of tools that were read in it, as JSON", nullable=True),
        _field("results", pa.string(), "results of tools that it shows, as JSON", nullable=True),
        _field("seconds", pa.float32(), "time that the environment took for it, if it was measured", "s", True),
        _field("cost", pa.float32(), "cost of it, in the unit of the environment, if there is any", nullable=True),
    ]
)
"""One turn of a sample. Turns follow one another without a gap from the first token of the response to its last."""

ROLLOUT = _schema(
    "rollout",
    _field("run", pa.string(), "id of the run"),
    _field("iteration", pa.int32(), "iteration that sampled it"),
    _field("prompt_id", pa.string(), "id of the prompt in its dataset"),
    _field("sample_id", pa.int32(), "number of the sample within its prompt group, from 0"),
    _field("position", pa.int64(), "place in the drawing of prompts since the run began, from 0; -1 if not known"),
    _field("again", pa.int32(), "how often that place was drawn before, 0 the first time"),
    _field("prompt_tokens", pa.list_(pa.int32()), "token ids given to the engine", "token"),
    _field(
        "response_tokens", pa.list_(pa.int32()), "token ids after the prompt, of all turns, with stop tokens", "token"
    ),
    _field(
        "sampled",
        pa.list_(pa.bool_()),
        "whether the policy sampled the token; one that it did not sample counts in no loss and no length",
    ),
    _field(
        "logprobs",
        pa.list_(pa.float32()),
        "engine's log-probability of each token under the distribution it was sampled from; 0 where not sampled",
        "nat",
    ),
    _field(
        "weight_version",
        pa.list_(pa.int32()),
        "iteration whose weights sampled the token; -1 where not sampled or not known",
    ),
    _field("turns", pa.list_(TURN), "turns of the response; a plain answer is one of the assistant"),
    _field("seed", pa.int64(), "seed of this sample"),
    _field("temperature", pa.float32(), "sampling temperature"),
    _field("top_p", pa.float32(), "nucleus mass"),
    _field("top_k", pa.int32(), "likeliest tokens that could be drawn; 0 for all"),
    _field("min_p", pa.float32(), "least probability of a drawn token, relative to the likeliest; 0 for any"),
    _field("max_tokens", pa.int32(), "limit on response tokens", "token"),
    _field(
        "routes",
        pa.large_binary(),
        "experts that the engine gave each token of prompt and response but the last, one token after another: of "
        "each layer with experts, one byte each, two from 257 experts on; null if they were not asked for",
        nullable=True,
    ),
)

BRANCHES = "branches.arrow"
"""Name of the part of a rollout with the other branches of its samples: rows of the table `rollout`, in the order of
the samples that they are of."""

_REASON = _field(
    "reason",
    pa.string(),
    "why there is no score: exception, exit (of its process), no_number, non_finite or timeout; null if there is one",
    nullable=True,
)
_COMPONENTS = _field(
    "components", pa.map_(pa.string(), pa.float32()), "named numbers that the reward is made of, if any", nullable=True
)
_SCORE = (
    _field("reward", pa.float32(), "score; null unless status is ok", nullable=True),
    _field("status", pa.string(), "ok, error (the function raised) or timeout (deadline passed)"),
    _field("detail", pa.string(), "the exception, or empty", nullable=True),
    _REASON,
    _COMPONENTS,
)

_OF_SAMPLE = (
    _field("prompt_id", pa.string(), "id of the prompt in its dataset"),
    _field("sample_id", pa.int32(), "number of the sample within its prompt group"),
)

REWARD = _schema("reward", *_OF_SAMPLE, *_SCORE)

TEACHER = _schema(
    "teacher",
    *_OF_SAMPLE,
    _field(
        "logprobs",
        pa.list_(pa.float32()),
        "teacher's log-probability of each token that the policy sampled; 0 if the sample is not usable",
        "nat",
    ),
)

TEACHER_TOP = _schema(
    "teacher_top",
    *TEACHER,
    _field(
        "top_tokens",
        pa.list_(pa.int32()),
        "the k tokens that the teacher finds likeliest in the place of each of these, k after k, the likeliest first",
    ),
    _field(
        "top_logprobs", pa.list_(pa.float32()), "teacher's log-probabilities of these, under the whole softmax", "nat"
    ),
)

TRAINER = _schema(
    "trainer",
    *_OF_SAMPLE,
    _field(
        "logprobs",
        pa.list_(pa.float32()),
        "trainer's log-probability, before the iteration's updates, of each token that the policy sampled; null if "
        "the sample was not trained on",
        "nat",
        nullable=True,
    ),
)

EVALUATION = _schema(
    "evaluation",
    _field("prompt_id", pa.string(), "id of the held-out prompt"),
    _field("response_tokens", pa.list_(pa.int32()), "greedy answer, with the stop token", "token"),
    *_SCORE,
)

SELECTION = _schema(
    "selection",
    *ROLLOUT,
    _field("revision", pa.int32(), "revision of the rollout that it is from"),
    _field("source", pa.int32(), "number of that rollout among the sources of the selection, from 0"),
    _field("group", pa.int64(), "number of its prompt group within the selection: one prompt of one rollout"),
    _field("reward", pa.float32(), "score; null if it has none", nullable=True),
    _field("status", pa.string(), "ok, error or timeout, as in the reward table; null if not scored", nullable=True),
    _REASON,
    _COMPONENTS,
)

EVALUATION_SAMPLES = _schema(
    "evaluation_samples",
    _field("run", pa.string(), "run whose weights answered"),
    _field("iteration", pa.int32(), "iteration whose weights answered"),
    _field("prompt_id", pa.string(), "id of the prompt in its dataset"),
    _field("source", pa.string(), "data source of the prompt"),
    _field("greedy", pa.bool_(), "whether this is the greedy answer"),
    _field("sample_id", pa.int32(), "number of the answer among the sampled ones of its prompt; 0 if greedy"),
    _field("seed", pa.int64(), "seed of this answer; 0 if greedy"),
    _field("response_tokens", pa.list_(pa.int32()), "the answer, with the stop token", "token"),
    _field("finish_reason", pa.string(), "stop or length"),
    *_SCORE,
)


def fingerprint(schema: pa.Schema) -> str:
    """Identity of a schema: names, types, nullability, meaning. Arrow casts silently, so readers compare this."""
    fields = [[f.name, str(f.type), f.nullable, _text(f.metadata)] for f in schema]
    return value_digest([fields, _text(schema.metadata)])


def check(schema: pa.Schema, expected: pa.Schema, where: str) -> None:
    """Refuse another schema than `expected`. Raises SchemaMismatch with the first field that differs, or both
    versions."""
    if schema.equals(expected, check_metadata=True):
        return
    if _table(schema) == _table(expected) and _version(schema) != _version(expected):
        raise SchemaMismatch(
            f"{where} was written by version {_version(schema)} of table {_table(expected)!r}; this Ratchet reads "
            f"version {_version(expected)}. Read it with the Ratchet that wrote it"
        )
    for mine, theirs in zip(expected, schema, strict=False):
        if not mine.equals(theirs, check_metadata=True):
            raise SchemaMismatch(f"{where}: found field {theirs} where {mine} is expected")
    raise SchemaMismatch(f"{where}: fields {schema.names} with {_text(schema.metadata)}; expected {expected.names}")


def _table(schema: pa.Schema) -> str:
    return _text(schema.metadata).get("table", "")


def _version(schema: pa.Schema) -> str:
    return _text(schema.metadata).get("version", "0")


def _text(metadata: dict[bytes, bytes] | None) -> dict[str, str]:
    return {key.decode(): value.decode() for key, value in (metadata or {}).items()}
