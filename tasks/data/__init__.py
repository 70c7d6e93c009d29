"""Prompts and their tokenizer: read, drawn, or generated."""
