"""Can a pod of a cluster be the jail? One pod a sandbox, through the API server alone.

The tree travels as a tar file over ``exec`` and comes back after each command, so nothing is shared with
the node. Standard library; a kubeconfig in YAML needs PyYAML. Nothing here is imported before
``kubernetes`` is chosen.
"""
