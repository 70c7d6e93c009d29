"""Training phases: an iteration's samples, or examples, become optimizer updates."""
