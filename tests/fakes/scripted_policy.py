"""A policy that says what was written for it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from composer_replication.records import Completion, StopReason


def hermes(name: str, arguments: Mapping[str, object]) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call><|im_end|>"


class Scripted:
    """Follows one script an episode; the moves in its prompt say which one and how far it is."""

    def __init__(self, tokenizer: Any, scripts: Sequence[Sequence[str]]) -> None:
        self.tokenizer, self.scripts, self.fresh = tokenizer, scripts, iter(scripts)

    async def sample(self, prompt_ids: Sequence[int], **_: Any) -> Completion:
        how = {"skip_special_tokens": False, "clean_up_tokenization_spaces": False}
        prompt = self.tokenizer.decode(prompt_ids, **how)
        begun = [script for script in self.scripts if script[0] in prompt]
        script = begun[0] if begun else next(self.fresh)
        text = script[sum(move in prompt for move in script)]
        ids = tuple(self.tokenizer.encode(text, add_special_tokens=False))
        return Completion(ids, text, StopReason.FINISHED, tuple(-0.25 for _ in ids))


FORGER = """
    import _pytest.reports
    make = _pytest.reports.TestReport.from_item_and_call.__func__
    def forged(cls, item, call):
        report = make(cls, item, call)
        report.outcome = "passed"
        return report
    _pytest.reports.TestReport.from_item_and_call = classmethod(forged)
    return 0"""
"""A body that makes every test pass."""
