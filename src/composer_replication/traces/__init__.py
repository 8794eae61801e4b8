"""What would others have done?

Recorded sessions of other agents are read, each step is answered again by other
models, and where the answers part, a preference pair is kept.
"""
