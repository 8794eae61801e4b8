"""A Ray cluster that runs: job submission through its dashboard, with its token where it asks for one (RAY_AUTH_TOKEN).

One node: the entrypoint is the run itself. Several: the entrypoint is ``ray_nodes.py``, which
asks Ray for the nodes and starts the processes on each.
"""

from __future__ import annotations

import json
from typing import Any

from pydantic import Field

from composer_replication.launch.clients import refusal
from composer_replication.launch.job import GRACE_SECONDS, Job, shell_line
from composer_replication.launch.job_folder import RECIPE_FOLDER
from composer_replication.launch.job_status import JobState, JobStatus, ended, told
from composer_replication.launch.targets import Target, TargetOptions, require


class RayTarget(Target):
    """Submitted to the job server of a cluster; the recipe's files travel with the job."""

    class Options(TargetOptions):
        """``--option`` of ``--to ray``."""

        address: str = Field(pattern="^https?://", description="of the cluster's dashboard: http://HOST:8265")
        run: str = Field(pattern="^/", description="run folder: a path on storage that all nodes see")
        python: str = Field("python", description="the interpreter of the cluster")

    def render(self, job: Job) -> dict[str, str]:
        shown = ", ".join(job.secrets)
        require(not shown, f"ray would show {shown} to others", "--secret", "set it where Ray is started")
        files, asked, python = {}, job.resources, self.options.python
        variables = {**job.environment, "RAY_JOB_STOP_WAIT_TIME_S": str(GRACE_SECONDS)}
        for offset, (name, replica) in enumerate(job.each_replica()):
            words = job.train_words(RECIPE_FOLDER, self.options.run, replica)
            port = str(self.options.port + offset)
            command = job.node_command(python, words, [], port=port, folder=RECIPE_FOLDER)
            of_head = {"entrypoint_num_cpus": asked.cpus, "entrypoint_num_gpus": asked.gpus}
            if asked.nodes > 1:  # ray_nodes asks for all nodes, the head's among them
                of_head = {}
                each = f"--nodes {asked.nodes} --cpus {asked.cpus} --gpus {asked.gpus}".split()
                command = [python, "-m", "composer_replication.launch.ray_nodes", *each, "--", *command]
            whole = {"entrypoint": shell_line(command), **of_head, "runtime_env": {"env_vars": variables}}
            files[f"{name}.json"] = f"{json.dumps(whole, indent=2)}\n"
        return files

    def submit(self, job: Job) -> str:
        again = self.folder.stat().st_mtime_ns  # a name may be launched again

        def submit(name: str) -> str:
            request = json.loads((self.folder / f"{name}.json").read_text())
            request["runtime_env"]["working_dir"] = str(self.folder)
            return str(self._asked("submit_job", submission_id=f"{name}-{again}", **request))

        return self.submit_each([name for name, _ in job.each_replica()], submit)

    def status(self, job_id: str) -> JobStatus:
        return _status(self._asked("get_job_info", job_id))

    def logs(self, job_id: str) -> str:
        return str(self._asked("get_job_logs", job_id))

    def stop(self, job_id: str) -> None:
        self._asked("stop_job", job_id)

    def _asked(self, question: str, *words: str, **more: Any) -> Any:
        from ray.job_submission import JobSubmissionClient

        try:
            return getattr(JobSubmissionClient(self.options.address), question)(*words, **more)
        except Exception as error:  # no answer, a wrong address or token: each in Ray's own words
            raise refusal(self.options.address, str(error)) from error


def _status(info: Any) -> JobStatus:
    state = str(getattr(info.status, "value", info.status))
    said = (info.message or "").partition(", last available")[0]
    if state in ("SUCCEEDED", "FAILED") and info.driver_exit_code is not None:
        return ended(info.driver_exit_code, said)
    return told(JobState.__members__.get(state, JobState.WAITING), said)  # Ray has one more name: PENDING
