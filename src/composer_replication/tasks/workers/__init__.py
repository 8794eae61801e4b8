"""Where is the heavy work of a build done? In its own process, or on the nodes of a Ray cluster."""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar

Result = TypeVar("Result")
Params = ParamSpec("Params")


class Workers:
    """Does work that is a function of its arguments alone (it reads no store and writes none): each call where it is made.

    The threads of the build are the workers then; ``RayPool`` has the nodes of a cluster do it.
    """

    def call(self, work: Callable[Params, Result], *args: Params.args, **options: Params.kwargs) -> Result:
        """What ``work(*args, **options)`` gives or raises; waits for it, in any thread."""
        return work(*args, **options)

    def interrupt(self) -> None:
        """Kill what is under way elsewhere; every waiting ``call`` raises ``SandboxFailure``.

        Nothing is, here; ``runs_interrupted`` kills the sandboxes of this process.
        """


OWN_THREADS = Workers()
