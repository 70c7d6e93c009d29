"""Stores of bytes: a root, the protocol of its backend, local files, object stores."""
