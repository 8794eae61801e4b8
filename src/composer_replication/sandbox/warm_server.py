"""The first process of a warm jail: starts commands on order and leaves none of their processes.

It runs inside, alone, with three descriptors: its source, the socket on which orders come
and a handle on the process that gives them; it ends with either of these two. It imports as
little as it can, for it is started often and takes memory as long as the jail.

Process 1 of a process namespace cannot be signalled from inside unless it wants to, all
orphans come to it, and its ``kill(-1)`` ends every other process at once, forks in flight
included. When ``waitpid`` then says that it has no child, nothing else lives there.

As root it keeps the effective user id 0 while its real one is that of the commands: they
start under it by ``POSIX_SPAWN_RESETIDS``, without a copy of this process, and can neither
trace this one nor open its descriptors. As an ordinary user it makes itself undumpable,
which has the same effect.

A message of the socket, which keeps their borders, begins with a kind (one byte):

    R  run, with four descriptors: a file with the number of arguments (four bytes, big-endian), then
       arguments and NAME=value, each ended by NUL; and its three streams.   Answer R: E or N, and a
       number (four bytes): the exit code (-N for signal N) of what has ended, the errno of what
       could not be started.
    K  kill what runs; its answer comes then. No answer of its own.
    U  its own first word: it takes orders.
"""

import _signal  # type: ignore[import-not-found]  # the public modules of both import a dozen others
import _socket
import os
import select
import sys

_NUM_DESCRIPTORS = 4
_PR_SET_DUMPABLE = 4
_SIGINT, _SIGKILL, _SIGCHLD = 2, 9, 17
_ALL_SIGNALS = [number for number in range(1, 65) if number not in (9, 19, 32, 33)]  # naming all is fastest
_NO_FILE, _NO_FORMAT, _NO_ACCESS, _NO_FOLDER, _INVALID = 2, 8, 13, 20, 22
_DESCRIPTOR_BYTES = 4


class Server:
    """Serves one jail until the socket or the process behind it is gone."""

    def __init__(self, orders: int, starter: int, user: int | None) -> None:
        self.orders = _socket.socket(fileno=orders)
        self.starter = starter
        self.user = user
        wake, wake_write = os.pipe()
        self.wake = os.dup2(wake, 0, inheritable=False)  # where nothing is read: descriptors may be few
        os.close(wake)
        os.set_blocking(self.wake, False)
        os.set_blocking(wake_write, False)
        _signal.signal(_SIGINT, _signal.SIG_DFL)
        _signal.signal(_SIGCHLD, lambda *_: None)
        _signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        self.poller = select.poll()
        for descriptor in (orders, starter, self.wake):
            self.poller.register(descriptor, select.POLLIN)

    def serve(self) -> None:
        """Take orders for ever."""
        self.orders.send(b"U")
        while True:
            if self.orders.fileno() not in self.ready():
                continue
            kind, descriptors = self.receive()
            if kind == b"R":
                self.orders.send(b"R" + self.run(descriptors))

    def ready(self) -> set[int]:
        """Wait; which descriptors have something. Ends this process with the one that gives orders."""
        found = {descriptor for descriptor, _ in self.poller.poll()}
        if self.starter in found:
            os._exit(0)
        if self.wake in found:
            os.read(self.wake, 4096)
        return found

    def receive(self) -> tuple[bytes, list[int]]:
        """One message, and the descriptors that came with it."""
        room = _socket.CMSG_SPACE(_NUM_DESCRIPTORS * _DESCRIPTOR_BYTES)
        kind, ancillary, _, _ = self.orders.recvmsg(1, room, _socket.MSG_CMSG_CLOEXEC)
        if not kind:
            os._exit(0)
        found: list[int] = []
        for _, _, data in ancillary:
            places = range(0, len(data), _DESCRIPTOR_BYTES)
            found += [int.from_bytes(data[at : at + _DESCRIPTOR_BYTES], sys.byteorder) for at in places]
        return kind, found

    def run(self, descriptors: list[int]) -> bytes:
        """Start a command, wait for its end, end what it left."""
        if len(descriptors) != _NUM_DESCRIPTORS:  # our own limits were changed: no honest answer from here
            os._exit(1)
        order, *streams = descriptors
        payload = os.read(order, os.stat(order).st_size)
        num_arguments = int.from_bytes(payload[:4], "big")
        fields = payload[4:].split(b"\0")[:-1]
        arguments = fields[:num_arguments]
        variables = dict(field.split(b"=", 1) for field in fields[num_arguments:])
        pid, problem = self.start(arguments, variables, streams)
        for descriptor in descriptors:
            os.close(descriptor)
        if pid == 0:
            return b"N" + problem.to_bytes(4, "big")
        code = None
        while code is None:
            if self.orders.fileno() in self.ready() and self.receive()[0] == b"K":
                _kill_all()
            code = _collected(pid)
        _kill_all()
        _collect_all()
        return b"E" + code.to_bytes(4, "big", signed=True)

    def start(
        self, arguments: list[bytes], variables: dict[bytes, bytes], streams: list[int]
    ) -> tuple[int, int]:
        """The process id of the command, or 0 and why not; found and started as a shell's ``exec`` does."""
        problem = _NO_FILE
        for program in _programs(arguments[0], variables):
            try:
                if b"/" not in arguments[0] and not os.access(program, os.X_OK):
                    problem = _NO_ACCESS if os.access(program, os.F_OK) else problem
                    continue
                return self.spawn(program, arguments, variables, streams), 0
            except ValueError:
                return 0, _INVALID
            except OSError as error:
                if error.errno == _NO_FORMAT:
                    script = [b"/bin/sh", program, *arguments[1:]]
                    return self.spawn(script[0], script, variables, streams), 0
                if error.errno not in (_NO_FILE, _NO_FOLDER, _NO_ACCESS):
                    return 0, error.errno or _INVALID
                problem = _NO_ACCESS if error.errno == _NO_ACCESS else problem
        return 0, problem

    def spawn(
        self, program: bytes, arguments: list[bytes], variables: dict[bytes, bytes], streams: list[int]
    ) -> int:
        """One new process, in a session of its own, with these streams and nothing else of ours."""
        return os.posix_spawn(
            program,
            arguments,
            variables,
            file_actions=[(os.POSIX_SPAWN_DUP2, stream, place) for place, stream in enumerate(streams)],
            setsid=True,
            setsigmask=(),
            setsigdef=_ALL_SIGNALS,
            resetids=self.user is not None,
        )


