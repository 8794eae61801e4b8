"""One pod from its creation to its deletion: made, filled, waited for, asked about, deleted."""

from __future__ import annotations

import secrets
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from typing import IO, Any

from composer_replication.errors import SandboxFailure
from composer_replication.records import Limits
from composer_replication.sandbox.jailed_tree import failure
from composer_replication.sandbox.pods import pod_scripts
from composer_replication.sandbox.pods.api_client import CONFLICT, NOT_FOUND, ApiClient, ApiRefusal
from composer_replication.sandbox.pods.pod_exec import PodExec
from composer_replication.sandbox.pods.pod_manifest import (
    LABEL,
    OWNER_LABEL,
    POLICY_NAME,
    PodSettings,
    difference_to_closed,
    network_policy,
    pod_manifest,
)
from composer_replication.sandbox.pods.pod_plan import PodPlan
from composer_replication.sandbox.pods.pod_state import (
    STAGE,
    PodState,
    is_over_own_disk_limit,
    state_of,
)

_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.05, 1.0
_NUM_NAMES = 5
_SEND_SECONDS = 600.0


class PodLife:
    """One pod. ``start`` makes it, ``delete`` ends it.

    Args:
        client: of the cluster.
        settings: of the cluster.
    """

    def __init__(self, client: ApiClient, settings: PodSettings) -> None:
        self._client = client
        self._settings = settings
        self.claims = settings.claims
        self._folder = f"/api/v1/namespaces/{settings.namespace or client.access.namespace}/pods"
        self.path = ""

    def exec_in(self, container: str) -> PodExec:
        return PodExec(self._client, self.path, container)

    def start(self, plan: PodPlan, limits: Limits, *, uid: int, tree_bytes: int) -> None:
        """Make the pod, send what it shows, wait until commands can run.

        Raises:
            SandboxFailure: the cluster cannot be asked (CR0331) or refuses (CR0332, CR0333), or the pod does not
                start (CR0334), is lost (CR0335), or cannot be filled (CR0336, CR0337); a policy under our name leaves
                something open (CR0883).
        """
        self._ensure_policy()
        with tempfile.TemporaryFile() as stage:
            plan.write_stage(stage)
            num_bytes = stage.tell()
            owner, owner_pod = f"composer-rl-{secrets.token_hex(8)}", self._own_pod()

            def manifest(name: str) -> dict[str, Any]:
                return pod_manifest(
                    name, plan, self._settings, limits, uid=uid, owner=owner, num_stage_bytes=num_bytes,
                    tree_bytes=tree_bytes, owner_pod=owner_pod,
                )  # fmt: skip

            self._create(manifest, owner)
            self._wait_for("staging")
            stage.seek(0)
            self.send(STAGE, pod_scripts.UNPACK_STAGE, stage, num_bytes)
        self.wait_until_ready()

    def send(self, container: str, script: str, data: IO[bytes], num_bytes: int, *arguments: str) -> None:
        """Run a script that reads ``num_bytes`` bytes.

        Raises:
            SandboxFailure: the connection broke (CR0336), or the script failed (CR0337).
        """
        argv = ["/bin/sh", "-c", script, "sandbox", str(num_bytes), *arguments]
        try:
            end = self.exec_in(container).run(argv, deadline=time.monotonic() + _SEND_SECONDS, stdin=data)
        except ApiRefusal as error:
            raise error.as_failure("send files into the pod") from error
        if end.exit_code != 0:
            said = end.stderr.decode(errors="replace").strip()[-300:] or f"exit code {end.exit_code}"
            raise failure("CR0337", f"files cannot be sent into the pod: {said}.", self.path)

    def state(self) -> PodState:
        """How the pod is now.

        Raises:
            SandboxFailure: as ``start``.
        """
        return state_of(self._read())

    def is_over_own_disk_limit(self) -> bool:
        """Whether the cluster evicted it for what the command wrote."""
        with suppress(SandboxFailure):
            return is_over_own_disk_limit(self._read())
        return False

    def wait_until_ready(self) -> PodState:
        """Wait until commands can run, after a restart as well.

        Raises:
            SandboxFailure: as ``start``.
        """
        return self._wait_for("ready")

    def delete(self) -> None:
        """Delete it at once; one that is gone already is fine.

        Raises:
            SandboxFailure: the cluster cannot be asked, or refuses; the pod's own time limit ends it then.
        """
        if not self.path:
            return
        try:
            self._client.ask("DELETE", self.path, query={"gracePeriodSeconds": "0"})
        except ApiRefusal as error:
            if error.status != NOT_FOUND:
                raise error.as_failure("delete a pod") from error
        self.path = ""

    def sweep(self) -> int:
        """Delete pods of ours that have ended, whoever made them; how many."""
        num_deleted = 0
        try:
            found = self._client.ask("GET", self._folder, query={"labelSelector": f"{LABEL}=true"})
        except ApiRefusal as error:
            raise error.as_failure("list pods") from error
        for pod in found.get("items") or []:
            if (pod.get("status") or {}).get("phase") in ("Failed", "Succeeded"):
                with suppress(ApiRefusal):  # somebody else was quicker
                    self._client.ask("DELETE", f"{self._folder}/{pod['metadata']['name']}")
                    num_deleted += 1
        return num_deleted

    def _ensure_policy(self) -> None:
        """Make the policy that closes our pods; one that is there already is read, not believed by its name."""
        folder = self._folder.removesuffix("/pods").replace("/api/v1/", "/apis/networking.k8s.io/v1/")
        if self._is_policy_there(folder):
            return
        try:
            self._client.ask("POST", f"{folder}/networkpolicies", body=network_policy())
        except ApiRefusal as error:
            if error.status != CONFLICT:
                raise error.as_failure("forbid our pods the network") from error
            self._is_policy_there(folder)  # somebody else was quicker

    def _is_policy_there(self, folder: str) -> bool:
        place = f"{folder}/networkpolicies/{POLICY_NAME}"
        try:
            found = self._client.ask("GET", place)
        except ApiRefusal as error:
            if error.status != NOT_FOUND:
                raise error.as_failure("look for the network policy") from error
            return False
        if difference := difference_to_closed(found):
            namespace = folder.rpartition("/")[2]
            raise SandboxFailure(
                "CR0883",
                f"the network policy {POLICY_NAME} of the cluster does not close our pods: {difference}.",
                where=place,
                fix=f"kubectl delete networkpolicy {POLICY_NAME} --namespace {namespace}; it is made anew",
            )
        return True

    def _own_pod(self) -> dict[str, str] | None:
        """Name and uid of the pod that we run in, so that ours die with it."""
        if not self._client.access.own_pod:
            return None
        with suppress(ApiRefusal):
            found = self._client.ask("GET", f"{self._folder}/{self._client.access.own_pod}")
            return {name: str(found["metadata"][name]) for name in ("name", "uid")}
        return None

    def _create(self, manifest: Callable[[str], dict[str, Any]], owner: str) -> None:
        for _ in range(_NUM_NAMES):
            name = f"composer-rl-{secrets.token_hex(6)}"
            try:
                self._client.ask("POST", self._folder, body=manifest(name))
            except ApiRefusal as error:
                if error.status != CONFLICT:
                    raise error.as_failure("make a pod") from error
                if not self._is_ours(name, owner):
                    continue  # the name is somebody else's
            self.path = f"{self._folder}/{name}"
            return
        raise failure("CR0333", "the cluster finds every name for a pod taken.")

    def _is_ours(self, name: str, owner: str) -> bool:
        """After a try that was repeated, the pod may be the one that the first try made."""
        try:
            found = self._client.ask("GET", f"{self._folder}/{name}")
        except ApiRefusal:
            return False
        return ((found.get("metadata") or {}).get("labels") or {}).get(OWNER_LABEL) == owner

    def _read(self) -> dict[str, Any]:
        try:
            return self._client.ask("GET", self.path)
        except ApiRefusal as error:
            if error.status == NOT_FOUND:
                raise failure("CR0335", "the pod is gone: somebody deleted it.", self.path) from error
            raise error.as_failure("describe a pod") from error

    def _wait_for(self, kind: str) -> PodState:
        deadline = time.monotonic() + self._settings.start_seconds
        pause = _FIRST_PAUSE_SECONDS
        while True:
            state = self.state()
            if state.kind == kind:
                return state
            if time.monotonic() > deadline:
                why = state.why or f"it is {state.kind}"
                seconds = f"{self._settings.start_seconds:g}"
                raise failure("CR0334", f"the pod does not start within {seconds} seconds: {why}.", self.path)
            time.sleep(pause)
            pause = min(1.5 * pause, _LONGEST_PAUSE_SECONDS)
