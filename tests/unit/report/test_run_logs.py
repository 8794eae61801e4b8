"""Each form of a log, read back as columns; what is tolerated is noted, what is not is one sentence."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from composer_replication.errors import ComposerError, InputError
from composer_replication.report.guard_scan import choose_columns, readings_of
from composer_replication.report.run_logs import RunLog, read_log

ROWS: list[dict[str, Any]] = [
    {"step": 10, "reward": 0.5, "note": "warm"},
    {"step": 10, "eval_reward": 0.25},
    {"step": 20, "reward": 1.0},
]
REWARD = ([10, 20], [0.5, 1.0])
EVAL = ([10], [0.25])


def write_jsonl(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def column(log: RunLog, name: str) -> tuple[list[int], list[float]]:
    numbers = log.columns[name].numbers
    return [step for step, *_ in numbers], [value for _, value, _ in numbers]


def refused(path: Path, **settings: Any) -> InputError:
    with pytest.raises(InputError) as caught:
        read_log(path, **settings)
    assert caught.value.fix
    return caught.value


def test_json_lines(tmp_path: Path) -> None:
    log = read_log(write_jsonl(tmp_path / "log.jsonl", ROWS))
    assert (log.step_column, log.notes) == ("step", ())
    assert column(log, "reward") == REWARD
    assert column(log, "eval_reward") == EVAL
    assert [place for *_, place in log.columns["reward"].numbers] == [f"{log.path}:1", f"{log.path}:3"]
    assert log.columns["note"].num_bad == 1


def test_a_table_of_another_program(tmp_path: Path) -> None:
    frame = pd.DataFrame({"Step": [10, 20], "train/reward": [0.5, 1.0], "eval/reward": [0.25, None]})
    frame.to_csv(tmp_path / "log.csv", index=False)
    log = read_log(tmp_path / "log.csv")
    assert log.step_column == "Step"
    assert column(log, "train/reward") == REWARD
    assert column(log, "eval/reward") == EVAL
    frame.to_csv(tmp_path / "log.tsv", sep="\t")  # with the frame's own index in front
    assert column(read_log(tmp_path / "log.tsv"), "train/reward") == REWARD


def test_quoted_cells_and_a_byte_order_mark(tmp_path: Path) -> None:
    with (tmp_path / "log.csv").open("w", encoding="utf-8-sig", newline="") as handle:
        writer = csv.writer(handle, delimiter=";")
        writer.writerows([["step", "comment", "reward"], [1, 'two;"\nlines', 0.5], [2, "", 1.0]])
    log = read_log(tmp_path / "log.csv")
    assert column(log, "reward") == ([1, 2], [0.5, 1.0])


@pytest.mark.parametrize("indent", [None, 2])
def test_trainer_state(tmp_path: Path, indent: int | None) -> None:
    state = {"global_step": 20, "log_history": ROWS, "stateful_callbacks": {}}
    (tmp_path / "trainer_state.json").write_text(json.dumps(state, indent=indent))
    log = read_log(tmp_path / "trainer_state.json")
    assert log.columns["reward"].numbers[0] == (10, 0.5, f"{log.path}, entry 1")
    assert column(log, "reward") == REWARD
    assert column(log, "eval_reward") == EVAL


def test_nested_names_are_joined(tmp_path: Path) -> None:
    """The form of verl's file logger."""
    rows = [{"step": 3, "data": {"critic/score/mean": 0.5, "deep": {"er": 1.5}}}]
    log = read_log(write_jsonl(tmp_path / "log.jsonl", rows))
    assert column(log, "data/critic/score/mean") == ([3], [0.5])
    assert column(log, "data/deep/er") == ([3], [1.5])


@pytest.mark.parametrize(
    ("names", "chosen"),
    [
        (("_step", "train/global_step"), "train/global_step"),
        (("_step", "Step"), "Step"),
        (("iteration", "epoch"), "iteration"),
    ],
)
def test_the_step_column(tmp_path: Path, names: tuple[str, ...], chosen: str) -> None:
    rows = [dict.fromkeys(names, 7) | {"reward": 1.0}]
    log = read_log(write_jsonl(tmp_path / "log.jsonl", rows))
    assert log.step_column == chosen
    assert column(log, "reward") == ([7], [1.0])


def test_a_named_step_column(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "log.jsonl", [{"step": 1, "update": 5, "reward": 1.0}])
    assert column(read_log(path, step="update"), "reward") == ([5], [1.0])
    assert refused(path, step="updates").code == "CR0633"


def test_without_steps_nothing_can_be_said(tmp_path: Path) -> None:
    assert refused(write_jsonl(tmp_path / "log.jsonl", [{"reward": 0.5}])).code == "CR0633"


def test_rows_without_a_step_are_left_out_and_noted(tmp_path: Path) -> None:
    rows = [{"config": {"lr": 0.1}, "reward": 9.0}, *ROWS, {"reward": 8.0, "step": None}]
    log = read_log(write_jsonl(tmp_path / "log.jsonl", rows))
    assert column(log, "reward") == REWARD
    assert log.notes == ("2 row(s) without a step were left out.",)


