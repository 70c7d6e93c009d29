"""Killing processes on purpose, and comparing what comes of it."""
