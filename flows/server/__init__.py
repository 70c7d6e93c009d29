"""The Prefect server of one command."""
