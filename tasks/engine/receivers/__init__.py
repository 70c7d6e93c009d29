"""An engine worker's end of a channel: one module for each transport."""
