"""A network policy that is there already is read before it is relied on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from faulty_http import Fault, status

from composer_replication.errors import SandboxFailure
from composer_replication.records import SandboxSpec
from composer_replication.sandbox import choose_backend
from composer_replication.sandbox.pods.pod_manifest import (
    LABEL,
    POLICY_NAME,
    difference_to_closed,
    network_policy,
)

CLOSED: dict[str, Any] = network_policy()["spec"]
OURS = {"matchLabels": {LABEL: "true"}}


def policy(**changes: Any) -> dict[str, Any]:
    return {"kind": "NetworkPolicy", "metadata": {"name": POLICY_NAME}, "spec": {**CLOSED, **changes}}


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (policy(egress=[{}]), "egress rules"),
        (policy(ingress=[{"from": [{"podSelector": {}}]}]), "ingress rules"),
        (policy(policyTypes=["Ingress"]), r"policyTypes are \['Ingress'\]"),
        (policy(policyTypes=None), "policyTypes are None"),
        (policy(podSelector={"matchLabels": {"app": "other"}}), "podSelector is .*other"),
        (
            policy(podSelector={**OURS, "matchExpressions": [{"key": "a", "operator": "Exists"}]}),
            "podSelector",
        ),
        (policy(podSelector=None), "podSelector is None"),
        (policy(priority=5), "it has priority"),
        ({"kind": "NetworkPolicy"}, "no spec"),
    ],
)
def test_a_policy_that_leaves_something_open_is_refused(
    cluster: Any, tree: Path, found: dict[str, Any], said: str
) -> None:
    cluster.policies[POLICY_NAME] = found
    with pytest.raises(SandboxFailure, match=said) as caught:
        choose_backend("kubernetes").open(SandboxSpec(tree))
    assert caught.value.code == "CR0883"
    assert caught.value.fix.startswith(f"kubectl delete networkpolicy {POLICY_NAME} --namespace jails")
    assert cluster.pods == {}


def test_one_that_was_made_at_the_same_time_is_read_too(cluster: Any, tree: Path) -> None:
    cluster.policies[POLICY_NAME] = policy(egress=[{}])
    cluster.faults.append(Fault("GET .*/networkpolicies", status(404, "none")))
    cluster.faults.append(Fault("POST .*/networkpolicies", status(409, "it is there")))
    with pytest.raises(SandboxFailure) as caught:
        choose_backend("kubernetes").open(SandboxSpec(tree))
    assert (caught.value.code, cluster.pods) == ("CR0883", {})


def test_one_that_closes_everything_is_relied_on(cluster: Any, tree: Path) -> None:
    cluster.policies[POLICY_NAME] = policy(ingress=[], policyTypes=["Egress", "Ingress"])
    with choose_backend("kubernetes").open(SandboxSpec(tree)) as sandbox:
        assert sandbox.exec(["echo", "in"], timeout_seconds=60).stdout == "in\n"


@pytest.mark.parametrize(
    "same", [{}, {"egress": None}, {"podSelector": {}}, {"podSelector": {**OURS, "matchExpressions": []}}]
)
def test_what_says_the_same_in_other_words_is_the_same(same: dict[str, Any]) -> None:
    assert difference_to_closed(policy(**same)) == ""
