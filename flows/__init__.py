"""Top layer: sentences. A run as a Prefect flow, the command line, and what the person sees."""
