"""The built-in engine: vLLM. Nothing outside this folder imports vLLM."""
