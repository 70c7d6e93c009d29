"""Rewards: functions `(prompt record, response text) -> score`, found by file, dotted name or entry point."""
