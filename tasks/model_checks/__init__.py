"""Checks that a model can be trained and served, from its files, before Ray, vLLM or Megatron is imported."""
