"""A token-exact endpoint: an OpenAI-compatible server over the engines of a run, with a session for each trajectory."""