def test_what_is_no_finite_number_is_counted(tmp_path: Path) -> None:
    lines = [
        '{"step": 1, "r": NaN}',
        '{"step": 2, "r": null}',
        '{"step": 3, "r": 1e999}',
        '{"step": 4, "r": "2"}',
    ]
    (tmp_path / "log.jsonl").write_text(
        "\n".join([*lines, '{"step": 5, "r": true}', f'{{"step": 6, "r": {9**400}}}'])
    )
    found = read_log(tmp_path / "log.jsonl").columns["r"]
    assert ([value for _, value, _ in found.numbers], found.num_bad) == ([2.0], 4)


@pytest.mark.parametrize("tail", ['{"step": 30, "rew', '{"step": 30, "reward": 1.0}garbage\n', "\xff"])
def test_a_torn_last_line_is_noted(tmp_path: Path, tail: str) -> None:
    path = write_jsonl(tmp_path / "log.jsonl", ROWS)
    path.write_bytes(path.read_bytes() + tail.encode("latin-1"))
    log = read_log(path)
    assert column(log, "reward") == REWARD
    assert log.notes == ("The last line (4) is incomplete and was left out.",)


@pytest.mark.parametrize("tail", ["30,1.", "30,1.0,0."])
def test_a_torn_last_row_of_a_table_is_noted(tmp_path: Path, tail: str) -> None:
    (tmp_path / "log.csv").write_text(f"step,reward,kl\n10,0.5,0.1\n20,1.0,0.2\n{tail}")
    log = read_log(tmp_path / "log.csv")
    assert column(log, "reward") == REWARD
    assert log.notes == ("The last line (4) is incomplete and was left out.",)


def test_a_resumed_run(tmp_path: Path) -> None:
    """Saved at 20, killed after 40, resumed: what was written after 20 does not count, in any column."""
    first = [{"step": step, "reward": float(step)} for step in (10, 20, 30, 40)]
    first.append({"step": 40, "eval_reward": 4.0})
    second = [{"step": step, "reward": step + 0.5} for step in (30, 40, 50)]
    path = write_jsonl(tmp_path / "log.jsonl", [*first, *second, {"step": 50, "eval_reward": 5.0}])
    log = read_log(path, resumed=True)
    assert column(log, "reward") == ([10, 20, 30, 40, 50], [10.0, 20.0, 30.5, 40.5, 50.5])
    assert column(log, "eval_reward") == ([50], [5.0])
    assert log.notes == ("3 row(s) of a broken-off run were left out.",)
    assert column(read_log(path), "reward")[0] == [10, 20, 30, 40, 30, 40, 50]  # otherwise kept as it is


def test_the_newer_value_of_a_step_counts_after_a_resume(tmp_path: Path) -> None:
    path = write_jsonl(
        tmp_path / "log.jsonl", [{"step": 1, "r": 1.0}, {"step": 1, "r": 2.0}, {"step": 1, "q": 3.0, "r": ""}]
    )
    log = read_log(path, resumed=True)
    assert (column(log, "r"), column(log, "q")) == (([1], [2.0]), ([1], [3.0]))


# ---------------------------------------------------------------------------- folders


def test_a_folder_stands_for_its_log(tmp_path: Path) -> None:
    for name, reward in (("checkpoint-9", 1.0), ("checkpoint-10", 2.0)):
        (tmp_path / name).mkdir()
        state = {"log_history": [{"step": 1, "reward": reward}]}
        (tmp_path / name / "trainer_state.json").write_text(json.dumps(state))
    assert column(read_log(tmp_path), "reward") == ([1], [2.0])  # the newest by number, not by name
    assert column(read_log(tmp_path / "checkpoint-9"), "reward") == ([1], [1.0])
    write_jsonl(tmp_path / "metrics.jsonl", [{"step": 1, "reward": 3.0}])
    assert column(read_log(tmp_path), "reward") == ([1], [3.0])


