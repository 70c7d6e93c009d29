"""Flows that Prefect deployments start: a worker's process calls them, and a person reads what they say in the UI."""
