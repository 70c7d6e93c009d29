"""What a run is made from: its configuration, the environment, the code's version."""
