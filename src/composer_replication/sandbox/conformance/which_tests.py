"""Which tests of the contract a backend is known to fail, and which may run where nothing holds."""

from __future__ import annotations

from collections.abc import Mapping

from composer_replication.interfaces import SandboxBackend

# A test that tries to get out does get out where nothing holds it, and changes this very machine (one of
# them renames all of /tmp). So this is a list of what may run without a jail: a test is not on it
# until somebody has read that it touches nothing but its tree.
HARMLESS_WITHOUT_ISOLATION = frozenset({
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
    "test_a_tree_that_a_command_closed_is_open_to_the_next_call",
    "test_what_a_command_closed_is_kept_and_comes_back",
    "test_a_closed_folder_is_listed",
    "test_after_close_nothing_is_answered",
    "test_a_nul_byte_is_refused",
    "test_a_path_that_has_no_bytes_is_refused",
    "test_what_is_no_call_is_refused_before_anything_starts",
    "test_input_may_be_any_bytes",
    "test_limits_that_nothing_can_hold_are_refused",
    "test_a_tree_that_is_gone_is_a_failure_of_the_sandbox",
    "test_a_command_that_is_too_long_is_an_ordinary_result",
    "test_a_command_that_is_nearly_too_long_runs",
    "test_a_socket_in_the_tree_is_refused",
    "test_input_of_every_byte_arrives",
})  # fmt: skip


def known_failures(backend: SandboxBackend) -> Mapping[str, str]:
    """What this backend is known not to keep, by test and with a reason: its attribute ``known_failures``."""
    named: Mapping[str, str] = getattr(backend, "known_failures", {})
    return named
