"""Ways to the network: the host's loopback, the outside, unix sockets, netlink and raw sockets."""

from __future__ import annotations

from pathlib import Path

from benchmarks.escapes.attempt import Attempt, Outcome, family
from benchmarks.escapes.judges import contacted, pipe_reached, secret
from benchmarks.escapes.scene import Scene


def _host_link_seen(_: Scene, outcome: Outcome) -> str:
    """The hardware address of a real interface came out."""
    for place in Path("/sys/class/net").iterdir():
        address = (place / "address").read_text().strip()
        is_real = address and set(address) - set("0:") and place.name != "lo"
        if is_real and bytes.fromhex(address.replace(":", "")).hex().encode() in outcome.text():
            return f"the hardware address of {place.name} came out"
    return ""


def _token_seen(scene: Scene, outcome: Outcome) -> str:
    """The listing has a name that is in use outside: the suffix is not told."""
    names = [f"{scene.token}-{kind}".encode() for kind in ("s", "d", "p")]
    return "sockets of the host are listed" if any(name in outcome.text() for name in names) else ""


_TOLD_TWICE = "show('|'.join(line.split()[-1] for line in open('/proc/net/unix') if TOLD['token'] in line))"

ATTEMPTS: list[Attempt] = [
    *family(
        "network: the host's loopback",
        [
            (
                "TCP",
                "connect(socket.AF_INET, socket.SOCK_STREAM, ('127.0.0.1', TOLD['tcp_port']))",
                contacted("tcp"),
            ),
            (
                "UDP",
                "connect(socket.AF_INET, socket.SOCK_DGRAM, ('127.0.0.1', TOLD['udp_port']))",
                contacted("udp"),
            ),
            (
                "TCP over IPv6",
                "connect(socket.AF_INET6, socket.SOCK_STREAM, ('::1', TOLD['tcp6_port']))",
                contacted("tcp6"),
            ),
            (
                "the address 0.0.0.0",
                "connect(socket.AF_INET, socket.SOCK_STREAM, ('0.0.0.0', TOLD['tcp_port']))",
                contacted("tcp"),
            ),
            (
                "another address of 127/8",
                "connect(socket.AF_INET, socket.SOCK_DGRAM, ('127.9.9.9', TOLD['udp_port']))",
                contacted("udp"),
            ),
            (
                "an IPv4 address in IPv6",
                "connect(socket.AF_INET6, socket.SOCK_STREAM, ('::ffff:127.0.0.1', TOLD['tcp_port']))",
                contacted("tcp"),
            ),
            (
                "multipath TCP",
                "connect(socket.AF_INET, socket.SOCK_STREAM, ('127.0.0.1', TOLD['tcp_port']), 262)",
                contacted("tcp"),
            ),
            (
                "TCP fast open",
                "ours = socket.socket()\nours.sendto(b'hello', 0x20000000, ('127.0.0.1', TOLD['tcp_port']))",
                contacted("tcp"),
            ),
        ],
    ),
    *family(
        "network: outside",
        [
            (
                "an address of this machine, TCP",
                "connect(socket.AF_INET, socket.SOCK_STREAM, (TOLD['host'], TOLD['host_tcp_port']))",
                contacted("host_tcp"),
            ),
            (
                "a question for a name server",
                (
                    "question = bytes.fromhex('00070100000100000000000007657861') + b'mple\\x03com\\0\\0\\1\\0\\1'\n"
                    "socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(question, (TOLD['host'], TOLD['udp_port']))"
                ),
                contacted("udp"),
            ),
            (
                "broadcast",
                (
                    "ours = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)\n"
                    "ours.setsockopt(socket.SOL_SOCKET, socket.SO_BROADCAST, 1)\n"
                    "ours.sendto(b'hello', ('127.255.255.255', TOLD['udp_port']))"
                ),
                contacted("udp"),
            ),
            (
                "bound to the host's interface",
                (
                    "ours = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)\n"
                    "for name in (b'eth0', b'lo'):\n"
                    "    with suppress(OSError):\n"
                    "        ours.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, name)\n"
                    "        ours.sendto(b'hello', (TOLD['host'], TOLD['udp_port']))"
                ),
                contacted("udp"),
            ),
            (
                "many descriptors at once (sendmmsg)",
                (
                    "ours = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)\n"
                    "ours.sendmsg([b'hel', b'lo'], [], 0, (TOLD['host'], TOLD['udp_port']))"
                ),
                contacted("udp"),
            ),
        ],
    ),
    *family(
        "unix sockets",
        [
            (
                "by path",
                "connect(socket.AF_UNIX, socket.SOCK_STREAM, TOLD['outside'] + '/s')",
                contacted("path"),
            ),
            (
                "datagrams by path",
                "connect(socket.AF_UNIX, socket.SOCK_DGRAM, TOLD['outside'] + '/d')",
                contacted("path_datagram"),
            ),
            (
                "through a link in the tree",
                "connect(socket.AF_UNIX, socket.SOCK_STREAM, 'door/s')",
                contacted("path"),
            ),
            (
                "by a relative path",
                "connect(socket.AF_UNIX, socket.SOCK_STREAM, os.path.relpath(TOLD['outside'] + '/s', TOLD['tree']))",
                contacted("path"),
            ),
            (
                "a hard link to it in the tree",
                "os.link(TOLD['outside'] + '/s', 'linked')\nconnect(socket.AF_UNIX, socket.SOCK_STREAM, 'linked')",
                contacted("path"),
            ),
            (
                "abstract",
                "connect(socket.AF_UNIX, socket.SOCK_STREAM, '\\0' + TOLD['token'] + '-s')",
                contacted("abstract"),
            ),
            (
                "abstract datagrams",
                "connect(socket.AF_UNIX, socket.SOCK_DGRAM, '\\0' + TOLD['token'] + '-d')",
                contacted("abstract_datagram"),
            ),
            (
                "abstract packets",
                "connect(socket.AF_UNIX, socket.SOCK_SEQPACKET, '\\0' + TOLD['token'] + '-p')",
                contacted("abstract_packets"),
            ),
            (
                "one that lies in a read-only folder",
                "connect(socket.AF_UNIX, socket.SOCK_STREAM, TOLD['shown'] + '/s')",
                contacted("shown"),
                {"has_way_out": True},
            ),
            (
                "a pipe that lies in a read-only folder",
                "os.write(os.open(TOLD['shown'] + '/pipe', os.O_WRONLY | os.O_NONBLOCK), b'hello')",
                pipe_reached,
                {"has_way_out": True},
            ),
        ],
    ),
    *family(
        "netlink and raw sockets",
        [
            (
                "the list of interfaces",
                (
                    "ours = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0)\n"
                    "ours.send(struct.pack('=IHHIIBxHiII', 32, 18, 0x301, 1, 0, 0, 0, 0, 0, 0))\n"
                    "ours.settimeout(1)\nshow(ours.recv(1 << 16).hex())"
                ),
                _host_link_seen,
            ),
            (
                "the addresses in /sys",
                (
                    "for name in os.listdir('/sys/class/net'):\n"
                    "    show(open(f'/sys/class/net/{name}/address').read().replace(':', ''))"
                ),
                _host_link_seen,
            ),
            (
                "the list of unix sockets by netlink",
                (
                    "ours = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 4)\n"
                    "ours.send(struct.pack('=IHHIIBBHIIIQ', 40, 20, 0x301, 1, 0, 1, 0, 0, 0xffffffff, 0, 1, 0))\n"
                    "ours.settimeout(1)\n"
                    "with suppress(TimeoutError):\n"
                    "    for _ in range(20):\n"
                    "        part = ours.recv(1 << 18)\n"
                    "        at = part.find(TOLD['token'].encode())\n"
                    "        while at >= 0:\n"
                    "            show(part[at:at + 60].split(b'\\0')[0] + b'|')\n"
                    "            at = part.find(TOLD['token'].encode(), at + 9)"
                ),
                _token_seen,
            ),
            ("the list of unix sockets in /proc", _TOLD_TWICE, _token_seen),
            (
                "listening on all packets",
                (
                    "ours = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3))\n"
                    "ours.settimeout(2)\nloud = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)\n"
                    "loud.sendto(b'hello', ('127.0.0.1', TOLD['udp_port']))\nshow(ours.recv(2000).hex())"
                ),
                contacted("udp"),
                {"only_for": "root"},
            ),
            (
                "a forged packet",
                (
                    "ours = socket.socket(socket.AF_INET, socket.SOCK_RAW, 17)\n"
                    "ours.sendto(struct.pack('!HHHH', 9, TOLD['udp_port'], 13, 0) + b'hello', ('127.0.0.1', 0))"
                ),
                contacted("udp"),
                {"only_for": "root"},
            ),
            (
                "the secret in the host's own packets",
                "show(open('/proc/net/packet').read() + open('/proc/net/raw').read())",
                secret,
                {"not_without_jail": "it is only a list without secrets there"},
            ),
        ],
    ),
]
