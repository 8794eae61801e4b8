"""Can a container engine of this machine be the jail? Docker's and Podman's, over their API.

One container a command, on a socket of this machine, because the tree is mounted and not
copied. Nothing here is imported before ``docker`` or ``podman`` is chosen.
"""
