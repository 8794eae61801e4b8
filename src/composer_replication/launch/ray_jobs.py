"""A Ray cluster that runs: job submission through its dashboard, with its token where it asks for one (RAY_AUTH_TOKEN).

One node: the entrypoint is the run itself. Several: the entrypoint is ``ray_nodes.py``, which
asks Ray for the nodes and starts the processes on each.
"""

from __future__ import annotations

from typing import Any

from pydantic import Field

from composer_replication.errors import ComposerError
from composer_replication.launch.clients import refusal
from composer_replication.launch.job import Job, JobState, JobStatus, ended, joined, shell_line
from composer_replication.launch.job_folder import RECIPE_FOLDER
from composer_replication.launch.targets import Target, TargetOptions, refuse_secrets


class RayTarget(Target):
    """Submitted to the job server of a cluster; the recipe's files travel with the job."""

    class Options(TargetOptions):
        """``--option`` of ``--to ray``."""

        address: str = Field(pattern="^https?://", description="of the cluster's dashboard: http://HOST:8265")
        run: str = Field(
            description="run folder on storage that all nodes see: an absolute path", pattern="^/"
        )
        python: str = Field("python", description="the interpreter of the cluster")

    def render(self, job: Job) -> dict[str, str]:
        refuse_secrets(job, "ray", "set it where the cluster is started")
        return {f"entrypoint-{i}.sh": f"{line}\n" for i, line in enumerate(self._entrypoints(job))}

    def _entrypoints(self, job: Job) -> list[str]:
        lines = []
        for i in range(job.replicas):
            words = job.train_words(RECIPE_FOLDER, self.options.run, str(i) if job.replicas > 1 else None)
            resources, port = job.resources, str(self.options.port + i)
            command = job.node_command(self.options.python, words, [], port=port, folder=RECIPE_FOLDER)
            if resources.nodes > 1:
                asked = [
                    "--nodes",
                    str(resources.nodes),
                    "--cpus",
                    str(resources.cpus),
                    "--gpus",
                    str(resources.gpus),
                ]
                command = [
                    self.options.python,
                    "-m",
                    "composer_replication.launch.ray_nodes",
                    *asked,
                    "--",
                    *command,
                ]
            lines.append(shell_line(command))
        return lines

    def submit(self, job: Job) -> str:
        client = self._client()
        submitted: list[str] = []
        resources = job.resources
        try:
            for i, line in enumerate(self._entrypoints(job)):
                kept = (
                    {}
                    if resources.nodes > 1
                    else {"entrypoint_num_cpus": resources.cpus, "entrypoint_num_gpus": resources.gpus}
                )
                submitted.append(
                    client.submit_job(
                        entrypoint=line,
                        submission_id=f"{job.name}-{i}-{self.folder.stat().st_mtime_ns}",
                        runtime_env={"working_dir": str(self.folder), "env_vars": dict(job.environment)},
                        **kept,
                    )
                )
        except Exception as error:
            for job_id in submitted:
                client.stop_job(job_id)
            raise refusal(self.options.address, str(error)) from error
        return ",".join(submitted)

    def status(self, job_id: str) -> JobStatus:
        return joined([_status(info) for info in self._asked("get_job_info", job_id)])

    def logs(self, job_id: str) -> str:
        return "".join(self._asked("get_job_logs", job_id))

    def stop(self, job_id: str) -> None:
        self._asked("stop_job", job_id)

    def _asked(self, question: str, job_id: str) -> list[Any]:
        client = self._client()
        try:
            return [getattr(client, question)(one) for one in job_id.split(",")]
        except RuntimeError as error:
            raise refusal(self.options.address, str(error)) from error

    def _client(self) -> Any:
        from ray.job_submission import JobSubmissionClient

        try:
            return JobSubmissionClient(self.options.address)
        except ComposerError:
            raise
        except (
            Exception
        ) as error:  # no answer, a wrong address, a missing or wrong token: each in Ray's own words
            raise refusal(self.options.address, str(error)) from error


def _status(info: Any) -> JobStatus:
    state, said = str(getattr(info.status, "value", info.status)), info.message or ""
    if state in ("SUCCEEDED", "FAILED") and info.driver_exit_code is not None:
        return ended(info.driver_exit_code, said)
    known = {"PENDING": JobState.WAITING, "RUNNING": JobState.RUNNING, "STOPPED": JobState.STOPPED}
    return JobStatus(known.get(state, JobState.FAILED), detail=said)
