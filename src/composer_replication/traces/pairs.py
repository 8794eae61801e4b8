r"""Sessions as chats with our tools, the steps worth asking about, and the rows made of them: preference pairs and supervised ones.

A file of pairs has one JSON object a line, in the two shapes of TRL's preference data sets, or the same rows as Parquet:

    {"prompt": "def f(x):\n", "chosen": "    return x\n", "rejected": "    pass\n"}
    {"prompt": [{"role": "user", "content": "…"}], "chosen": [{"role": "assistant", "content": "…"}], "rejected": […]}

``weight`` and ``source`` may stand beside them, and ``tools`` (a list, or its JSON) beside messages; other keys are passed over.
"""

from __future__ import annotations

import itertools
import json
import math
import re
import tomllib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from composer_replication.errors import needs_extra
from composer_replication.records import ToolCall
from composer_replication.rollouts.tokens.pair_ids import SIDES, PairRow, unusable_pair
from composer_replication.rollouts.tools.tool_context import function_schema
from composer_replication.rollouts.tools.toolbox import TOOLS
from composer_replication.traces.json_values import at, items_at, json_text, parsed, typed
from composer_replication.traces.trace_records import NOT_LEARNED, Trace

_SCHEMAS = [function_schema(tool) for tool in TOOLS]
_TAKES = {each["function"]["name"]: each["function"]["parameters"]["properties"] for each in _SCHEMAS}
_NAMES = tomllib.loads(Path(__file__).with_name("tool_names.toml").read_text(encoding="utf-8"))
_TOOLS = {foreign: name for name in _TAKES for foreign in (name, *_NAMES["tools"].get(name, ()))}
USUAL_FOLDER = "/testbed"  # where images of SWE-bench and its kin have the repository
EDITS = frozenset({"write_file", "str_replace"})
_PATCH = re.compile(_NAMES["patch"])
Message = dict[str, Any]  # of a chat, as templates take it: arguments of calls are objects where they can be
REBUILT_PROMPT = """\
You are a coding agent. You work in the root of a repository, through tools. The conversation so far was recorded; go on with \
the next answer."""
NO_RESULT = "(no result was recorded)"
OLD_RESULT_CHARACTERS = 2000
NUM_WHOLE_RESULTS = 6  # of the last steps; older ones are cut, the same way for every side of a comparison
WORTH: Mapping[str, int] = {"denied": 8, "interrupted": 6, "error": 4, "edit": 2}
"""How much a sign says that another answer may have been better: people's own objections first."""
WEIGHTS: Mapping[str, float] = {"executed": 1.0, "siblings": 0.5, "objection": 0.5}
TEXT_ONLY = 0.5  # times the weight where neither side calls anything, so that no test tells them apart
MAX_LENGTH_RATIO = 8.0  # a side that has so many times the characters of the other one would teach length
MAX_SHARE_OF_LAST = 0.25  # that may speak of the last step of a session: else ending early is what is learned
_REFUSED = {"denied", "interrupted"}
Rows = tuple[list[PairRow], Counter[str]]  # rows that are kept, and how many were dropped by reason
HeldoutRows = Callable[[Sequence[Mapping[str, Any]]], set[int]]
"""The places of rows that are of a held-out task or show its code."""


