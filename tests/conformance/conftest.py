"""Who is held to the contract: every backend that works on this machine, and those that need a service
over a fake one. A fake confines exactly as far as it is asked to, so what holds there was asked for;
that a real engine or cluster does what it is asked is not shown here.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from composer_replication.interfaces import SandboxBackend
from composer_replication.sandbox import acceptance, choose_backend
from composer_replication.sandbox.choice import BACKENDS

sys.path.insert(0, str(Path(__file__).parents[1] / "fakes"))

OVER_FAKES = ("docker-over-fake", "podman-over-fake", "kubernetes-over-fake")

_SERVICE = (
    "the service keeps it; it is removed by the next process (docker, podman), or dies at its time to live"
)
_PIPES = "the pipes of a container belong to the engine's user, so /dev/stdout cannot be opened by name"
KNOWN_FAILURES = {
    ("docker", "test_the_jail_dies_with_us"): _SERVICE,
    ("podman", "test_the_jail_dies_with_us"): _SERVICE,
    ("kubernetes", "test_the_jail_dies_with_us"): _SERVICE,
    ("docker", "test_streams_can_be_opened_by_name"): _PIPES,
    ("podman", "test_streams_can_be_opened_by_name"): _PIPES,
    ("kubernetes", "test_streams_can_be_opened_by_name"): _PIPES,
}
"""(backend, test): why the contract does not hold there. Each fails for certain, or it would not be listed."""

# A test that tries to get out does get out where nothing holds it, and changes this very machine (one of
# them renames all of /tmp). So this is a list of what may run without a jail: a test is not on it
# until somebody has read that it touches nothing but its tree.
HARMLESS_WITHOUT_ISOLATION = {
    "test_exit_code",
    "test_a_command_that_does_not_exist_is_an_ordinary_result",
    "test_arguments_arrive_as_given",
    "test_a_command_must_not_be_empty",
    "test_one_text_is_for_the_shell",
    "test_the_time_out_must_be_above_zero",
    "test_large_stdin_and_stdout_do_not_block_each_other",
    "test_stdin_that_nobody_reads",
    "test_without_stdin_there_is_an_end_of_file",
    "test_environment_holds_what_env_names_and_nothing_of_ours",
    "test_binary_output_is_decoded_with_replacement",
    "test_each_stream_is_cut",
    "test_time_out_kills_daemons",
    "test_a_child_that_keeps_the_output_open_does_not_hold_us",
    "test_several_commands_in_one_sandbox_at_once",
    "test_memory_of_one_process",
    "test_the_tree_must_be_a_folder",
    "test_a_missing_read_only_path",
    "test_the_tree_holds_nothing_read_only_or_masked",
    "test_what_is_written_is_read_inside_and_outside",
    "test_a_written_file_belongs_to_the_user_inside",
    "test_writing_replaces_and_leaves_nothing_beside",
    "test_links_inside_are_followed",
    "test_an_unknown_snapshot_is_refused",
    "test_after_close_nothing_is_answered",
}


NEVER_OVER_FAKES = "test_links_that_one_command_plants_do_not_lead_the_next_one_s_mounts_out"
"""It renames all of /tmp wherever it gets out: a hole in a fake must not cost anybody that."""


@pytest.fixture(
    params=[*sorted(BACKENDS), *(pytest.param(name, marks=pytest.mark.fakes) for name in OVER_FAKES)]
)
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[SandboxBackend]:
    name, _, fake = request.param.partition("-over-")
    if name == acceptance.WITHOUT_ISOLATION and request.node.originalname not in HARMLESS_WITHOUT_ISOLATION:
        pytest.skip("not read as harmless: without a jail it might change what lies outside the tree")
    if fake and request.node.originalname == NEVER_OVER_FAKES:
        pytest.skip("it would rename all of /tmp if the fake had a hole")
    reason = KNOWN_FAILURES.get((name, request.node.originalname))
    if reason is not None:
        request.applymarker(pytest.mark.xfail(reason=reason, strict=True))
    with ExitStack() as stack:
        if fake:
            _start_fake(name, stack, monkeypatch)
        if name == acceptance.WITHOUT_ISOLATION:
            acceptance.accept([acceptance.EVERYTHING])
            stack.callback(acceptance.forget)
        chosen = choose_backend(name)
        if not fake:
            check = chosen.is_available()
            if not check.ok:
                pytest.skip(f"{name} is not available here: {check.detail}")
        yield chosen


def _start_fake(name: str, stack: ExitStack, monkeypatch: pytest.MonkeyPatch) -> None:
    if shutil.which("bwrap") is None:
        pytest.skip("the fakes run their containers with bwrap, which is not here")
    folder = Path(tempfile.mkdtemp(prefix="fake-"))  # short: a socket's path has 107 bytes
    folder.chmod(0o755)
    stack.callback(shutil.rmtree, folder, ignore_errors=True)
    if name == "kubernetes":
        if os.geteuid() != 0 or shutil.which("nsenter") is None:
            pytest.skip("the fake cluster enters its containers with nsenter, which only root may")
        from cluster_server import FakeCluster

        cluster = stack.enter_context(FakeCluster(folder))
        monkeypatch.setenv("KUBECONFIG", str(cluster.write_kubeconfig(folder / "config")))
        monkeypatch.setenv("COMPOSER_RL_POD_IMAGE", "registry.example/trainer:1")
        return
    from engine_server import FakeEngine

    engine = stack.enter_context(FakeEngine(folder))
    if name == "podman":
        engine.api_version, engine.components = "1.41", [{"Name": "Podman Engine", "Version": "5.0.0"}]
    variable = "CONTAINER_HOST" if name == "podman" else "DOCKER_HOST"
    monkeypatch.setenv(variable, f"unix://{engine.socket_path}")
