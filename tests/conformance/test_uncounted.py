"""What no limit of the kernel counts for an ordinary jail, and we do: buffers of sockets, files that are on their way."""

from __future__ import annotations

from pathlib import Path

import pytest

from composer_replication.records import Limits, SandboxSpec
from composer_replication.sandbox import choose_backend
from composer_replication.sandbox.conformance.programs import LONG_SECONDS, MIB, python

FILL = """
import socket, time
kept = []
for number in range({num}):
    pair = socket.socketpair()
    for end in pair:
        end.setblocking(False)
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 18)
    for end in pair[:{num_writers}]:
        try:
            while True: end.send(bytes(1 << 16))
        except BlockingIOError: pass
    {close}
    kept.append(pair)
time.sleep({seconds})
print('whole')
"""


@pytest.mark.long
@pytest.mark.parametrize(
    "changes", [{"num_writers": 2, "close": "pass"}, {"num_writers": 1, "close": "pair[0].close()"}]
)
@pytest.mark.parametrize("name", ["bubblewrap", "bubblewrap-warm", "sandlock"])
def test_buffers_of_sockets_count_as_memory(tmp_path: Path, name: str, changes: dict[str, object]) -> None:
    """Of closed senders, too: what they sent waits at the receiver."""
    backend = choose_backend(name)
    if not (check := backend.is_available()).ok:
        pytest.skip(f"{name} is not available here: {check.detail}")
    with backend.open(SandboxSpec(tmp_path, limits=Limits(memory_bytes=32 * MIB))) as sandbox:
        code = FILL.format(num=110, seconds=30, **changes)
        over = sandbox.exec(python(code), timeout_seconds=LONG_SECONDS)
        fits = sandbox.exec(python(FILL.format(num=10, seconds=0.3, **changes)), timeout_seconds=LONG_SECONDS)
    assert (over.out_of_memory, over.exit_code) == (True, 137), over
    assert (fits.exit_code, fits.stdout) == (0, "whole\n"), fits.stderr
