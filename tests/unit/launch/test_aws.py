"""SageMaker, S3 and EKS against moto's server over HTTP, and requests against botocore's description of the service."""

from __future__ import annotations

import functools
import io
import json
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import boto3
import botocore.awsrequest
import pytest
from botocore.client import BaseClient
from moto.server import ThreadedMotoServer

from composer_replication.cli.main import main
from composer_replication.errors import MissingError, UsageError
from composer_replication.launch.job import Job, Resources, recipe_files
from composer_replication.launch.job_status import JobState
from composer_replication.launch.sagemaker import shape_problems
from composer_replication.launch.targets import Target, open_target

RECIPE = Path(__file__).parents[3] / "recipes" / "tiny-cpu" / "run.toml"
REGION = "us-east-1"
ROLE = "arn:aws:iam::123456789012:role/trainer"
OPTIONS = {
    "region": REGION, "role": ROLE, "image": "123456789012.dkr.ecr.us-east-1.amazonaws.com/trainer:1",
    "instance_type": "ml.p5.48xlarge", "bucket": "s3://runs/a",
}  # fmt: skip


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """moto's, for all tests; each of them finds it empty."""
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture
def aws(server: str, monkeypatch: pytest.MonkeyPatch) -> str:
    urllib.request.urlopen(urllib.request.Request(f"{server}/moto-api/reset", method="POST")).close()
    for name, value in {
        "AWS_ENDPOINT_URL": server, "AWS_ACCESS_KEY_ID": "testing",
        "AWS_SECRET_ACCESS_KEY": "testing", "AWS_EC2_METADATA_DISABLED": "true",
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    return server


@functools.cache
def rendered_request() -> tuple[Any, str]:
    """The shape of a request by botocore's description, and one that is rendered."""
    client = boto3.client("sagemaker", region_name=REGION)
    shape = client.meta.service_model.operation_model("CreateTrainingJob").input_shape
    return shape, open_target("sagemaker", OPTIONS, Path("jobs")).render(job())["training-job-run.json"]


def job(replicas: int = 1) -> Job:
    return Job("run", RECIPE, recipe_files(RECIPE), ("trl.max_steps=1",), Resources(nodes=2), replicas)


def submitted(target: Target, one: Job, folder: Path) -> str:
    for name, text in target.render(one).items():
        (folder / name).write_text(text)
    return target.submit(one)


def test_a_job_goes_to_sagemaker_and_its_files_to_s3(
    aws: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    boto3.client("s3", region_name=REGION).create_bucket(Bucket="runs")
    target = open_target("sagemaker", {**OPTIONS, "wait_hours": 48}, tmp_path)
    job_id = submitted(target, job(), tmp_path)
    found = boto3.client("sagemaker", region_name=REGION).describe_training_job(TrainingJobName=job_id)
    sent = json.loads((tmp_path / "training-job-run.json").read_text())
    assert {
        key: found[key] for key in ("RoleArn", "ResourceConfig", "CheckpointConfig", "StoppingCondition")
    } == {key: sent[key] for key in ("RoleArn", "ResourceConfig", "CheckpointConfig", "StoppingCondition")}
    place = sent["InputDataConfig"][0]["DataSource"]["S3DataSource"]["S3Uri"].removeprefix("s3://runs/")
    stored = boto3.client("s3", region_name=REGION).list_objects_v2(Bucket="runs", Prefix=place)["Contents"]
    assert {one["Key"].removeprefix(place) for one in stored} == job().files.keys()
    assert target.status(job_id).state in (JobState.RUNNING, JobState.SUCCEEDED)
    logs = boto3.client("logs", region_name=REGION)
    logs.create_log_group(logGroupName="/aws/sagemaker/TrainingJobs")
    logs.create_log_stream(logGroupName="/aws/sagemaker/TrainingJobs", logStreamName=f"{job_id}/algo-1")
    logs.put_log_events(
        logGroupName="/aws/sagemaker/TrainingJobs", logStreamName=f"{job_id}/algo-1",
        logEvents=[{"timestamp": int(time.time() * 1000), "message": "step 1"}],
    )  # fmt: skip
    assert target.logs(job_id) == "step 1\n"
    stopped = answered(target, monkeypatch, creations=[], stops=(200, b""))
    target.stop(job_id)
    assert stopped == ["run"]


@pytest.mark.parametrize(("stops", "left"), [(200, False), (400, True)])
def test_nothing_is_left_when_a_replica_is_refused(
    stops: int, left: bool, aws: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """moto takes a name twice, which SageMaker refuses, and cannot stop a job: those answers are given here."""
    boto3.client("s3", region_name=REGION).create_bucket(Bucket="runs")
    target = open_target("sagemaker", OPTIONS, tmp_path)
    refused = (400, b'{"__type": "ResourceInUse"}')
    stopped = answered(target, monkeypatch, creations=[None, refused], stops=(stops, b'{"__type": "X"}'))
    with pytest.raises(UsageError, match="ResourceInUse") as caught:
        submitted(target, job(replicas=2), tmp_path)
    assert caught.value.code == "CR0932"
    assert ("and run-0 still runs" in caught.value.message) == left
    assert stopped == ["run-0"]


def test_a_quota_of_sagemaker_is_one_sentence(
    aws: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    boto3.client("s3", region_name=REGION).create_bucket(Bucket="runs")
    target = open_target("sagemaker", OPTIONS, tmp_path)
    said = {"__type": "ResourceLimitExceeded", "message": "the limit for ml.p5.48xlarge is 0 instances"}
    answered(target, monkeypatch, creations=[(400, json.dumps(said).encode())], stops=(200, b""))
    with pytest.raises(UsageError, match=r"CR0932.*ResourceLimitExceeded.*is 0 instances\."):
        submitted(target, job(), tmp_path)


def answered(
    target: Target, monkeypatch: pytest.MonkeyPatch, *, creations: list[Any], stops: tuple[int, bytes]
) -> list[str]:
    """Answers to requests that moto does not know or does not check; None: moto's own. Gives the names that were stopped."""
    client, rest, stopped = boto3.client("sagemaker", region_name=REGION), iter(creations), []

    def of(answer: tuple[int, bytes] | None) -> Any:
        return answer and botocore.awsrequest.AWSResponse("", answer[0], {}, _Body(answer[1]))

    def stop(request: Any, **_: Any) -> Any:
        stopped.append(json.loads(request.body)["TrainingJobName"])
        return of(stops)

    client.meta.events.register("before-send.sagemaker.CreateTrainingJob", lambda **_: of(next(rest, None)))
    client.meta.events.register("before-send.sagemaker.StopTrainingJob", stop)
    real = target._client
    monkeypatch.setattr(
        target, "_client", lambda service: client if service == "sagemaker" else real(service)
    )
    return stopped


class _Body(io.BytesIO):
    def stream(self) -> Iterator[bytes]:
        yield self.read()


def test_without_a_bucket_or_credentials_it_says_what_aws_said(
    aws: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = open_target("sagemaker", OPTIONS, tmp_path)
    with pytest.raises(UsageError, match="NoSuchBucket"):
        submitted(target, job(), tmp_path)
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.setattr(boto3, "DEFAULT_SESSION", None)  # it keeps what it has found
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    with pytest.raises(UsageError, match=r"CR0932.*Unable to locate credentials"):
        submitted(target, job(), tmp_path)


def test_a_profile_that_is_not_there_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("AWS_PROFILE", "nobody")
    monkeypatch.setattr(boto3, "DEFAULT_SESSION", None)
    flags = [part for key, value in OPTIONS.items() for part in ("--option", f"{key}={value}")]
    assert main(["launch", str(RECIPE), "--to", "sagemaker", *flags]) == 2
    assert capsys.readouterr().err.startswith("CR0932")
    assert not list(tmp_path.rglob("job.json"))


def test_a_request_is_rendered_without_network_and_credentials(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: Any) -> None:
        raise AssertionError("rendering asked the network")

    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr("socket.socket.connect", refused)
    assert list(open_target("sagemaker", OPTIONS, tmp_path).render(job(2))) == [
        "training-job-run-0.json",
        "training-job-run-1.json",
    ]


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ("instance_type=ml.p9.huge", "none of its"),
        ("role=arn:aws:iam::1:role/x", "does not fit"),
        ("volume_gib=0", "greater than or equal to 1"),
        ("bucket=runs", "should match pattern"),
        ("instance=x", "the nearest is instance_type"),
    ],
)
def test_what_sagemaker_would_refuse_is_refused_here(
    option: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = [part for key, value in OPTIONS.items() for part in ("--option", f"{key}={value}")]
    assert main(["launch", str(RECIPE), "--to", "sagemaker", "--dry-run", *flags, "--option", option]) == 2
    err = capsys.readouterr().err
    assert err.startswith("CR0930")
    assert said in err


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        (("ResourceConfig", "InstanceCount"), "2", "Invalid type for parameter"),
        (("StoppingCondition", "MaxRuntimeInSeconds"), 0, "Invalid value"),
        (("RoleArn",), None, "Missing required"),
        (("Environment", "1A"), "x", "does not fit"),
    ],
)
def test_a_planted_error_is_found(path: tuple[str, ...], value: Any, said: str) -> None:
    shape, text = rendered_request()
    request = json.loads(text)
    assert shape_problems(shape, request) == []
    table = request
    for key in path[:-1]:
        table = table[key]
    table[path[-1]] = value
    if value is None:
        del table[path[-1]]
    assert any(said in problem for problem in shape_problems(shape, request))


def test_a_cluster_of_eks_gets_its_association_once(
    aws: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """moto knows clusters and no associations: those are answered here, their parameters held against the service's model."""
    asked: list[dict[str, Any]] = []
    at_moto = BaseClient._make_api_call

    def answered(client: Any, operation: str, parameters: dict[str, Any]) -> Any:
        if "PodIdentityAssociation" not in operation:
            return at_moto(client, operation, parameters)
        shape = client.meta.service_model.operation_model(operation).input_shape
        assert shape_problems(shape, parameters) == []
        if operation == "CreatePodIdentityAssociation":
            asked.append(parameters)
        return {"associations": asked}

    monkeypatch.setattr(BaseClient, "_make_api_call", answered)
    monkeypatch.setenv("PATH", str(tmp_path))  # kubectl is tried in tests/interop/launch
    target = open_target("eks", {"image": "i", "cluster": "c", "region": REGION, "role": ROLE}, tmp_path)
    with pytest.raises(UsageError, match="No cluster found for name: c"):
        submitted(target, job(), tmp_path)
    assert asked == []
    boto3.client("eks", region_name=REGION).create_cluster(
        name="c", roleArn=ROLE, resourcesVpcConfig={"subnetIds": []}
    )
    for _ in range(2):
        with pytest.raises(MissingError, match="kubectl"):
            submitted(target, job(), tmp_path)
    place = {"clusterName": "c", "namespace": "default", "serviceAccount": "composer-rl", "roleArn": ROLE}
    assert asked == [json.loads((tmp_path / "pod-identity.json").read_text())] == [place]
