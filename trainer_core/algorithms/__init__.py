"""What is learned: objectives and the updates that they take."""
