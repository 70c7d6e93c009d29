"""Token batches made from stored tables."""
