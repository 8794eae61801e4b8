"""Amazon EKS: the manifests of ``kubernetes``, with what its nodes, roles and networks need on top.

Pods act as a role: by Pod Identity (an association that ``submit`` asks for) or, with
``role_by=irsa``, by an annotation of their service account.
"""

from __future__ import annotations

import json
from typing import Any, Literal

from pydantic import Field

from composer_replication.launch.clients import aws_refusals
from composer_replication.launch.job import Job
from composer_replication.launch.kubernetes import ClusterOptions, KubernetesTarget

ASSOCIATION_NAME = "pod-identity.json"


class EksTarget(KubernetesTarget):
    """The kubeconfig's context is the cluster's: ``aws eks update-kubeconfig --name CLUSTER``."""

    class Options(ClusterOptions):
        """``--option`` of ``--to eks``."""

        cluster: str = Field(description="name of the cluster")
        region: str = Field(pattern=r"^[a-z]{2}(-[a-z]+)+-\d$", description="us-east-1")
        service_account: str = "composer-rl"
        role: str = Field(
            "", description="ARN that pods act as, for S3", pattern=r"^$|^arn:aws[a-z-]*:iam::\d{12}:role/.+$"
        )
        role_by: Literal["pod-identity", "irsa"] = "pod-identity"
        spot: bool = Field(default=False, description="on spot nodes of Karpenter")
        instance_type: str = Field("", description="p5.48xlarge, for Karpenter")
        efa: int = Field(0, ge=0, description="EFA interfaces of each node")

    def render(self, job: Job) -> dict[str, str]:
        options, files = self.options, super().render(job)
        if options.role and options.role_by == "pod-identity":
            place = {"clusterName": options.cluster, "namespace": options.namespace}
            wanted = {**place, "serviceAccount": options.service_account, "roleArn": options.role}
            files[ASSOCIATION_NAME] = f"{json.dumps(wanted, indent=2)}\n"
        return files

    def values(self, job: Job) -> dict[str, Any]:
        """The service account with its role, Karpenter's labels, EFA."""
        options, values = self.options, super().values(job)
        is_irsa = options.role and options.role_by == "irsa"
        annotations = {"eks.amazonaws.com/role-arn": options.role} if is_irsa else {}
        selector = {"karpenter.sh/capacity-type": "spot"} if options.spot else {}
        if options.instance_type:
            selector["node.kubernetes.io/instance-type"] = options.instance_type
        changed = {"efa": options.efa, "makes_account": True, "annotations": annotations}
        return values | changed | {"node_selector": values["node_selector"] | selector}

    def submit(self, job: Job) -> str:
        """Look for the cluster, let its pods act as the role, then apply the manifests."""
        import boto3

        options = self.options
        with aws_refusals("eks"):
            client: Any = boto3.client("eks", region_name=options.region)
            client.describe_cluster(name=options.cluster)
            if (rendered := self.folder / ASSOCIATION_NAME).is_file():
                wanted = json.loads(rendered.read_text())
                place = {key: wanted[key] for key in ("clusterName", "namespace", "serviceAccount")}
                if not client.list_pod_identity_associations(**place)["associations"]:
                    client.create_pod_identity_association(**wanted)
        return super().submit(job)
