"""A committed stage as later stages see it: its own type, and typed facts."""

from dataclasses import dataclass

from pydantic import ValidationError

from storage.errors import SchemaMismatch, StorageError
from storage.manifest import Manifest, Part
from trainer_core.state.facts import STATE_SCHEME, StateIdentity

IDENTITY = "state"
"""Name of the fact that identifies a train state by what it holds."""


@dataclass(frozen=True)
class View:
    """The manifest of one stage. One subclass per stage, so that swapped inputs are a type error."""

    manifest: Manifest

    @property
    def digest(self) -> str:
        """Identity of the stage's result."""
        return self.manifest.digest

    def _number(self, fact: str) -> int:
        value = self.manifest.facts.get(fact)
        if not isinstance(value, int):
            raise self._unexpected(fact, "a whole number")
        return value

    def _text(self, fact: str) -> str:
        value = self.manifest.facts.get(fact)
        if not isinstance(value, str):
            raise self._unexpected(fact, "a text")
        return value

    def _numbers(self, fact: str) -> list[int]:
        found = self.manifest.facts.get(fact)
        numbers = [one for one in found if isinstance(one, int)] if isinstance(found, list) else None
        if numbers is None or not isinstance(found, list) or len(numbers) != len(found):
            raise self._unexpected(fact, "a list of whole numbers")
        return numbers

    def _unexpected(self, fact: str, kind: str) -> StorageError:
        one = self.manifest
        return StorageError(
            f"{one.stage} of iteration {one.iteration} of run {one.run} records {one.facts.get(fact)!r} as {fact}, but "
            f"{kind} is expected: another program wrote this manifest; `ratchet verify` shows what else is wrong"
        )


@dataclass(frozen=True)
class Performed:
    """A finished stage, and whether it was committed before."""

    view: View
    reused: bool
    pending: bool = False
    """True while the outbox is still to publish its manifest."""


@dataclass(frozen=True)
class Prepared(View):
    """Model directory and prompt tables, as parts."""

    @property
    def stop_tokens(self) -> tuple[int, ...]:
        """Token ids that end a response."""
        return tuple(self._numbers("stop_tokens"))

    @property
    def left_out_tokens(self) -> tuple[int, ...]:
        """Token ids that texts of responses lack."""
        return tuple(self._numbers("left_out_tokens"))

    @property
    def train_rows(self) -> tuple[int, ...]:
        """Training prompts of each source, in the order of the table."""
        return tuple(self._numbers("train_rows"))


@dataclass(frozen=True)
class Rollouts(View):
    """Samples of one iteration."""

    @property
    def cursor(self) -> int:
        """Prompts drawn since the run began, these included."""
        return self._number("cursor")

    @property
    def weight_version(self) -> int:
        """Version that sampled them."""
        return self._number("weight_version")


@dataclass(frozen=True)
class Rewards(View):
    """Scores of the samples of one iteration."""


@dataclass(frozen=True)
class Trained(View):
    """A train state."""

    @property
    def identity(self) -> StateIdentity:
        """Digests of what the state holds.

        Raises:
            SchemaMismatch: a later version made it, by other rules.
            StorageError: it is recorded in another way.
        """
        try:
            found = StateIdentity.model_validate(self.manifest.facts.get(IDENTITY))
        except ValidationError:
            raise self._unexpected(IDENTITY, "the identity of a state") from None
        if found.scheme > STATE_SCHEME:
            raise SchemaMismatch(
                f"the state of iteration {self.manifest.iteration} of run {self.manifest.run} is identified by the "
                f"rules {found.scheme}; this version of Ratchet knows those up to {STATE_SCHEME}. Use a newer Ratchet"
            )
        return found

    @property
    def cursor(self) -> int:
        """Prompts that were consumed: drawn, and trained on."""
        return self._number("cursor")


@dataclass(frozen=True)
class Served(View):
    """Weights that every engine holds, proven."""

    @property
    def cursor(self) -> int:
        """Prompts consumed by the training that made the weights."""
        return self._number("cursor")

    @property
    def weight_version(self) -> int:
        """The iteration whose training made the weights."""
        return self._number("weight_version")

    @property
    def weights_digest(self) -> str:
        """Identity of all weights together."""
        return self._text("weights_digest")


@dataclass(frozen=True)
class Evaluated(View):
    """Greedy answers to held-out prompts."""


@dataclass(frozen=True)
class Selected(View):
    """Stored samples to train on, in shares of whole prompt groups."""

    @property
    def shares(self) -> tuple[Part, ...]:
        """The tables of samples, in order: an iteration trains on one."""
        return tuple(part for part in self.manifest.parts if part.rows is not None)

    @property
    def temperature(self) -> float:
        """At which the samples were drawn."""
        found = self.manifest.facts.get("temperature")
        if not isinstance(found, int | float):
            raise self._unexpected("temperature", "a number")
        return float(found)


@dataclass(frozen=True)
class Rescored(View):
    """New scores of selected samples: for each share a table with its rows."""

    def of(self, share: int) -> Part:
        """The scores of a share."""
        return self.manifest.parts[share]
