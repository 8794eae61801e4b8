"""Where is the heavy work of a build done? In its own process, or on the nodes of a Ray cluster."""
