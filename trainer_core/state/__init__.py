"""Train state on disk: saving, loading, reading and comparing it."""
