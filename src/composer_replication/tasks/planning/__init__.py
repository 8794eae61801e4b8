"""What can be taken out of a repository? Found in its text, without running it."""
