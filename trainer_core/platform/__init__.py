"""Bringing Megatron up on CPU and GPU."""