def test_a_folder_without_a_log(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("nothing")
    assert refused(tmp_path).code == "CR0630"


def test_a_folder_of_several_runs_names_them(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / "runs" / name).mkdir(parents=True)
        (tmp_path / "runs" / name / "events.out.tfevents.1.host").touch()
    error = refused(tmp_path)
    assert error.code == "CR0630"
    assert "2 runs, runs/a, runs/b." in error.message


# ------------------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "empty"),
        (b" \n\n", "empty"),
        (b'{"log_history": []}', "empty"),
        (b"\x89PNG\r\n\x1a\n\x00\x00", "no UTF-8"),
        (b"\x1f\x8b\x08\x08\xff\xfe\xc3", "no UTF-8"),
        (b"1,0.25\n2,0.5\n", "no header"),
        (b"step,reward,reward\n1,2,3\n", "no header"),
        (b"hello\n", "neither JSON nor a header"),
        (b'{\n "model": "x"\n}', "none named log_history"),
        (b'{"a": 1', "it is not JSON"),
        (b"{'reward': 0.31, 'epoch': 0.1}\n", "as Python prints them"),
        (b'{"a": 1}\n{"a"\n{"a": 3}\n', "line 2 cannot be used: it is not a JSON object"),
        (b'{"a": 1}\n[1]\n', "line 2 cannot be used: it is not a JSON object"),
        (b'{"log_history": [{"step": 1}, 5]}', "no list of JSON objects"),
        (b"step,r\n1,2\n3\n4,5\n", "line 3 cannot be used: its cells are not as many"),
        (b'step,r\n1,"2\n', "line 2 cannot be used: unexpected end of data"),
        (b"[" * 100_000, "it is not JSON"),
    ],
)
def test_a_file_that_cannot_be_used(tmp_path: Path, content: bytes, words: str) -> None:
    path = tmp_path / "log"
    path.write_bytes(content)
    error = refused(path)
    assert (error.code, "\n" in error.message) == ("CR0630", False)
    assert words in error.message
    assert str(path) in error.where
    assert path.read_bytes() == content


def test_no_such_file(tmp_path: Path) -> None:
    error = refused(tmp_path / "absent.jsonl")
    assert (error.code, error.message) == ("CR0630", "the log cannot be used: No such file or directory.")


@pytest.mark.parametrize("form", ["jsonl", "csv"])
def test_every_prefix_of_a_log_gives_its_whole_rows(tmp_path: Path, form: str) -> None:
    """A crash may cut a file anywhere; nothing before the cut is lost and nothing is made up."""
    frame = pd.DataFrame({"step": [1, 2, 3], "reward": [0.125, 0.25, 0.5], "kl": [1.5, 2.5, 3.5]})
    text = frame.to_json(orient="records", lines=True) if form == "jsonl" else frame.to_csv(index=False)
    path = tmp_path / "log"
    for size in range(text.index("0.25"), len(text) + 1):
        path.write_text(text[:size])
        log = read_log(path)
        num_whole = text[:size].count("\n") - (form == "csv")
        is_whole_object = form == "jsonl" and text[:size].endswith("}")  # only its line end is missing
        for name in ("reward", "kl"):
            expected = frame[["step", name]].head(num_whole + is_whole_object)
            assert column(log, name) == (list(expected["step"]), list(expected[name]))
        assert bool(log.notes) is not (is_whole_object or text[size - 1] == "\n")


VALID = b"".join(json.dumps(row).encode() + b"\n" for row in ROWS)
TABLE = b"step,reward,eval_reward\n1,0.5,0.25\n2,0.75,\n"
changes = st.lists(st.tuples(st.integers(0, 200), st.binary(max_size=4)), max_size=4)


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(start=st.sampled_from([VALID, TABLE, b""]), edits=changes, tail=st.binary(max_size=60))
def test_no_file_ends_in_a_traceback(
    tmp_path: Path, start: bytes, edits: list[tuple[int, bytes]], tail: bytes
) -> None:
    content = bytearray(start + tail)
    for position, piece in edits:
        content[position : position + len(piece)] = piece
    path = tmp_path / "log"
    path.write_bytes(content)
    known: ComposerError | ImportError | None = None
    try:
        log = read_log(path)
        readings_of(log, choose_columns(log))
    except (ComposerError, ImportError) as error:  # an import, where it looks like an event file by chance
        known = error
    assert not isinstance(known, ComposerError) or known.exit_code == 4
    assert path.read_bytes() == content


@pytest.mark.parametrize("step", ["1.5", '"first"', "1e300"])
def test_a_step_is_a_whole_number(tmp_path: Path, step: str) -> None:
    (tmp_path / "log").write_text(f'{{"step": {step}, "r": 1}}\n')
    assert (refused(tmp_path / "log").code, "no whole number" in refused(tmp_path / "log").message) == (
        "CR0633",
        True,
    )


def test_a_value_that_is_written_twice_counts_once(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_text('{"step": 1, "eval_reward": 0.5}\n{"step": 1, "eval_reward": 0.5}\n')
    assert column(read_log(path), "eval_reward") == ([1], [0.5])


@pytest.mark.parametrize(
    "content",
    [
        b"step;reward\n1;0,25\n2;31,5\n",
        b"step,reward\n1,25%\n2,3150 %\n",
        "step,reward\n1,0.25\n2,31.5\n".encode("utf-16"),
    ],
    ids=["decimal comma", "per cent", "utf-16"],
)
def test_numbers_as_people_write_them(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "log.csv").write_bytes(content)
    assert column(read_log(tmp_path / "log.csv"), "reward") == ([1, 2], [0.25, 31.5])


def test_a_comma_that_may_group_thousands_makes_no_number(tmp_path: Path) -> None:
    (tmp_path / "log.csv").write_text("step;reward\n1;0,5\n2;1,234\n")
    assert read_log(tmp_path / "log.csv").columns["reward"].num_bad == 1
