"""Who drives a run: the lease, and whether its holder is alive."""
