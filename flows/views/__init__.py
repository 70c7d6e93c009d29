"""Views of a run for people."""
