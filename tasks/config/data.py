"""The table `[data]`: prompts."""

import string
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Discriminator, Field, Tag, field_validator, model_validator

from tasks.config.section import Section
from trainer_core.effects import no_effect
from trainer_core.marks import FILES, RUNTIME

Format = Literal["jsonl", "json", "csv", "tsv", "parquet"]


def _template(text: str) -> str:
    """A template, if it is one: a text with fields in braces and nothing more in them."""
    try:
        fields = [piece[1:] for piece in string.Formatter().parse(text) if piece[1] is not None]
    except ValueError as error:
        raise ValueError(f"{text!r} is not a template ({error}): write {{{{ and }}}} for braces themselves") from None
    if not fields or any(not name or form or conversion for name, form, conversion in fields):
        fact = f"{text!r}: put the name of a field in braces"
        raise ValueError(f"{fact}, such as {{question}}, and {{{{ for a brace itself")
    return text


Template = Annotated[str, AfterValidator(_template)]


class GeneratedAddition(Section):
    """Integer addition: prompts such as `47+38=`, answers such as `085`, all of equal width."""

    min_operand: int = Field(default=10, ge=0)
    """Smallest operand."""
    max_operand: int = Field(default=99, ge=1)
    """Largest operand."""
    held_out: int = Field(default=256, ge=1)
    """Prompts kept for evaluation; training sees neither them nor their commuted twins."""
    warmup: int = Field(default=0, ge=0)
    """Demonstrations for the supervised warm-up, on training prompts; at most one per prompt."""
    warmup_mistakes: float = Field(default=0.0, ge=0, le=1)
    """Share of the demonstrations that forget to carry, which RL has to correct."""

    @model_validator(mode="after")
    def _ordered(self) -> "GeneratedAddition":
        if self.warmup_mistakes and not self.warmup:
            raise ValueError(no_effect("warmup_mistakes", "with warmup = 0", 0.0))
        if self.min_operand > self.max_operand:
            raise ValueError(f"min_operand {self.min_operand} is above max_operand {self.max_operand}")
        return self


class DataSource(Section):
    """One source of prompts. What is not set here is as in `[data]`."""

    source: Annotated[str, FILES]
    """Path, pattern (`part-*.jsonl`) or URL of files, or the id of a data set of the hub (`org/name[@revision]`)."""
    name: str | None = None
    """Goes before the ids of its prompts if there are several sources; by default from `source`."""
    weight: float | None = Field(default=None, gt=0, le=10000)
    """Its share of the prompts that are drawn. If no source has one, each pass draws every prompt of all sources once;
    else a source without one has 1."""
    subset: Annotated[str | None, RUNTIME] = None
    """Configuration of a data set of the hub, such as `main`."""
    split: Annotated[str | None, RUNTIME] = None
    """Split of a data set of the hub; required for one."""
    format: Annotated[Format | None, RUNTIME] = None
    """Form of the files; by default the end of their names (.jsonl, .json, .csv, .tsv, .parquet), else JSONL. A .json
    file holds one array of records, or one record a line."""
    id_field: str | None = None
    """Field with the prompt's id."""
    prompt_field: str | None = None
    """Field with the prompt: a text, or messages."""
    answer_field: str | None = None
    """Field with the solved answer."""
    tools_field: str | None = None
    """Field with the tools that the model may call."""
    prompt: Template | None = None
    """Template of the prompt's text, over the record's fields."""
    system: str | None = None
    """System prompt."""
    chat: bool | None = None
    """Give a text to the model as a user's message."""
    leave_out: tuple[str, ...] | None = None
    """Fields that its records are without, for rewards too."""

    @field_validator("source")
    @classmethod
    def _named(cls, source: str) -> str:
        if not source:
            raise ValueError("source is empty: give a path, a URL or the id of a data set")
        return source

    @field_validator("name")
    @classmethod
    def _plain(cls, name: str | None) -> str | None:
        if name is not None and (not name or "/" in name):
            raise ValueError(f"name {name!r} goes before prompt ids, as name/id: give a text without '/'")
        return name

    @model_validator(mode="after")
    def _one_prompt(self) -> "DataSource":
        if self.prompt is not None and self.prompt_field is not None:
            raise ValueError(no_effect("prompt_field", "with prompt, which makes the prompt from the fields it names"))
        return self


def _listed(value: Any) -> Any:
    """`[data.train]` as one of `[[data.train]]`, and a text in a list as the source of a table."""
    if isinstance(value, str):
        return value
    tables = [value] if isinstance(value, dict) else list(value) if isinstance(value, list | tuple) else []
    if not tables:
        fact = f"{value!r} names no source"
        raise ValueError(f"{fact}: give a path, a URL, the id of a data set, or tables with a source")
    return [{"source": one} if isinstance(one, str) else one for one in tables]