def _programs(name: bytes, variables: dict[bytes, bytes]) -> list[bytes]:
    if b"/" in name or not name:
        return [name] if name else []
    return [(folder or b".") + b"/" + name for folder in variables.get(b"PATH", b"").split(b":")]


def _collected(pid: int) -> int | None:
    """Take the exit codes of all that is dead; that of ``pid``, or None while it lives."""
    found = None
    while True:
        try:
            dead, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return found
        if dead == 0:
            return found
        if dead == pid:
            found = os.waitstatus_to_exitcode(status)


def _kill_all() -> None:
    try:
        os.kill(-1, _SIGKILL)
    except ProcessLookupError:
        return  # nobody is there


def _collect_all() -> None:
    """Wait until the kernel says that nobody is left."""
    while True:
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


def _shut(user: int | None, tree: str) -> None:
    """Go to the tree and close ourselves to the commands, which run under our own (real) user id."""
    if user is not None:
        os.setgroups([])
        os.setresgid(user, 0, 0)
        os.setresuid(user, user, 0)
        os.chdir(tree)  # which is open to nobody but that user
        os.setresuid(user, 0, 0)
        return
    os.chdir(tree)
    import ctypes

    library = ctypes.CDLL(None, use_errno=True)
    if library.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "the process cannot be made undumpable")


def main() -> None:
    """Arguments: this source, the socket, the handle, the user id of the commands or ``-``, the tree."""
    orders, starter = int(sys.argv[2]), int(sys.argv[3])
    user = None if sys.argv[4] == "-" else int(sys.argv[4])
    for name in os.listdir("/proc/self/fd"):
        if int(name) > 2 and int(name) not in (orders, starter):
            try:
                os.close(int(name))
            except OSError:
                continue  # the listing itself
    for descriptor in (orders, starter):
        os.set_inheritable(descriptor, False)
    _shut(user, sys.argv[5])
    Server(orders, starter, user).serve()


if __name__ == "__main__":
    main()
