"""Form of the faults that `infra.mutants` puts in. A change that makes a promise adds the fault that would break it."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Mutant:
    """One fault."""

    name: str
    what: str
    """Description in words."""
    file: str
    before: str
    """Code that occurs once in the file."""
    after: str
    """Replacement of the code."""
    tests: tuple[str, ...]
    """Test files that should notice it."""
