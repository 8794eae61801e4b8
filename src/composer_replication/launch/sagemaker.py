"""Amazon SageMaker: one training job a replica, as the request that ``create_training_job`` takes.

The request is held against botocore's own description of the service before anything is sent:
required fields, types, patterns, bounds and the list of instance types. SageMaker repeats a job
for faults of its own alone, never for an exit code; a spot job that it interrupts goes on from
the checkpoints that it keeps in S3.
"""

from __future__ import annotations

import json
import re
from typing import Any

from pydantic import Field

from composer_replication.errors import ComposerError
from composer_replication.launch.clients import aws_refusals, refusal
from composer_replication.launch.job import HALTED_EXIT_CODE, Job, JobState, JobStatus, joined
from composer_replication.launch.targets import Target, TargetOptions, filled, option_error, refuse_secrets

REQUEST_NAME = "training-job-{}.json"
RECIPE_MOUNT = "/opt/ml/input/data/recipe"
CHECKPOINTS = "/opt/ml/checkpoints"
LOG_GROUP = "/aws/sagemaker/TrainingJobs"
PLACE_FILE = "/opt/ml/input/config/resourceconfig.json"
_STATES = {
    "InProgress": JobState.RUNNING,
    "Completed": JobState.SUCCEEDED,
    "Failed": JobState.FAILED,
    "Stopping": JobState.RUNNING,
    "Stopped": JobState.STOPPED,
}


class SageMakerTarget(Target):
    """Submitted by boto3; the recipe's files go to S3 first."""

    class Options(TargetOptions):
        """``--option`` of ``--to sagemaker``."""

        region: str
        role: str = Field(description="ARN that the job acts as")
        image: str = Field(description="container image in ECR with composer-replication")
        instance_type: str = Field(description="ml.p5.48xlarge")
        bucket: str = Field(
            description="s3://BUCKET/PREFIX for the recipe and the run", pattern="^s3://[^/]+(/.*[^/])?$"
        )
        volume_gib: int = Field(200, ge=1)
        hours: int = Field(24, ge=1, le=672, description="longest run")
        wait_hours: int = Field(0, ge=0, description="for spot instances, run included; 0: no spot")

    def render(self, job: Job) -> dict[str, str]:
        refuse_secrets(job, "sagemaker", "let the role read it from Secrets Manager")
        shape = self._client("sagemaker").meta.service_model.operation_model("CreateTrainingJob").input_shape
        files = {REQUEST_NAME.format(i): self._request(job, i) for i in range(job.replicas)}
        problems = [problem for text in files.values() for problem in shape_problems(shape, json.loads(text))]
        if problems:
            sentence = f"SageMaker's own description does not allow this: {problems[0]}"
            raise option_error(sentence, where="sagemaker", fix="correct that option")
        return files

    def _request(self, job: Job, replica: int) -> str:
        run = f"{CHECKPOINTS}/run"
        words = job.train_words(RECIPE_MOUNT, run, str(replica) if job.replicas > 1 else None)
        port, place = str(self.options.port), ["--sagemaker", PLACE_FILE]
        return filled(
            "training-job.json.j2",
            job=job,
            options=self.options,
            name=f"{job.name}-{replica}" if job.replicas > 1 else job.name,
            command=job.node_command("python", words, place, port=port, folder=RECIPE_MOUNT),
            folder=f"{self.options.bucket}/{job.name}",
            checkpoints=CHECKPOINTS,
        )

    def submit(self, job: Job) -> str:
        """The files to S3, then the jobs; what was begun is stopped when a later one is refused."""
        client, submitted = self._client("sagemaker"), []
        bucket, _, prefix = self.options.bucket.removeprefix("s3://").partition("/")
        try:
            with aws_refusals("sagemaker"):
                store = self._client("s3")
                for path, content in job.files.items():
                    key = "/".join(part for part in (prefix, job.name, "recipe", path) if part)
                    store.put_object(Bucket=bucket, Key=key, Body=content)
                for i in range(job.replicas):
                    request = json.loads((self.folder / REQUEST_NAME.format(i)).read_text())
                    client.create_training_job(**request)
                    submitted.append(request["TrainingJobName"])
        except ComposerError as error:
            left = [name for name in submitted if not self._is_stopped(name)]
            raise (refusal("sagemaker", f"{error.message} and {left[0]} still runs") if left else error) from error
        return ",".join(submitted)

    def status(self, job_id: str) -> JobStatus:
        client = self._client("sagemaker")
        with aws_refusals("sagemaker"):
            return joined(
                [_status(client.describe_training_job(TrainingJobName=name)) for name in job_id.split(",")]
            )

    def logs(self, job_id: str) -> str:
        lines: list[str] = []
        with aws_refusals("logs"):
            paginator = self._client("logs").get_paginator("filter_log_events")
            for name in job_id.split(","):
                pages = paginator.paginate(logGroupName=LOG_GROUP, logStreamNamePrefix=f"{name}/")
                lines += [f"{event['message']}\n" for page in pages for event in page["events"]]
        return "".join(lines)

    def stop(self, job_id: str) -> None:
        client = self._client("sagemaker")
        with aws_refusals("sagemaker"):
            for name in job_id.split(","):
                client.stop_training_job(TrainingJobName=name)

    def _is_stopped(self, name: str) -> bool:
        try:
            self.stop(name)
        except ComposerError:
            return False
        return True

    def _client(self, service: str) -> Any:
        import boto3

        return boto3.client(service, region_name=self.options.region)


