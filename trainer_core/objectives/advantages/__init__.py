"""What a sample's reward is compared with: pure functions of numpy arrays, without torch."""
