"""The rollout engine: its protocol, the built-in one in `vllm`, and engines of the user's own."""
