"""Stages of an iteration and the processes that do their work: Ray and vLLM live here, Prefect in thin wrappers."""
