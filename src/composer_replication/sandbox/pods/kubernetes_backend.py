"""Jails that are pods of a cluster.

The folder of this machine stays the truth between two commands: it is sent when it has changed, and is
what the pod's tree was after each command. So files and snapshots are those of every other jail.
Commands of one sandbox run one at a time, because ``kill -9 -1`` between them is what leaves nothing.
"""

from __future__ import annotations

import errno
import random
import shlex
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from io import BytesIO
from typing import IO
from urllib.parse import urlsplit

from composer_replication.errors import ComposerError, MissingError, SandboxFailure
from composer_replication.interfaces import Sandbox
from composer_replication.records import Check, ExecResult, FileEntry, SandboxSpec
from composer_replication.sandbox.call_checks import check_limits
from composer_replication.sandbox.jailed_tree import failure, to_result
from composer_replication.sandbox.local_sandbox import LocalSandbox
from composer_replication.sandbox.pods import pod_scripts
from composer_replication.sandbox.pods.api_client import ApiClient, ApiRefusal
from composer_replication.sandbox.pods.cluster_access import ClusterAccess, find_access
from composer_replication.sandbox.pods.pod_exec import ExecEnd
from composer_replication.sandbox.pods.pod_life import PodLife
from composer_replication.sandbox.pods.pod_manifest import PodSettings
from composer_replication.sandbox.pods.pod_plan import PodPlan
from composer_replication.sandbox.pods.pod_state import TASK
from composer_replication.sandbox.pods.tree_transfer import UnsafeTreeError, pack_tree, unpack_tree
from composer_replication.sandbox.private_folders import folder_bytes
from composer_replication.sandbox.supervised_run import Ended, Looks, Verdict
from composer_replication.sandbox.user_ids import private_uid

_MEASURE_SECONDS = 0.5
_MEASURE_SHARE = 4  # looking may cost at most a quarter of the time: it is a request each
_COLLECT_SECONDS = 300.0
_EXIT_KILLED = 137
_MIB = 1 << 20
_POLICY_GROUP = "networking.k8s.io"
_RIGHTS = (
    *((verb, "pods", "", "") for verb in ("create", "get", "list", "delete")),
    *((verb, "pods", "exec", "") for verb in ("create", "get")),
    *((verb, "networkpolicies", "", _POLICY_GROUP) for verb in ("create", "get")),
)
"""What a role must allow: verb, resource, part of it, API group; docs/sandbox.md has the role."""


class Kubernetes:
    """The backend ``kubernetes``."""

    name = "kubernetes"
    keeps_routes = True
    """The network of a pod is closed by a policy that drops what is sent, not by a missing route."""

    def servers(self) -> list[tuple[str, str, int]]:
        """What answers in the cluster, for the self-test: its own server, by name, address and port.

        Raises:
            MissingError: no cluster (CR0330).
            OSError: the server's name has no address.
        """
        url = urlsplit((self._access or find_access()).server)
        address = socket.getaddrinfo(url.hostname, url.port or 443, type=socket.SOCK_STREAM)[0][4]
        return [("the server of the cluster", str(address[0]), int(address[1]))]

    def __init__(self, settings: PodSettings | None = None, access: ClusterAccess | None = None) -> None:
        self.settings = settings or PodSettings()
        self._access = access

    def is_available(self) -> Check:
        """May we make pods here and run commands in them? Asks the cluster; makes nothing."""
        try:
            refused = self._refused_rights()
        except ComposerError as error:
            return Check(self.name, False, error.message, error.fix)
        if refused:
            detail = f"the cluster does not allow us to {', '.join(refused)}."
            return Check(self.name, False, detail, "bind a role with these verbs; docs/sandbox.md has one")
        if not self.settings.image:
            return Check(
                self.name, False, "no image is named for the pods.", "export COMPOSER_RL_POD_IMAGE=IMAGE"
            )
        return Check(self.name, True, "the cluster lets us make pods and run commands in them.")

    def open(self, spec: SandboxSpec) -> Sandbox:
        """Make a pod and send ``spec``'s files into it.

        Raises:
            MissingError: no cluster (CR0330), or no image is named (CR0301).
            SandboxFailure: the cluster cannot be asked (CR0331) or refuses (CR0332, CR0333); the pod does not start
                (CR0334), is lost (CR0335) or cannot be filled (CR0336, CR0337); a path of the spec is missing (CR0304); the
                network policy there leaves something open (CR0883).
            UsageError: a limit that cannot be held (CR0882).
        """
        check_limits(spec.limits)
        if not self.settings.image:
            raise MissingError(
                "CR0301", "no image is named for the pods.", fix="export COMPOSER_RL_POD_IMAGE=IMAGE"
            )
        return KubernetesSandbox(spec, PodLife(self._client(), self.settings))

    def _client(self) -> ApiClient:
        return ApiClient(self._access or find_access())

    def _refused_rights(self) -> list[str]:
        client = self._client()
        namespace = self.settings.namespace or client.access.namespace
        refused = []
        for verb, resource, part, group in _RIGHTS:
            attributes = {"namespace": namespace, "verb": verb, "resource": resource, "subresource": part}
            attributes["group"] = group
            body = {
                "apiVersion": "authorization.k8s.io/v1",
                "kind": "SelfSubjectAccessReview",
                "spec": {"resourceAttributes": attributes},
            }
            try:
                answer = client.ask(
                    "POST", "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews", body=body
                )
            except ApiRefusal as error:
                raise error.as_failure("say what we may do") from error
            if not (answer.get("status") or {}).get("allowed"):
                refused.append(f"{verb} {resource}{'/' if part else ''}{part}")
        return refused


