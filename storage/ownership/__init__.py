"""Ownership of a run: the lease, and the life of its holder."""
