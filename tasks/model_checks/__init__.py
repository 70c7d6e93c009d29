"""Whether a model can be trained and served, known from its files before Ray, vLLM or Megatron is imported."""