class KubernetesSandbox(LocalSandbox):
    """One pod around a copy of one tree."""

    def __init__(self, spec: SandboxSpec, life: PodLife) -> None:
        super().__init__(spec, None)
        self._life = life
        self._turn = threading.Lock()
        self._is_dirty = True
        self._baseline: pod_scripts.Measured | None = None
        self._next_measure = 0.0
        self._looks = Looks()
        uid = private_uid()
        try:
            self._jailed.write_accounts(uid, uid)
            self._plan = PodPlan(spec, self._jailed.scratch, life.claims)
            self._folders = [folder for name, folder in self._plan.writable() if name != "orders"]
            life.sweep()
            tree_bytes = folder_bytes((self._jailed.real_tree,))
            life.start(self._plan, self._jailed.limits, uid=uid, tree_bytes=tree_bytes)
        except BaseException:
            self.close()
            raise

    def read_file(self, path: str, *, max_bytes: int = 4 * _MIB) -> bytes:
        """As every jail; a running command is waited for."""
        with self._turn:
            return super().read_file(path, max_bytes=max_bytes)

    def write_file(self, path: str, data: bytes, *, is_executable: bool = False) -> None:
        """As every jail; a running command is waited for."""
        with self._turn:
            super().write_file(path, data, is_executable=is_executable)
            self._is_dirty = True

    def list_files(self, path: str = ".") -> list[FileEntry]:
        """As every jail; a running command is waited for."""
        with self._turn:
            return super().list_files(path)

    def restore(self, snapshot: str) -> None:
        """As every jail."""
        super().restore(snapshot)
        self._is_dirty = True

    def close(self) -> None:
        """Delete the pod, give the tree back; idempotent.

        Raises:
            SandboxFailure: the cluster did not delete it; its time limit will (CR0331, CR0332, CR0333).
        """
        try:
            super().close()
        finally:
            if sys.exc_info()[0] is None:
                self._life.delete()
            else:  # what was raised first says more, and the pod's time limit ends it
                with suppress(SandboxFailure):
                    self._life.delete()

    def _run(
        self, argv: list[str], environment: Mapping[str, str], stdin: bytes, timeout_seconds: float
    ) -> ExecResult:
        marker = f"<{random.randbytes(16).hex()}>"  # noqa: S311  tells lines apart, guards nothing
        limits = self._jailed.limits
        data = pod_scripts.orders(
            argv, environment, tree=self._jailed.real_tree, stdin=stdin, marker=marker, limits=limits
        )
        with self._turn:
            try:
                num_restarts = self._life.wait_until_ready().num_restarts
                self._send_tree()
                started = time.monotonic()
                end, verdict = self._command(data, len(marker), started + timeout_seconds, num_restarts)
                seconds = time.monotonic() - started
                verdict = self._collect(verdict)
            except BaseException:
                self._is_dirty = True
                with suppress(SandboxFailure, ApiRefusal):
                    self._kill()
                raise
        is_ended = verdict is Verdict.ENDED
        code = end.exit_code if is_ended and end.exit_code is not None else _EXIT_KILLED
        stdout, stderr = bytes(end.stdout), bytes(end.stderr)
        ended = Ended(verdict, code, stdout, stderr, end.truncated, seconds)
        return to_result(ended, marker.encode(), limits, backend=Kubernetes.name)

    def _send_tree(self) -> None:
        if not self._is_dirty:
            return
        with tempfile.TemporaryFile() as data:
            holes = "holes" if pack_tree(self._jailed.real_tree, data) else ""
            num_bytes = data.tell()
            data.seek(0)
            place = str(self._jailed.real_tree)
            self._life.send(TASK, pod_scripts.UNPACK_TREE, data, num_bytes, place, holes)
        if self._baseline is None:
            self._baseline = self._measured()
        self._is_dirty = False

    def _command(
        self, data: bytes, extra_bytes: int, deadline: float, num_restarts: int
    ) -> tuple[ExecEnd, Verdict]:
        argv = ["/bin/sh", "-c", pod_scripts.RUN_ORDERS, "sandbox", str(len(data))]
        self._next_measure = time.monotonic() + _MEASURE_SECONDS
        self._looks = Looks()
        try:
            end = self._life.exec_in(TASK).run(
                argv,
                deadline=deadline,
                stdin=BytesIO(data),
                keep_bytes=self._jailed.limits.output_bytes + extra_bytes,
                look=self._look,
            )
        except ApiRefusal as error:
            raise error.as_failure("run a command in the pod") from error
        except SandboxFailure as error:
            return ExecEnd(), self._verdict_of_cut(error, num_restarts)
        if end.stopped:
            return end, end.stopped
        if end.exit_code is None:
            return end, Verdict.TIMED_OUT
        if end.exit_code == _EXIT_KILLED and self._has_restarted(num_restarts):
            return end, Verdict.OVER_MEMORY
        return end, Verdict.ENDED

    def _verdict_of_cut(self, error: SandboxFailure, num_restarts: int) -> Verdict:
        """A connection that broke because the command used up its memory or disk is a result; any other is not."""
        if error.code == "CR0336":
            if self._life.is_over_own_disk_limit():
                return Verdict.OVER_DISK
            with suppress(SandboxFailure):
                if self._has_restarted(num_restarts):
                    return Verdict.OVER_MEMORY
        raise error

    def _has_restarted(self, num_restarts: int) -> bool:
        state = self._life.state()
        return state.is_out_of_memory and (state.num_restarts > num_restarts or state.kind != "ready")

    def _look(self) -> Verdict | None:
        if time.monotonic() < self._next_measure:
            return None
        started = time.monotonic()
        verdict = self._verdict_of(self._measured())
        cost = time.monotonic() - started
        self._next_measure = time.monotonic() + max(_MEASURE_SECONDS, _MEASURE_SHARE * cost)
        return None if verdict is Verdict.ENDED else verdict

    def _measured(self) -> pod_scripts.Measured | None:
        """None where it cannot be measured now: the command may kill the one who looks."""
        with suppress(SandboxFailure, ApiRefusal):
            end = self._shell(pod_scripts.measure(self._folders))
            if end.exit_code == 0:
                return pod_scripts.Measured.of(end.stdout.decode(errors="replace"))
        return None

    def _verdict_of(self, measured: pod_scripts.Measured | None) -> Verdict:
        before = self._baseline
        if measured is None or before is None:
            return Verdict.ENDED
        if measured.num_oom_kills > before.num_oom_kills:
            self._baseline = replace(before, num_oom_kills=measured.num_oom_kills)
            return Verdict.OVER_MEMORY
        if self._looks.are_hiding(are_hidden=measured.are_files_hidden):
            return Verdict.HIDES_FILES
        is_over = measured.used_bytes - before.used_bytes > self._jailed.limits.disk_bytes
        return Verdict.OVER_DISK if is_over else Verdict.ENDED

    def _shell(self, script: str, sink: Callable[[bytes], None] | None = None) -> ExecEnd:
        deadline = time.monotonic() + _COLLECT_SECONDS
        return self._life.exec_in(TASK).run(["/bin/sh", "-c", script], deadline=deadline, sink=sink)

    def _kill(self) -> None:
        self._shell(pod_scripts.kill_and_open(self._folders))

    def _collect(self, verdict: Verdict) -> Verdict:
        """Kill what is left, and make the folder of this machine what the pod's tree is now."""
        if verdict is Verdict.OVER_DISK and self._life.is_over_own_disk_limit():
            self._is_dirty = True  # the pod is lost, and the tree with it
            return verdict
        if verdict is Verdict.OVER_MEMORY:
            self._life.wait_until_ready()
        try:
            self._kill()
        except ApiRefusal as error:
            raise error.as_failure("end what a command left") from error
        if verdict is Verdict.ENDED:
            verdict = self._verdict_of(self._measured())
        limit = (self._baseline.used_bytes if self._baseline else 0) + self._jailed.limits.disk_bytes
        with tempfile.TemporaryFile() as data:
            is_whole = self._receive(data, 2 * limit + 64 * _MIB)
            data.seek(0)
            try:
                if is_whole:
                    unpack_tree(data, self._jailed.real_tree)
                self._is_dirty = not is_whole
            except OSError as error:
                self._is_dirty = True
                if error.errno != errno.ENAMETOOLONG:
                    raise failure("CR0337", f"the tree of the pod cannot be kept: {error}.") from error
                is_whole = False
            except UnsafeTreeError as error:
                raise failure("CR0337", f"the tree of the pod cannot be kept: {error}.") from error
        return verdict if is_whole else Verdict.OVER_DISK

    def _receive(self, data: IO[bytes], most_bytes: int) -> bool:
        """The pod's tree; False when it is more than anything that was allowed."""
        script = f"set -- {shlex.quote(str(self._jailed.real_tree))}; {pod_scripts.PACK_TREE}"

        def sink(chunk: bytes) -> None:
            if data.tell() <= most_bytes:
                data.write(chunk)

        try:
            end = self._shell(script, sink)
        except ApiRefusal as error:
            raise error.as_failure("fetch the tree of the pod") from error
        if end.exit_code != 0:
            said = end.stderr.decode(errors="replace").strip()[-300:] or f"exit code {end.exit_code}"
            raise failure("CR0337", f"the tree of the pod cannot be fetched: {said}.")
        return data.tell() <= most_bytes
