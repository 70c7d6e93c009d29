"""A committed stage as later stages see it: its own type, and typed facts."""

from dataclasses import dataclass
from typing import Any

from pydantic import StrictFloat, StrictInt, StrictStr, TypeAdapter, ValidationError

from storage.errors import SchemaMismatch, StorageError
from storage.manifest import Manifest, Part
from trainer_core.state.facts import STATE_SCHEME, StateIdentity

ENVIRONMENT = "environment_source"  # name of the fact with the environment of a rollout, and the digest of its source
TRAINER_TABLE = "trainer.arrow"  # name of the part with the log-probabilities by the trainer, beside a train state
SCORES = "scores.json"  # name of the part with the rewards that environments gave
PLAYED = "played.json"  # name of the part with times and failures of conversations
IN_FLIGHT = "in-flight.arrow"  # name of the part with the responses that a rollout leaves to the next one
IDENTITY = "state"  # name of the fact that identifies a train state by what it holds


@dataclass(frozen=True)
class View:
    """The manifest of one stage. One subclass per stage, so that swapped inputs are a type error."""

    manifest: Manifest

    @property
    def digest(self) -> str:
        """Identity of the stage's result."""
        return self.manifest.digest

    def unexpected(self, fact: str, kind: str) -> StorageError:
        """The error of a fact that has another type."""
        one = self.manifest
        return StorageError(
            f"{one.stage} of iteration {one.iteration} of run {one.run} records {one.facts.get(fact)!r} as {fact}, but "
            f"{kind} is expected: another program wrote this manifest; `ratchet verify` shows what else is wrong"
        )


class Fact[T]:
    """A fact of a manifest under the name of the attribute, of one type."""

    def __init__(self, words: str, kind: Any) -> None:
        self._words, self._kind = words, TypeAdapter[T](kind)

    def __set_name__(self, owner: type[View], name: str) -> None:
        self._name = name

    def __get__(self, view: View, owner: type[View]) -> T:
        try:
            return self._kind.validate_python(view.manifest.facts.get(self._name))
        except ValidationError:
            raise view.unexpected(self._name, self._words) from None


_NUMBER, _NUMBERS = ("a whole number", StrictInt), ("a list of whole numbers", tuple[StrictInt, ...])


@dataclass(frozen=True)
class Performed:
    """A finished stage, and whether it was committed before."""

    view: View
    reused: bool
    pending: bool = False  # True while the outbox is still to publish its manifest


class Prepared(View):
    """Model directory and prompt tables, as parts."""

    cursor = Fact[int](*_NUMBER)  # prompts drawn: none
    stop_tokens = Fact[tuple[int, ...]](*_NUMBERS)  # token ids that end a response
    left_out_tokens = Fact[tuple[int, ...]](*_NUMBERS)  # token ids that texts of responses lack
    train_rows = Fact[tuple[int, ...]](*_NUMBERS)  # training prompts of each source, in the order of the table


class Rollouts(View):
    """Samples of one iteration."""

    cursor = Fact[int](*_NUMBER)  # prompts drawn since the run began, these included
    weight_version = Fact[int](*_NUMBER)  # weight version that generated the samples


class Rewards(View):
    """Scores of the samples of one iteration."""


class Trained(View):
    """A train state."""

    cursor = Fact[int](*_NUMBER)  # prompts that were consumed: drawn, and trained on

    @property
    def identity(self) -> StateIdentity:
        """Digests of what the state holds. Raises SchemaMismatch (a later version made it, by other rules) or
        StorageError (it is recorded in another way)."""
        try:
            found = StateIdentity.model_validate(self.manifest.facts.get(IDENTITY))
        except ValidationError:
            raise self.unexpected(IDENTITY, "the identity of a state") from None
        if found.scheme > STATE_SCHEME:
            raise SchemaMismatch(
                f"the state of iteration {self.manifest.iteration} of run {self.manifest.run} is identified by the "
                f"rules {found.scheme}; this version of Ratchet knows those up to {STATE_SCHEME}. Use a newer Ratchet"
            )
        return found


class Served(View):
    """Weights that every engine holds, proven."""

    weight_version = Fact[int](*_NUMBER)  # iteration whose training made the weights
    weights_digest = Fact[str]("a text", StrictStr)
    """Identity of all weights together."""


class Evaluated(View):
    """Greedy answers to held-out prompts."""


class Selected(View):
    """Stored samples to train on, in shares of whole prompt groups."""

    @property
    def shares(self) -> tuple[Part, ...]:
        """The tables of samples, in order: an iteration trains on one."""
        return self.manifest.tables

    temperature = Fact[float]("a number", StrictFloat)
    """Temperature at which the samples were drawn."""


class Rescored(View):
    """New scores of selected samples: for each share a table with its rows."""

    def of(self, share: int) -> Part:
        """The scores of a share."""
        return self.manifest.parts[share]
