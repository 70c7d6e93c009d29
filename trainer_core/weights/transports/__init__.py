"""Both ends of a channel: one module for each way in which bytes move."""
