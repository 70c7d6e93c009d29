"""The rollout engine: vLLM, and receiving weights inside it."""