def our_call(call: ToolCall, folder: str = "") -> ToolCall | None:
    """The call with our tool and arguments, paths relative to the session's ``folder``; None where we have no such tool."""
    given, folder = parsed(call.arguments or "{}"), folder or USUAL_FOLDER
    if not isinstance(given, dict):
        return None
    name = _TOOLS.get(call.name, "")
    patch = str(given.get("input") or given.get("cmd") or given.get("command"))
    if "*** Begin Patch" in patch and "apply_patch" in f"{call.name} {call.arguments}":
        if (found := _PATCH.search(patch)) is None:
            return None
        kind, path, lines = found[1], found[2].strip(), found[3].splitlines()
        old, new = ("\n".join(line[1:] for line in lines if line[:1] != left_out) for left_out in "+-")
        name = "write_file" if kind == "Add" else "str_replace"
        given = {"path": path, "content": f"{new}\n", "old_str": old, "new_str": new}
    elif call.name in _NAMES["editor"]["names"]:
        name = str(_NAMES["editor"].get(str(given.get("command"))))
    if name not in _TAKES:
        return None
    renamed = {_NAMES["arguments"].get(key, key): value for key, value in given.items()}
    ours = {key: value for key, value in renamed.items() if key in _TAKES[name]}
    first, limit = typed(int, given.get("offset")) or 1, typed(int, given.get("limit"))
    if call.name == "Glob":
        ours["command"] = f"find . -path './{given.get('pattern', '')}'"
    elif call.name == "Read" and (first > 1 or limit):
        ours |= {"first_line": first} | ({"last_line": first + limit - 1} if limit else {})
    elif name == "read_file" and len(lines := items_at(given, "view_range")) == 2:
        ours |= {"first_line": lines[0], "last_line": max(0, lines[1])}
    if words := [str(word) for word in items_at(ours, "command")]:  # of Codex, most often a shell's
        is_shell = words[:2] in (["bash", "-lc"], ["sh", "-c"]) and len(words) == 3
        ours["command"] = words[2] if is_shell else " ".join(words)
    if isinstance(path := ours.get("path"), str):
        ours["path"] = path.removeprefix(f"{folder}/")
    if isinstance(command := ours.get("command"), str):
        ours["command"] = command.replace(f"cd {folder} && ", "").replace(f"{folder}/", "")
    return ToolCall(name, json_text(ours), call.call_id)


def our_calls(trace: Trace, idx: int) -> list[ToolCall]:
    """The calls of a step with our tools, as far as there are any; others as they were."""
    return [our_call(call, trace.folder) or call for call in trace.steps[idx].calls]


def assistant_message(text: str, calls: list[ToolCall]) -> Message:
    """An answer."""
    message: Message = {"role": "assistant", "content": text}
    for number, call in enumerate(calls):
        given = parsed(call.arguments or "{}")
        function = {"name": call.name, "arguments": given if isinstance(given, dict) else call.arguments}
        row = {"id": call.call_id or f"call-{number}", "type": "function", "function": function}
        message.setdefault("tool_calls", []).append(row)
    return message


def with_text(message: Message) -> Message:
    """The message with its calls' arguments as text, which servers want."""
    rows = [(call, call["function"]) for call in message.get("tool_calls", ())]
    calls = [{**call, "function": own | {"arguments": json_text(own["arguments"])}} for call, own in rows]
    return {**message, "tool_calls": calls} if calls else message


def recorded_answer(trace: Trace, idx: int) -> Message:
    """What was answered at a step, with the tools that are offered there."""
    calls = trace.steps[idx].calls if tools_of(trace) is trace.tools else our_calls(trace, idx)
    return assistant_message(trace.steps[idx].text, calls)


def calls_of(message: Message) -> list[ToolCall]:
    """The calls of an answer."""
    rows = [(call["function"], call["id"]) for call in message.get("tool_calls", ())]
    return [ToolCall(own["name"], json_text(own["arguments"]), call_id) for own, call_id in rows]


def action(message: Message) -> str:
    """What an answer does: its calls, however their arguments are spelled; its text where it calls nothing."""
    functions = [call["function"] for call in message.get("tool_calls", ())]
    return json.dumps(functions, sort_keys=True) if functions else str(message["content"]).strip()


def prompt_of(trace: Trace, idx: int) -> list[Message]:
    """The chat before step ``idx``; one that was not recorded begins with our own words."""
    path = trace.path_to(idx)
    messages = [] if trace.prompt_origin == "recorded" else [{"role": "system", "content": REBUILT_PROMPT}]
    for number, place in enumerate(path):
        step = trace.steps[place]
        if step.source == "system" and trace.prompt_origin == "rebuilt" and len(messages) == 1:
            messages[0]["content"] += f"\n\n{step.text}"  # strict templates take no second one
        elif step.source != "agent":
            messages.append({"role": step.source, "content": step.text})
        elif "synthetic" not in step.flags:
            answer = recorded_answer(trace, place)
            messages.append(answer)
            known = {result.call_id: result.text for result in step.results}
            for call in calls_of(answer):
                text = known.get(call.call_id, NO_RESULT)
                if number < len(path) - NUM_WHOLE_RESULTS and len(text) > OLD_RESULT_CHARACTERS:
                    text = f"{text[:OLD_RESULT_CHARACTERS]}\n(cut)"
                messages.append({"role": "tool", "tool_call_id": call.call_id, "content": text})
    return messages


