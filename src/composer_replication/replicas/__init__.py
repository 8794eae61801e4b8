"""How do several trainers agree?

Each replica trains on its own for a while; then the replicas exchange what changed and
an outer optimiser joins it. Transports are chosen by name and imported only then.
"""
