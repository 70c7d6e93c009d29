"""What a fault is that `infra.mutants` puts in. A change that makes a promise adds the fault that would break it."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Mutant:
    """One fault."""

    name: str
    what: str
    """In words."""
    file: str
    before: str
    """Code that occurs once in the file."""
    after: str
    """Its replacement."""
    tests: tuple[str, ...]
    """Test files that should notice it."""
