"""What did a recorded session say? One file a format: what its records look like, and how they become steps."""
