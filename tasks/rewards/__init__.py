"""Rewards: pure functions `(prompt record, response text) -> score`, found by entry point or dotted name."""
