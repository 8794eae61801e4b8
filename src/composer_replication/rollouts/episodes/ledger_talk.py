"""A loop's conversations over a chat template: ids in a ledger, calls in the template's own dialect."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from composer_replication.interfaces import Tokenizer
from composer_replication.records import ToolCall, ToolSpec, Turn
from composer_replication.rollouts.episodes.episode import TokenCounts
from composer_replication.rollouts.tokens.call_dialects import dialect_of, num_thinking_ids, read_completion
from composer_replication.rollouts.tokens.chat import Chat
from composer_replication.rollouts.tokens.token_ledger import TokenLedger
from composer_replication.rollouts.tools.tool_context import function_schema

SHELL_RULES = """\
Act by one code block an answer: a shell command in a block that begins with ```bash, or, when you are done, an empty block
that begins with ```submit. What the command prints is shown to you."""
"""What a model is told whose template knows no tools."""


@dataclass(frozen=True, slots=True)
class LedgerTalk:
    """Opens conversations, finds the calls in an answer, and tells its kinds of tokens apart.

    A template without tools gets none: the policy acts by code blocks (``SHELL_RULES`` in its first message), and
    results come back as the user's words.

    Args:
        template_text: the tokenizer's chat template, or several by name as a tokenizer of transformers may have them.
        system: text of a system message; empty: none.
        template_options: further variables of the template (``enable_thinking``).
        tools: whose schemas say how arguments are read that are no JSON.
        num_ids: as ``TokenLedger``.

    Raises (from ``open`` on):
        InputError: there is no template, or it never goes on after a call, which is tried out before the first episode
            (CR0810); its way of calls is not known (CR0818); as ``TokenLedger``.
    """

    tokenizer: Tokenizer
    template_text: str | Mapping[str, str] | None
    system: str = ""
    template_options: Mapping[str, Any] = field(default_factory=dict)
    tools: tuple[ToolSpec, ...] = ()
    num_ids: int | None = None
    _has_fit: list[bool] = field(default_factory=list, init=False, repr=False, compare=False)

    def open(self, message: str, tools: tuple[ToolSpec, ...]) -> TokenLedger:
        """Begin a conversation."""
        is_fenced = self._dialect == "fenced"
        first = f"{message}\n\n{SHELL_RULES}" if is_fenced and tools else message
        system = [{"role": "system", "content": self.system}] if self.system else []
        schemas = [function_schema(tool) for tool in tools] if tools and not is_fenced else None
        chat = Chat([*system, {"role": "user", "content": first}], schemas, self.template_options)
        ledger = TokenLedger(self.tokenizer, chat, has_tool_messages=not is_fenced, num_ids=self.num_ids)
        if tools and not self._has_fit:
            ledger.require_results(ToolCall(tools[0].name, "{}"))
            self._has_fit.append(True)
        return ledger

    def find_calls(self, turn: Turn) -> tuple[ToolCall, ...]:
        """The calls of an answer; its prompt says whether it began as a thought."""
        sampled = turn.completion.token_ids
        return read_completion(self.tokenizer, turn.prompt_ids, sampled, self._dialect, tools=self.tools)

    def count_kinds(self, turn: Turn, calls: tuple[ToolCall, ...]) -> TokenCounts:
        """The sampled ids of thoughts; all others are a call's where the answer calls, and final words elsewhere."""
        sampled = turn.completion.token_ids
        thinking = num_thinking_ids(self.tokenizer, turn.prompt_ids, sampled)
        others = len(sampled) - thinking
        return TokenCounts(thinking, tool_call=others if calls else 0, final=0 if calls else others)

    @property
    def _dialect(self) -> str:
        return dialect_of(self.template_text, self.tokenizer)
