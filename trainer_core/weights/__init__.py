"""Weights on their way to an engine: export, records, digests."""
