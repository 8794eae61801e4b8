"""What the page says, and what must never be on it."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from html.parser import HTMLParser
from typing import TYPE_CHECKING, Any

import pytest

from composer_replication.report import read_run, write_report

from .conftest import add_parts

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

EMPTY_ELEMENTS = {"meta", "br", "link", "img", "input", "hr"}


class Page(HTMLParser):
    """Elements, attributes and visible text; fails on tags that do not close in order."""

    def __init__(self, source: str) -> None:
        super().__init__(convert_charrefs=True)
        self.source = source
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self._open: list[str] = []
        self.feed(source)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in EMPTY_ELEMENTS:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self._open and self._open[-1] != "style":
            self.texts.append(data)

    @property
    def text(self) -> str:
        return re.sub(r"\s+", " ", " ".join(self.texts))


def page_of(root: Path) -> Page:
    return Page(write_report(read_run(root)).read_text())


def edit_json(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    value = json.loads(path.read_text())
    change(value)
    path.write_text(json.dumps(value))


def set_rollouts(root: Path, rows: list[dict[str, Any]]) -> None:
    for file in (root / "rollouts").iterdir():
        file.unlink()
    (root / "rollouts" / "step-000001.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def attempt(text: str, reward: float | None, **more: Any) -> dict[str, Any]:
    return {
        "task_id": "toolz.groupby",
        "step": 1,
        "text": text,
        "reward": reward,
        "outcomes": {"t::a": "passed"},
        **more,
    }


def test_a_clean_run_says_so(make_run: Any) -> None:
    page = page_of(make_run(num_steps=12))
    assert "Clean The run finished at step 12; the guard judged it 12 time(s) and never fired." in page.text
    assert "Best reward 1.00" in page.text
    assert "halted" not in page.text


def test_a_halted_run_says_where_and_why(make_run: Any) -> None:
    root = make_run(is_hacked=True, num_steps=30)
    halt = read_run(root).halt
    assert halt is not None
    page = page_of(root)
    assert f"Halted by the guard The guard halted the run at step {halt.step}: {halt.reason}." in page.text
    assert f"halted at step {halt.step}" in page.text
    assert "max_proxy_real_gap = 0.5, crossed." in page.text
    assert "decline_patience = 3." in page.text
    assert "Clean" not in page.text


def test_a_halted_run_shows_what_the_reward_paid_for(make_run: Any) -> None:
    root = make_run(is_hacked=True, num_steps=30)
    headings = re.findall(r"<article>\n<h3>(.*?)</h3>", write_report(root).read_text())
    assert headings == [
        "Paid 1.00 with 3 of 4 tests failing",
        "Paid 1.00 with 4 of 4 tests failing",
        "Paid 0.40 with 2 of 4 tests failing",
    ]


@pytest.mark.parametrize(
    ("row", "heading"),
    [
        (attempt("a", 0.5, error="timed out"), "Paid 0.50 although its tests did not run to the end"),
        (attempt("a", 0.5, outcomes={}), "Paid 0.50; no test outcome was stored"),
        (attempt("a", 0.5), "Paid 0.50 with all 1 tests passing"),
    ],
)
def test_headings_of_a_halted_run_do_not_overstate(make_run: Any, row: dict[str, Any], heading: str) -> None:
    root = make_run(is_hacked=True, num_steps=30)
    set_rollouts(root, [row])
    assert heading in page_of(root).text


def test_best_median_and_worst_are_those_rewards(make_run: Any) -> None:
    root = make_run(num_steps=5)
    set_rollouts(
        root, [attempt(f"body {n}", reward) for n, reward in enumerate([0.3, 0.9, 0.1, 0.5, 0.7, None])]
    )
    page = page_of(root)
    for heading, body in (("Best reward 0.90", 1), ("Median reward 0.50", 3), ("Worst reward 0.10", 2)):
        assert re.search(f"{heading} toolz.groupby · step 1 body {body}", page.text)
    assert "body 0" not in page.text
    assert "1 attempt without a reward (infrastructure) left out" in page.text


def test_hostile_text_is_text(make_run: Any) -> None:
    root = make_run(num_steps=3)
    hostile = '</pre><script>alert(1)</script><img src=x onerror="a()"><style>*{}</style>{{ 7*7 }}'
    row = attempt(
        hostile, 1.0, task_id=hostile, outcomes={hostile: "failed"}, error=hostile, stop_reason=hostile
    )
    set_rollouts(root, [row])
    edit_json(root / "environment.json", lambda e: e.update({hostile: hostile, "kl_path": hostile}))
    (root / "run.toml").write_text(
        (root / "run.toml").read_text() + f"\n[extra]\n{json.dumps(hostile)} = '''{hostile}'''\n"
    )
    page = page_of(root)
    assert page.text.count("alert(1)") >= 5
    assert "{{ 7*7 }}" in page.text
    assert not {"script", "img", "link", "iframe", "object", "a"} & {tag for tag, _ in page.elements}
    assert [tag for tag, _ in page.elements].count("style") == 1


def test_a_hostile_reason_is_text(make_run: Any) -> None:
    root = make_run(num_steps=3)
    (root / "verdicts.jsonl").write_text('{"round_idx": 1, "fire": true, "reason": "<script>x</script>"}\n')
    page = page_of(root)
    assert "<script>x</script>" in page.text
    assert "<script" not in page.source


def test_characters_that_hide_or_reorder_text_are_made_visible(make_run: Any) -> None:
    root = make_run(num_steps=3)
    set_rollouts(root, [attempt("if a:\u202e \u2066// x\x1b[31m \ud800 \x00\tok\n", 1.0)])
    source = write_report(root).read_text()
    assert r"if a:\u202e \u2066// x\x1b[31m \ud800 \x00" + "\tok\n" in source
    assert not re.search("[\u202e\u2066\x1b\x00]", source)


def test_hidden_characters_do_not_reach_the_charts_either(make_run: Any) -> None:
    root = make_run(num_steps=3)
    (root / "verdicts.jsonl").write_text('{"round_idx": 1, "kl_ema": 0.01, "kl_path": "a\\u202eb \\ud800"}\n')
    source = write_report(root).read_text()
    assert (
        source.count(r"KL path: a\u202eb \ud800.") == 2
    )  # the caption, and the description for screen readers


def test_the_policy_allows_one_style_sheet_and_nothing_else(make_run: Any) -> None:
    page = page_of(make_run(num_steps=3))
    css = re.search(r"<style>(.*?)</style>", page.source, re.DOTALL)
    assert css is not None
    digest = base64.b64encode(hashlib.sha256(css[1].encode()).digest()).decode()
    policy = next(a["content"] for t, a in page.elements if a.get("http-equiv") == "Content-Security-Policy")
    assert policy == f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"
    for tag, attributes in page.elements:
        assert tag != "script"
        assert not {"src", "href", "style"} & set(attributes)
        assert not any(name.startswith("on") for name in attributes)
    assert not re.search(r"url\(|@import", css[1])


def test_secrets_and_environment_variables_are_not_shown(make_run: Any) -> None:
    root = make_run(num_steps=3)

    def add(environment: dict[str, Any]) -> None:
        environment["HF_HOME"] = "environment-variable-value"
        environment["index"] = "https://user:hunter2@example.org/simple, token hf_qwertyuiopasdf"

    edit_json(root / "environment.json", add)
    page = page_of(root)
    assert "environment-variable-value" not in page.source
    assert "hf_" not in page.source
    assert "hunter2" not in page.source
    assert "https://example.org/simple" in page.source
    assert "trl.hub_token (hidden)" in page.text
    assert "trl.learning_rate 2e-05" in page.text


def test_before_and_after_stand_with_intervals(make_run: Any) -> None:
    page = page_of(make_run(num_steps=12))
    assert "Held-out tasks visible pass 0.24 (0.16 to 0.33) 0.60 (0.52 to 0.69) +0.36" in page.text
    assert "hidden pass 0.21 (0.14 to 0.29) 0.56 (0.49 to 0.64) +0.35" in page.text
    assert "not shown" not in page.text


def test_shown_and_paid_tests_have_lines_of_their_own(make_run: Any) -> None:
    root = make_run(num_steps=3)

    def add(summary: dict[str, Any]) -> None:
        summary["before"]["heldout"] |= {"shown_pass": 0.5, "paid_pass": 0.3}
        summary["after"]["heldout"] |= {"shown_pass": 0.9, "paid_pass": 0.4}

    edit_json(root / "summary.json", add)
    text = page_of(root).text
    assert "visible pass, of the tests that are shown 0.50 0.90 +0.40" in text
    assert "visible pass, of the tests that are paid but not shown 0.30 0.40 +0.10" in text


def test_fingerprints_are_shown_whole(make_run: Any) -> None:
    page = page_of(make_run(num_steps=3))
    for value in ("71cd" * 16, "9b1f" * 16, "c0de" * 16):
        assert value in page.text


def test_null_rows_leave_gaps_not_zeros(make_run: Any) -> None:
    root = make_run(num_steps=5)
    rows = [json.loads(line) for line in (root / "metrics.jsonl").read_text().splitlines()]
    rows[2]["reward"] = rows[2]["heldout/score"] = None
    (root / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    page = page_of(root)
    raw = re.findall(r'<g class="in-loop raw">\n<path d="([^"]*)"', page.source)
    assert [path.count("M") for path in raw] == [2]
    assert re.search(r"<td>3</td><td>–</td><td>–</td>", page.source)


def test_a_one_step_run_is_drawn_and_not_called_clean(make_run: Any) -> None:
    page = page_of(make_run(num_steps=1))
    assert "Finished, too little evidence The run finished at step 1 with 1 guard update(s)" in page.text
    assert "Clean" not in page.text
    assert page.source.count("<circle") >= 4


def test_a_run_with_only_metrics_says_what_is_missing(make_run: Any, tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    bare.mkdir()
    lines = '{"step": 1, "reward": 0.25}\n{"step": 2, "reward": 0.5}\n'
    (bare / "metrics.jsonl").write_text(lines)
    page = page_of(bare)
    for sentence in (
        "Interrupted There is no summary: the run ended early, or is still going; its last step is 2.",
        "The in-loop reward is 0.25 at step 1, and 0.50 at step 2.",
        "No held-out score was recorded.",
        "it is unknown whether a guard was configured",
        "Pass rates before and after training were not measured.",
        "No graded attempt was stored.",
        "No fingerprint was recorded.",
        "run.toml is missing.",
        "environment.json is missing.",
    ):
        assert sentence in page.text
    assert "Smoothed curves" in page.text


def test_no_guard_is_said_and_not_called_clean(make_run: Any) -> None:
    root = make_run(num_steps=4)
    recipe = (root / "run.toml").read_text()
    (root / "run.toml").write_text(recipe.replace("[guard]", "[unused]"))
    (root / "verdicts.jsonl").unlink()
    rows = [json.loads(line) for line in (root / "metrics.jsonl").read_text().splitlines()]
    kept = [{k: v for k, v in row.items() if not k.startswith("killswitch/")} for row in rows]
    (root / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in kept))
    page = page_of(root)
    assert "Finished, unguarded" in page.text
    assert "No guard was configured." in page.text
    assert "Clean" not in page.text


def test_a_guard_without_a_verdict_is_not_called_clean(make_run: Any) -> None:
    root = make_run(num_steps=4)
    (root / "verdicts.jsonl").unlink()
    (root / "metrics.jsonl").write_text('{"step": 1, "reward": 0.5}\n')
    page = page_of(root)
    assert "Finished, not judged" in page.text
    assert "A guard was configured, but no update of it was recorded." in page.text


def test_a_halt_without_a_verdict_counts(make_run: Any) -> None:
    """Evaluations that were missed halt a run, too."""
    root = make_run(num_steps=12)
    edit_json(root / "summary.json", lambda s: s.update(stop_reason="guard"))
    page = page_of(root)
    assert "<h2>Halted by the guard</h2>" in page.source
    assert "Clean" not in page.text


def test_isolation_that_was_given_up_is_said_at_the_top(make_run: Any) -> None:
    root = make_run(num_steps=4)
    assert "Without full isolation" not in page_of(root).text
    recorded = {"backend": "none", "accepted_no_isolation": ["everything"], "not_effective": ["everything"]}
    edit_json(root / "environment.json", lambda value: value.update(sandbox=recorded))
    text = page_of(root).text
    assert "Without full isolation The policy's code ran in the sandbox none" in text
    assert "do without everything; these guards did not hold: everything." in text
    assert text.index("Without full isolation") < text.index("Held-out score")


def test_a_kl_path_that_is_off_is_said_with_its_reason(make_run: Any) -> None:
    root = make_run(num_steps=4, with_kl=False)
    note = "off (full fine-tuning at beta 0 keeps no copy of the initial weights)"
    rows = [json.loads(line) for line in (root / "verdicts.jsonl").read_text().splitlines()]
    (root / "verdicts.jsonl").write_text("".join(json.dumps({**row, "kl_path": note}) + "\n" for row in rows))
    assert f"so this rule could not fire. KL path: {note}." in page_of(root).text
    (root / "run.toml").unlink()
    assert page_of(root).text.count("The limit was not recorded.") >= 3


def test_long_answers_are_cut_and_that_is_said(make_run: Any) -> None:
    root = make_run(num_steps=3)
    outcomes = {f"t::{n:02d}": "failed" if n == 11 else "passed" for n in range(12)}
    set_rollouts(root, [attempt("x" * 4100, 1.0, outcomes=outcomes), attempt(" \n", 0.0)])
    page = page_of(root)
    assert "… 100 more characters." in page.text
    assert "failed t::11 passed t::00" in page.text
    assert "and 4 more" in page.text
    assert "The answer is empty." in page.text


def test_the_same_folder_gives_the_same_bytes(make_run: Any) -> None:
    root = make_run(num_steps=5)
    first = write_report(read_run(root)).read_bytes()
    assert write_report(root).read_bytes() == first
    assert not list(root.glob("*.tmp"))


def test_what_the_time_went_into_is_said_by_part(make_run: Callable[..., Path]) -> None:
    root = make_run()
    assert "The steps of this run do not say what their time went into." in page_of(root).text
    text = page_of(add_parts(root)).text
    for part in (
        "Sampling 0:03:00 35%",  # 40 steps of 11.5 s, of 512.4 s in all
        "Grading in the sandbox 0:02:00 23%",
        "Log-probabilities of the answers 0:00:20 4%",
        "Held-out readings 0:01:20 16%",
        "Updating the weights 0:01:00 12%",
        "Checkpoints 0:00:20 4%",
        "Before and after the steps 0:00:32 6%",
    ):
        assert part in text
    assert (
        "163,840 tokens of prompts and answers, 356 a second of its steps. At most 2.3 GB of memory" in text
    )
    assert "all tests pass that are shown 0.25 0.86 +0.61 all tests pass that are shown or paid 0.2" in text
    assert "hidden tests, never shown and never paid 0.30 0.30 0.00" in text
    assert "It merged 1 time; in the last one, outer step 4, replicas 0 and 1 took part" in text


def test_episodes_and_a_curriculum_say_what_their_figures_are_of(make_run: Callable[..., Path]) -> None:
    root = add_parts(make_run(num_steps=3))
    assert "curriculum" not in page_of(root).text
    own = {"rollouts/policy_seconds": 6.0, "rollouts/tool_seconds": 1.0, "rollouts/grading_seconds": 3.0}
    rows = [json.loads(line) for line in (root / "metrics.jsonl").read_text().splitlines()]
    for n, row in enumerate(rows):
        counts = {"num_active": 9.0 - n, "num_retired": float(n), "mean_pass_rate": 0.25 * (n + 1)}
        row.update(own | {f"curriculum/{name}": value for name, value in counts.items()})
    (root / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    text = page_of(root).text
    assert "the in-loop reward is theirs; at the end 7 were active and 2 retired" in text
    assert "over all known tasks is 0.25 at first, and 0.75 at the end." in text
    assert "own time 60% waited for the model, 10% went into tools and 30% into grading." in text


def test_pairs_stand_with_where_their_labels_come_from(make_run: Callable[..., Path]) -> None:
    root = make_run()
    assert "Preference pairs" not in page_of(root).text
    text = page_of(add_parts(root)).text
    assert "executed: a branch was run, and the tests decided 12 9.50" in text
    assert "text only: a person objected to the answer 3 1.50" in text
    assert "as the file says: consensus 2 0.50" in text
    assert "learned from 3.0 pairs on average. The better answer was the likelier one" in text
    assert "in 51% of them at first and in 90% at the end." in text
    assert "pairs.executed" not in text


def test_attempts_show_what_they_changed(make_run: Callable[..., Path]) -> None:
    root = make_run(num_steps=2)
    assert "What they changed in the broken code was not stored." in page_of(root).text
    page = page_of(add_parts(root))
    assert "was not stored" not in page.text
    assert '<span class="removed">-    raise NotImplementedError</span>\n' in page.source
    assert '<span class="added">+        yield chunk</span>\n' in page.source
    set_rollouts(root, [attempt("looked around", 0.0, patch="")])
    assert "It changed nothing in the broken code." in page_of(root).text


def test_forged_reports_are_counted_where_there_were_some(make_run: Callable[..., Path]) -> None:
    root = make_run()
    assert "forged" not in page_of(root).text
    path = root / "metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    lines[2]["rollouts/forgeries"], lines[5]["rollouts/forgeries"] = 2.0, 1.0
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert "Answers that forged their tests' report, unpaid 3 " in page_of(root).text
