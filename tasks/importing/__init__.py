"""Import of samples made elsewhere, as runs that `ratchet retrain` selects from."""