def _status(found: dict[str, Any]) -> JobStatus:
    said = str(found.get("FailureReason", ""))
    state = _STATES.get(str(found.get("TrainingJobStatus")), JobState.UNKNOWN)
    if state is JobState.FAILED and re.search(rf"exit code:? {HALTED_EXIT_CODE}\b", said, re.IGNORECASE):
        return JobStatus(JobState.HALTED, HALTED_EXIT_CODE, said)
    return JobStatus(
        state, 0 if state is JobState.SUCCEEDED else None, said or str(found.get("SecondaryStatus", ""))
    )


def shape_problems(shape: Any, value: Any, path: str = "request") -> list[str]:
    """What botocore's description of a service does not allow in a value; its own check sees neither lists of values nor patterns."""
    kind = shape.type_name
    python = {
        "structure": dict,
        "map": dict,
        "list": list,
        "string": str,
        "integer": int,
        "long": int,
        "boolean": bool,
    }
    if kind in python and (
        not isinstance(value, python[kind]) or (kind in ("integer", "long") and isinstance(value, bool))
    ):
        return [f"{path} is {value!r}, not of type {kind}"]
    size = value if kind in ("integer", "long") else len(value) if kind in ("string", "list", "map") else 0
    facts, problems = shape.metadata, []
    if not facts.get("min", size) <= size <= facts.get("max", size):
        problems.append(f"{path} is outside {facts.get('min', '')} to {facts.get('max', '')}")
    if kind == "structure":
        problems += [f"{path}.{name} is unknown" for name in value.keys() - shape.members.keys()]
        problems += [f"{path}.{name} is missing" for name in shape.required_members if name not in value]
        for name in value.keys() & shape.members.keys():
            problems += shape_problems(shape.members[name], value[name], f"{path}.{name}")
    elif kind == "list":
        for i, one in enumerate(value):
            problems += shape_problems(shape.member, one, f"{path}[{i}]")
    elif kind == "map":
        for key, one in value.items():
            problems += shape_problems(shape.key, key, f"{path}.{key}") + shape_problems(
                shape.value, one, f"{path}.{key}"
            )
    elif kind == "string":
        allowed, pattern = facts.get("enum", []), facts.get("pattern")
        if allowed and value not in allowed:
            problems.append(f"{path} {value!r} is none of its {len(allowed)} values")
        if pattern and not re.fullmatch(pattern, value):
            problems.append(f"{path} {value!r} does not fit {pattern}")
    return sorted(problems)
