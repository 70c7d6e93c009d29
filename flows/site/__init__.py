"""A Prefect site on this machine: server, work pool, worker, deployments, automations."""
