"""Origins of a run: its configuration, the environment, the code's version."""
