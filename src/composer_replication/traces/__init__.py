"""What would others have done? Sessions are read, steps answered again by other models, and pairs kept where they part."""