Sources = Annotated[
    Annotated[str, Tag("text")] | Annotated[tuple[DataSource, ...], Tag("list")],
    Discriminator(lambda value: "text" if isinstance(value, str) else "list"),
    BeforeValidator(_listed),
]
"""One source by its path or URL, or tables with more about each."""


class DataSection(Section):
    """Prompts: one record for each, in JSONL, JSON, CSV or Parquet files or a data set of the hub; or generated."""

    train: Annotated[Sources | None, FILES] = None
    """Training prompts: path, pattern, URL or id of a data set; or `[[data.train]]` tables, one for each source."""
    held_out: Annotated[Sources | None, FILES] = None
    """Prompts for evaluation, in the same forms."""
    warmup: Annotated[Sources | None, FILES] = None
    """Solved examples for the supervised warm-up, in the same forms."""
    generate: GeneratedAddition | None = None
    """Generate an addition data set instead."""
    hold_out: int = Field(default=0, ge=0)
    """Split this many prompts off the training prompts for evaluation; neither an id nor a text is in both."""
    id_field: str = "id"
    """Field with the prompt's id, a text or an integer; a missing or empty one is replaced by the record's number."""
    prompt_field: str = "prompt"
    """Field with the prompt: a text, or messages (a list of tables with role and content, or JSON of it)."""
    answer_field: str = "answer"
    """Field with the solved answer, for the warm-up: a text, an integer or the assistant's message; if the last message
    of the prompt is the assistant's, that is the answer. "" if there is none, or if only rewards read it."""
    tools_field: str = "tools"
    """Field with the tools that the model may call, for the chat template: a list of tables, or JSON of it."""
    prompt: Template | None = None
    """Template of the prompt's text, over the record's fields: `"{question}\\nAnswer with a number."`."""
    system: str | None = None
    """System prompt, for messages that do not begin with one. A text becomes a user's message after it."""
    chat: bool = False
    """Give a text to the model as a user's message, by its chat template; else it is the whole prompt."""
    leave_out: tuple[str, ...] = ()
    """Fields that records are without, for rewards too: those with values that JSON does not have, such as dates."""
    accept: Annotated[tuple[Literal["blanks", "end"], ...], RUNTIME] = ()
    """Changes that the chat template may make to a trained turn, refused otherwise: `blanks`, it leaves those around
    the answer out; `end`, it closes the turn without a stop token, and the first stop token is trained instead."""
    download: Annotated[bool, RUNTIME] = False
    """Download data sets of the hub; otherwise only its cache on this machine is searched."""
    overlong: Literal["refuse", "drop"] = "refuse"
    """Prompts that leave no room for a response in the context are refused, or dropped and counted."""
    shuffle: bool = True
    """Give each pass over the prompts its own order (from the run's seed)."""

    @model_validator(mode="after")
    def _usable(self) -> "DataSection":
        if (self.train is None) == (self.generate is None):
            raise ValueError("give exactly one of data.train and data.generate")
        if self.prompt is not None and self.prompt_field != "prompt":
            why = "with data.prompt, which makes the prompt from the fields it names"
            raise ValueError(no_effect("data.prompt_field", why, "prompt"))
        if self.hold_out and (self.generate is not None or self.held_out is not None):
            other = "data.held_out" if self.generate is None else "data.generate.held_out"
            raise ValueError(f"data.hold_out = {self.hold_out} and {other} exclude each other: give one of them")
        return self

    @property
    def evaluates(self) -> bool:
        """True if there are held-out prompts."""
        return self.generate is not None or self.held_out is not None or self.hold_out > 0

    def sources(self, table: str) -> tuple[DataSource, ...]:
        """The sources of a table (train, held_out or warmup), each with what `[data]` says for all."""
        given = {"train": self.train, "held_out": self.held_out, "warmup": self.warmup}[table]
        listed = (DataSource(source=given),) if isinstance(given, str) else given or ()
        return tuple(self._complete(one) for one in listed)

    def _complete(self, one: DataSource) -> DataSource:
        names = ("id_field", "prompt_field", "answer_field", "tools_field", "prompt", "system", "chat", "leave_out")
        shared = {name: value for name, value in dict(self).items() if name in names}
        own = {name: value for name, value in dict(one).items() if value is not None}
        if "prompt_field" in own:
            shared["prompt"] = None  # its own field counts, not the template of all
        return one.model_copy(update={**shared, **own})
