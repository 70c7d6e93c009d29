"""A trainer rank's end of a channel: one module for each transport."""