def tools_of(trace: Trace) -> list[dict[str, Any]]:
    """What may be called: our tools, or those of the recorded prompt where they are others and it is kept as it was."""
    return trace.tools if trace.tools and not trace.task_id else _SCHEMAS


class ChosenStep(NamedTuple):
    """A step that is asked again, why, and what each teacher answers; None of one that gave no answer."""

    trace: Trace
    idx: int
    reasons: list[str]
    answers: Mapping[str, Message | None] = {}

    @property
    def others(self) -> list[tuple[str, Message]]:
        """Answers that do something else than what was recorded, each once, with the first teacher that gave it."""
        found: dict[str, tuple[str, Message]] = {}
        for name, answer in self.answers.items():
            if answer is not None:
                found.setdefault(action(answer), (name, answer))
        found.pop(action(recorded_answer(self.trace, self.idx)), None)
        return list(found.values())

    def row(self) -> dict[str, Any]:
        """A line of ``replay.jsonl``."""
        known = {"trace_id": self.trace.trace_id, "step": self.idx, "prompt_origin": self.trace.prompt_origin}
        answers = [{"teacher": name, "answer": answer} for name, answer in self.answers.items()]
        recorded = recorded_answer(self.trace, self.idx)
        return {**known, "reasons": self.reasons, "recorded": recorded, "answers": answers}


def chosen_steps(traces: list[Trace], max_steps: int, *, takes_all: bool = False) -> list[ChosenStep]:
    """The steps at which another answer may have been better, with the signs of it, the most telling ones first.

    Left out are steps without a prompt (a session of which only the tools were recorded) and answers that are no choice.
    """
    found = []
    for trace in traces:
        for idx, step in trace.agent_steps():
            signs = dict.fromkeys(step.flags, True)
            signs["error"] = any(result.failed for result in step.results)
            signs["edit"] = any(call.name in EDITS for call in our_calls(trace, idx))
            reasons = [sign for sign in WORTH if signs.get(sign)]
            is_choice = bool(reasons or takes_all) and not step.flags & NOT_LEARNED
            if is_choice and any(trace.steps[place].source == "user" for place in trace.path_to(idx)):
                found.append(ChosenStep(trace, idx, reasons))
    return sorted(found, key=lambda each: -sum(WORTH.get(sign, 0) for sign in each.reasons))[:max_steps]


def executed_pairs(traces: Mapping[str, Trace], verdicts: Iterable[Mapping[str, Any]]) -> Iterator[PairRow]:
    """Pairs of the branches that the tests decided, better and worse."""
    for row in verdicts:
        trace, idx = traces[row["trace_id"]], row["step"]
        for verdict in (each for each in row["verdicts"] if each["decision"] != "not decided"):
            sides = (verdict["answer"], recorded_answer(trace, idx))
            margin = abs(fmean(verdict["scores"]) - fmean(verdict["recorded_scores"]))
            evidence = {key: verdict[key] for key in ("scores", "recorded_scores", "interval", "source")}
            sides = sides if verdict["decision"] == "better" else sides[::-1]
            yield _pair(trace, idx, sides, source="executed", margin=margin, branch=evidence)


def sibling_pairs(traces: Sequence[Trace]) -> Iterator[PairRow]:
    """Of two attempts at one task, one passing and one failing: the first answers in which they part."""
    attempts: dict[str, tuple[list[Trace], list[Trace]]] = {}
    for trace in (trace for trace in traces if trace.task_id and trace.passed is not None):
        attempts.setdefault(trace.task_id, ([], []))[not trace.passed].append(trace)
    for passing, failing in (both for own in attempts.values() for both in itertools.product(*own)):
        if (idx := _parting(passing, failing)) is not None:
            sides = (recorded_answer(passing, idx), recorded_answer(failing, idx))
            yield _pair(passing, idx, sides, source="siblings", margin=1.0, failing=failing.trace_id)


def _parting(first: Trace, second: Trace) -> int | None:
    """The first answer in which two attempts part although everything before it was the same; None where there is none."""
    for idx, (a, b) in enumerate(zip(first.steps, second.steps, strict=False)):
        is_answer = a.source == b.source == "agent"
        if is_answer and action(recorded_answer(first, idx)) != action(recorded_answer(second, idx)):
            return idx
        seen, other = ([step.source, *(result.text for result in step.results)] for step in (a, b))
        if seen != other or not (is_answer or a.text == b.text):
            return None
    return None


