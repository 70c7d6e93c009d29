"""The objectives as pure functions of tensors."""
