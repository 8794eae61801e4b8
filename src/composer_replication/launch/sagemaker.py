"""Amazon SageMaker: one training job a replica, as the request that ``create_training_job`` takes.

The request is held against botocore's own description of the service before anything is sent:
required fields, types, patterns, bounds and the list of instance types. SageMaker repeats a job
for faults of its own alone, never for an exit code; a spot job that it interrupts goes on from
the checkpoints that it keeps in S3.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from pydantic import Field

from composer_replication.launch.clients import aws_refusals
from composer_replication.launch.job import Job
from composer_replication.launch.job_status import JobState, JobStatus, told
from composer_replication.launch.targets import Target, TargetOptions, filled, require

REQUEST_NAME = "training-job-{}.json"
RECIPE_MOUNT = "/opt/ml/input/data/recipe"
CHECKPOINTS = "/opt/ml/checkpoints"
LOG_GROUP = "/aws/sagemaker/TrainingJobs"
PLACE_FILE = "/opt/ml/input/config/resourceconfig.json"
_STATES = {
    **dict.fromkeys(("InProgress", "Stopping"), JobState.RUNNING),
    "Completed": JobState.SUCCEEDED,
    "Failed": JobState.FAILED,
    "Stopped": JobState.STOPPED,
}


class SageMakerTarget(Target):
    """Submitted by boto3; the recipe's files go to S3 first."""

    class Options(TargetOptions):
        """``--option`` of ``--to sagemaker``."""

        region: str = Field(pattern=r"^[a-z]{2}(-[a-z]+)+-\d$", description="us-east-1")
        role: str = Field(description="ARN that the job acts as")
        image: str = Field(description="container image in ECR with composer-replication")
        instance_type: str = Field(description="ml.p5.48xlarge")
        bucket: str = Field(pattern="^s3://[^/]+(/.*[^/])?$", description="s3://BUCKET/PREFIX")
        volume_gib: int = Field(200, ge=1)
        hours: int = Field(24, ge=1, le=672, description="longest run")
        wait_hours: int = Field(0, ge=0, description="for spot instances, run included; 0: no spot")

    def render(self, job: Job) -> dict[str, str]:
        from botocore.session import Session

        shown, instead = ", ".join(job.secrets), "let the role read it from Secrets Manager"
        require(not shown, f"sagemaker would show {shown} to others", "--secret", instead)
        with aws_refusals("sagemaker"):  # a client would look for credentials
            operation = Session().get_service_model("sagemaker").operation_model("CreateTrainingJob")
        files = {REQUEST_NAME.format(name): self._request(job, name, i) for name, i in job.each_replica()}
        requests = [json.loads(text) for text in files.values()]
        problems = [found for one in requests for found in shape_problems(operation.input_shape, one)]
        said = f"SageMaker refuses this: {'; '.join(problems[:1])}"
        require(not problems, said, "sagemaker", "correct that option")
        return files

    def _request(self, job: Job, name: str, replica: str | None) -> str:
        words = job.train_words(RECIPE_MOUNT, f"{CHECKPOINTS}/run", replica)
        place, port = ["--sagemaker", PLACE_FILE], str(self.options.port)
        command = job.node_command("python", words, place, port=port, folder=RECIPE_MOUNT)
        values = {"job": job, "options": self.options, "name": name, "command": command}
        folder = f"{self.options.bucket}/{job.name}"
        return filled("training-job.json.j2", **values, folder=folder, checkpoints=CHECKPOINTS)

    def submit(self, job: Job) -> str:
        """The files to S3, then the jobs."""
        client, store = self._client("sagemaker"), self._client("s3")
        bucket, _, prefix = self.options.bucket.removeprefix("s3://").partition("/")
        with aws_refusals("s3"):
            for path, content in job.files.items():
                key = "/".join(part for part in (prefix, job.name, "recipe", path) if part)
                store.put_object(Bucket=bucket, Key=key, Body=content)

        def submit(name: str) -> str:
            request = json.loads((self.folder / REQUEST_NAME.format(name)).read_text())
            with aws_refusals("sagemaker"):
                client.create_training_job(**request)
            return name

        return self.submit_each([name for name, _ in job.each_replica()], submit)

    def status(self, job_id: str) -> JobStatus:
        with aws_refusals("sagemaker"):
            return _status(self._client("sagemaker").describe_training_job(TrainingJobName=job_id))

    def logs(self, job_id: str) -> str:
        with aws_refusals("logs"):
            paginator = self._client("logs").get_paginator("filter_log_events")
            pages = paginator.paginate(logGroupName=LOG_GROUP, logStreamNamePrefix=f"{job_id}/")
            return "".join(f"{event['message']}\n" for page in pages for event in page["events"])

    def stop(self, job_id: str) -> None:
        with aws_refusals("sagemaker"):
            self._client("sagemaker").stop_training_job(TrainingJobName=job_id)

    def _client(self, service: str) -> Any:
        import boto3

        with aws_refusals(service):
            return boto3.client(service, region_name=self.options.region)


def _status(found: dict[str, Any]) -> JobStatus:
    state = _STATES.get(str(found.get("TrainingJobStatus")), JobState.UNKNOWN)
    return told(state, str(found.get("FailureReason") or found.get("SecondaryStatus", "")))


def shape_problems(shape: Any, value: Any) -> list[str]:
    """What botocore's description of a service does not allow in a value: types, required and unknown fields by its own check,
    which sees neither lists of values, patterns nor upper bounds.
    """
    from botocore.validate import ParamValidator

    report = ParamValidator().validate(value, shape).generate_report()
    return report.splitlines() or sorted(_constraints(shape, value, "request"))


def _constraints(shape: Any, value: Any, path: str) -> Iterator[str]:
    facts, kind = shape.metadata, shape.type_name
    size = value if kind in ("integer", "long") else len(value) if kind in ("string", "list", "map") else 0
    if not facts.get("min", size) <= size <= facts.get("max", size):
        yield f"{path} is outside {facts.get('min', '')} to {facts.get('max', '')}"
    if kind == "string" and value not in (facts.get("enum") or [value]):
        yield f"{path} {value!r} is none of its {len(facts['enum'])} values"
    if kind == "string" and not re.fullmatch(facts.get("pattern", ".*"), value, re.DOTALL):
        yield f"{path} {value!r} does not fit {facts['pattern']}"
    inside: list[tuple[Any, Any, object]] = []
    if kind == "structure":
        inside = [(shape.members[name], one, name) for name, one in value.items()]
    elif kind == "list":
        inside = [(shape.member, one, i) for i, one in enumerate(value)]
    elif kind == "map":
        inside = [(shape.key, key, key) for key in value] + [(shape.value, value[key], key) for key in value]
    for part, one, name in inside:
        yield from _constraints(part, one, f"{path}.{name}")
