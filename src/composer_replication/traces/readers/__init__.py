"""What did a recorded session say? Programs by what they are: what their records look like, and how they become steps."""