def objection_pairs(traces: Sequence[Trace]) -> Iterator[PairRow]:
    """An action that the user refused or stopped, against the next one that was let through."""
    for trace in traces:
        calling = [(idx, step) for idx, step in trace.agent_steps() if step.calls]
        done = [(n, step) for n, step in calling if step.results and not any(r.failed for r in step.results)]
        good = [idx for idx, step in done if not step.flags & (_REFUSED | NOT_LEARNED)]
        for idx in (idx for idx, step in calling if step.flags & _REFUSED):
            if (accepted := next((n for n in good if n > idx), None)) is not None:
                sides = (recorded_answer(trace, accepted), recorded_answer(trace, idx))
                yield _pair(trace, idx, sides, source="objection", margin=0.5, accepted_step=accepted)


def _pair(
    trace: Trace, idx: int, sides: tuple[Message, Message], *, source: str, margin: float, **evidence: Any
) -> PairRow:
    is_text = not any("tool_calls" in side for side in sides)
    evidence |= {"margin": margin, "is_text_only": is_text, "prompt_origin": trace.prompt_origin}
    is_end = any(call.name in ("submit", "finish") for call in calls_of(sides[0]))
    weight = WEIGHTS[source] * (TEXT_ONLY if is_text else 1.0) * min(1.0, margin)
    row: PairRow = {"prompt": prompt_of(trace, idx), "chosen": [sides[0]], "rejected": [sides[1]]}
    row |= {"tools": json.dumps(tools_of(trace)), "weight": weight, "source": source}
    row |= {"evidence": json.dumps(evidence), "trace_id": trace.trace_id, "step": idx}
    return row | {"task_id": trace.task_id, "is_last": is_end or idx == trace.agent_steps()[-1][0]}


def balanced(pairs: Iterable[PairRow], heldout: HeldoutRows) -> Rows:
    """The pairs that are kept: no copy, none that teaches length or ending, none of a held-out task."""
    rows, dropped = dict[str, PairRow](), Counter[str]()
    for pair in pairs:
        chosen, rejected = sides = [json.dumps(pair[side], sort_keys=True) for side in SIDES[1:]]
        key = f"{pair['trace_id']}/{pair['step']}/{chosen}/{rejected}"
        called = {call.name for side in SIDES[1:] for call in calls_of(pair[side][0])}
        if chosen == rejected:
            dropped["both sides are the same"] += 1
        elif called - {tool["function"]["name"] for tool in json.loads(pair["tools"])}:
            dropped["a call of a tool that is not offered"] += 1
        elif key in rows:
            dropped["the same pair twice"] += 1
        elif max(map(len, sides)) > MAX_LENGTH_RATIO * min(map(len, sides)):
            dropped["one side is many times as long"] += 1
        else:
            rows[key] = pair
    kept = without_heldout([*rows.values()], heldout, dropped)
    last = [pair for pair in kept if pair["is_last"]]
    num_allowed = max(1, int(MAX_SHARE_OF_LAST * (len(kept) - len(last)) / (1 - MAX_SHARE_OF_LAST)))
    for pair in sorted(last, key=lambda each: -each["weight"])[num_allowed:]:
        kept.remove(pair)
        dropped["too many pairs of last steps"] += 1
    return kept, dropped


def sft_rows(traces: Iterable[Trace], heldout: HeldoutRows) -> Rows:
    """Passing attempts as chats with tools."""
    rows, dropped = list[PairRow](), Counter[str]()
    for trace in traces:
        if not (trace.passed and trace.agent_steps()):
            dropped["did not pass its tests" if trace.passed is False else "nobody ran its tests"] += 1
            continue
        last = trace.agent_steps()[-1][0]
        row: PairRow = {"messages": [*prompt_of(trace, last), recorded_answer(trace, last)]}
        row |= {"tools": json.dumps(tools_of(trace)), "task_id": trace.task_id}
        known = {key: getattr(trace, key) for key in ("trace_id", "format", "model", "task_id")}
        rows.append({**row, "provenance": json.dumps(known)})
    return without_heldout(rows, heldout, dropped), dropped


