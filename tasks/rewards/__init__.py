"""Rewards: functions `(prompt record, response text) -> score`, found by file, dotted name or entry point.

Functions that are not Ratchet's own run in processes of their own (`pool`, `worker`), never in the caller's.
"""
