"""The trainer: Megatron models, losses, optimizer steps, train state and weight export, without Prefect or Ray."""
