"""The Megatron model over its ranks: layout, passes, optimizer, random generators."""
