"""From stored tables to token batches."""
