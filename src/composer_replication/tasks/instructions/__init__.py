"""What is asked for? A text from what is known without the deleted code."""
