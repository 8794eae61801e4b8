"""Where is the API server, and as whom do we speak to it? From inside a pod, or from a kubeconfig.

Reference: kubernetes.io/docs/reference/config-api/kubeconfig.v1 and
kubernetes.io/docs/tasks/run-application/access-api-from-pod.
"""

from __future__ import annotations

import base64
import json
import os
import ssl
import subprocess
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from composer_replication.errors import MissingError

SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
_PLUGIN_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class ClusterAccess:
    """``token`` is asked before each request, for tokens are renewed; empty where a certificate speaks for us."""

    server: str
    namespace: str
    token: Callable[[], str]
    tls: ssl.SSLContext | None
    own_pod: str = ""
    """The pod that we run in, if we do: the owner of the pods that we make."""


def find_access() -> ClusterAccess:
    """``KUBECONFIG`` first, then the service account of our own pod, then ``~/.kube/config``.

    Raises:
        MissingError: none of them is there, or it cannot be used (CR0330).
    """
    named = [Path(part) for part in os.environ.get("KUBECONFIG", "").split(os.pathsep) if part]
    if named:
        return _from_kubeconfig(next((path for path in named if path.is_file()), named[0]))
    if os.environ.get("KUBERNETES_SERVICE_HOST") and (SERVICE_ACCOUNT / "token").is_file():
        return _from_service_account()
    usual = Path("~/.kube/config").expanduser()
    if usual.is_file():
        return _from_kubeconfig(usual)
    raise _no_access("there is neither a kubeconfig nor a service account here")


def _no_access(why: str, where: str = "") -> MissingError:
    return MissingError(
        "CR0330",
        f"no cluster can be reached: {why}.",
        where=where,
        fix="export KUBECONFIG=FILE, then kubectl get pods",
    )


def _from_service_account() -> ClusterAccess:
    host, port = os.environ["KUBERNETES_SERVICE_HOST"], os.environ.get("KUBERNETES_SERVICE_PORT", "443")
    host = f"[{host}]" if ":" in host else host
    try:
        return ClusterAccess(
            server=f"https://{host}:{port}",
            namespace=(SERVICE_ACCOUNT / "namespace").read_text().strip() or "default",
            token=lambda: (SERVICE_ACCOUNT / "token").read_text().strip(),
            tls=ssl.create_default_context(cafile=str(SERVICE_ACCOUNT / "ca.crt")),
            own_pod=os.environ.get("HOSTNAME", ""),
        )
    except OSError as error:
        raise _no_access(f"the service account cannot be read ({error})") from error


def _from_kubeconfig(path: Path) -> ClusterAccess:
    try:
        config = _parsed(path)
        context = _named(config, "contexts", str(config.get("current-context", "")))["context"]
        cluster = _named(config, "clusters", str(context["cluster"]))["cluster"]
        user = _named(config, "users", str(context.get("user", ""))).get("user") or {}
        server = str(cluster["server"])
        plugin = _plugin_answer(user["exec"], server) if user.get("exec") else {}
        return ClusterAccess(
            server=server.rstrip("/"),
            namespace=str(context.get("namespace") or "default"),
            token=_token_of(user, plugin, path.parent),
            tls=_tls_of(cluster, {**user, **plugin}, path.parent) if server.startswith("https:") else None,
        )
    except (OSError, KeyError, TypeError, ValueError, AttributeError, subprocess.SubprocessError) as error:
        raise _no_access(
            f"the kubeconfig cannot be used ({type(error).__name__}: {error})", str(path)
        ) from error


def _parsed(path: Path) -> dict[str, Any]:
    text = path.read_text()
    try:
        found = json.loads(text)
    except ValueError:
        try:
            import yaml
        except ImportError:
            raise _no_access(
                "a kubeconfig in YAML needs PyYAML (pip install 'composer-replication[kubernetes]')",
                str(path),
            ) from None
        try:
            found = yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise ValueError(f"no YAML: {error}") from error
    if not isinstance(found, dict):
        raise TypeError("it holds no table")
    return found


def _named(config: Mapping[str, Any], kind: str, name: str) -> dict[str, Any]:
    for entry in config.get(kind) or []:
        if entry.get("name") == name:
            return dict(entry)
    raise ValueError(f"{kind} has no {name!r}")


def _token_of(user: Mapping[str, Any], plugin: Mapping[str, Any], folder: Path) -> Callable[[], str]:
    if user.get("tokenFile"):
        file = folder / str(user["tokenFile"])
        return lambda: file.read_text().strip()
    token = str(plugin.get("token") or user.get("token") or "")
    return lambda: token


def _plugin_answer(plugin: Mapping[str, Any], server: str) -> dict[str, Any]:
    """What a credential plugin of a cloud says, in the words of a kubeconfig's user."""
    version = str(plugin.get("apiVersion") or "client.authentication.k8s.io/v1")
    question = {"apiVersion": version, "kind": "ExecCredential", "spec": {"interactive": False}}
    named = {str(entry["name"]): str(entry["value"]) for entry in plugin.get("env") or []}
    done = subprocess.run(
        [str(plugin["command"]), *(str(word) for word in plugin.get("args") or [])],
        env={**os.environ, **named, "KUBERNETES_EXEC_INFO": json.dumps(question)},
        capture_output=True,
        text=True,
        timeout=_PLUGIN_SECONDS,
        check=False,
    )
    if done.returncode != 0:
        raise ValueError(f"the credential plugin for {server} fails: {done.stderr.strip()[-300:]}")
    status = json.loads(done.stdout)["status"]
    found = {"token": status.get("token")}
    for ours, theirs in (
        ("client-certificate-data", "clientCertificateData"),
        ("client-key-data", "clientKeyData"),
    ):
        if status.get(theirs):
            found[ours] = base64.b64encode(str(status[theirs]).encode()).decode()
    return {name: value for name, value in found.items() if value}


def _tls_of(cluster: Mapping[str, Any], user: Mapping[str, Any], folder: Path) -> ssl.SSLContext:
    tls = ssl.create_default_context()
    if cluster.get("certificate-authority-data"):
        tls.load_verify_locations(cadata=base64.b64decode(cluster["certificate-authority-data"]).decode())
    elif cluster.get("certificate-authority"):
        tls.load_verify_locations(cafile=str(folder / str(cluster["certificate-authority"])))
    if cluster.get("insecure-skip-tls-verify"):
        tls.check_hostname, tls.verify_mode = False, ssl.CERT_NONE
    with tempfile.TemporaryDirectory() as scratch:  # the ssl module reads files only
        pair = [_as_file(user, name, folder, Path(scratch)) for name in ("client-certificate", "client-key")]
        if pair[0] is not None:
            tls.load_cert_chain(str(pair[0]), str(pair[1]) if pair[1] else None)
    return tls


def _as_file(user: Mapping[str, Any], name: str, folder: Path, scratch: Path) -> Path | None:
    if user.get(f"{name}-data"):
        file = scratch / name
        file.touch(mode=0o600)
        file.write_bytes(base64.b64decode(user[f"{name}-data"]))
        return file
    return folder / str(user[name]) if user.get(name) else None