def without_heldout(rows: list[PairRow], heldout: HeldoutRows, dropped: Counter[str]) -> list[PairRow]:
    """The rows that neither are of a held-out task nor show its code."""
    found = heldout(rows)
    dropped["a held-out task, or its code in the text"] += len(found)
    return [row for place, row in enumerate(rows) if place not in found]


def write_rows(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Parquet or lines of JSON, by the name. Parquet keeps messages as JSON that ``datasets`` reads as objects."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix != ".parquet":
        path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
        return
    with needs_extra("traces", f"Parquet for {path.name}"):
        import pyarrow as pa
        import pyarrow.parquet as pq
    columns: dict[str, Any] = {name: [row[name] for row in rows] for name in rows[0]}
    for name in (name for name, value in rows[0].items() if isinstance(value, list)):
        texts = [[json.dumps(each) for each in value] for value in columns[name]]
        columns[name] = pa.array(texts, pa.list_(pa.string())).cast(pa.list_(pa.json_()))
    pq.write_table(pa.table(columns), path)


def read_pair_rows(path: Path) -> dict[str, PairRow]:
    """The pairs of a file by their places (``FILE:LINE``), their shape checked and nothing tokenised.

    A file that cannot be read or is empty, a line of neither shape, and pairs that all weigh 0 raise ``InputError`` (CR0751).
    """
    where, rows = str(path), dict[str, PairRow]()
    try:
        # ``str.splitlines`` cuts at signs that JSON texts may hold, too
        lines = _parquet_lines(path) if path.suffix == ".parquet" else path.read_text("utf-8").split("\n")
        for number, line in enumerate(lines, start=1):
            where = f"{path}:{number}"
            rows |= {where: json.loads(line)} if line.strip() else {}
            if where in rows and (problem := _problem(rows[where])):
                raise unusable_pair(problem, where)
    except (OSError, ValueError) as error:
        what = "the file of pairs cannot be read" if where == str(path) else "a line is not JSON"
        raise unusable_pair(f"{what}: {error!s:.200}", where) from error
    if not rows:
        raise unusable_pair("the file of pairs is empty", str(path))
    if not any(row.get("weight", 1.0) for row in rows.values()):
        raise unusable_pair("every pair of the file weighs 0, so that nothing would be learned", str(path))
    return rows


def _parquet_lines(path: Path) -> list[str]:
    """The rows of a Parquet file, a JSON object each; messages stand in it as JSON of their own."""
    with needs_extra("traces", f"Parquet for {path.name}"):
        import pyarrow.parquet as pq
    found = pq.read_table(path).to_pylist()
    rows = [{key: value for key, value in row.items() if value is not None} for row in found]
    for row in rows:
        row |= {side: [*map(parsed, row[side])] for side in SIDES if isinstance(row.get(side), list)}
    return [json.dumps(row, default=str) for row in rows]


def _problem(row: Any) -> str:
    """What is wrong with a row; an empty text where nothing is."""
    if not isinstance(row, dict):
        return "a line is not a JSON object"
    if empty := next((side for side in SIDES if not row.get(side)), ""):
        return f"{empty} is {'empty' if empty in row else 'missing'}"
    sides, weight = [row[side] for side in SIDES], row.get("weight", 1.0)
    messages = [one for side in sides for one in (side if isinstance(side, list) else [None])]
    if not all(isinstance(side, str) for side in sides) and None in [at(one, "role") for one in messages]:
        return "prompt, chosen and rejected are neither three texts nor three lists of messages"
    if not isinstance(parsed(row.get("tools")) or [], list):
        return "tools is neither a list of functions nor the JSON of one"
    is_weight = type(weight) in (int, float) and 0 <= weight < math.inf
    return "" if is_weight else f"weight is {weight!r}, not a number from 0 up"


def pair_sources(rows: Iterable[PairRow]) -> dict[str, dict[str, float]]:
    """By where their label comes from, how many pairs there are and what they weigh together."""
    weights = defaultdict[str, list[float]](list)
    for row in rows:
        weights[str(row.get("source") or "not said")].append(float(row.get("weight", 1.0)))
    return {name: {"pairs": len(own), "weight": sum(own)} for name, own in weights.items()}
