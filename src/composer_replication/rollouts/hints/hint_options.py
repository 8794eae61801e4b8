"""How hints are written: one frozen record with defaults, checked when it is made."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from composer_replication.errors import UsageError

LAYERS = ("template", "environment", "sibling", "judge")


@dataclass(frozen=True, slots=True)
class HintOptions:
    """Options of the hints.

    Args:
        layers: asked in this order, the first that has something to say writes the hint. ``template``,
            ``environment`` (the failed call's own words), ``sibling`` (a successful attempt of the same
            group), ``judge`` (a model; off unless named here), or ``package.module:function`` of yours,
            which takes a ``HintContext`` and gives a text or None.
        max_characters: of a hint, cut at a word; 400 is about 100 tokens.
        max_turns: most hinted turns of one rollout, the first ones; each costs a pass of the teacher.
        role: of the hint's own message in a chat. ``user`` is known to every template.
        prefix: before the text.
        strict: a turn whose prompt cannot take its hint exactly stops the run; false leaves it out and counts it.
        sibling_shows: ``nothing``; ``names``, the names that the successful answer uses and this one does
            not; ``lines``, its own lines that this one lacks, which may be the whole solution, though never
            the golden one.
        max_sibling_characters: of what a sibling shows.
        judge_url, judge_model: an OpenAI-compatible server and a model on it.
        judge_key_variable: environment variable that holds its key; empty: none is sent.
        judge_timeout_seconds: for one answer.
        from_other_tasks: a control: each hint is replaced by one of its length about another task.

    Raises:
        UsageError: a value out of range, or a layer that is none (CR0220).
    """

    layers: tuple[str, ...] = ("template", "environment", "sibling")
    max_characters: int = 400
    max_turns: int = 4
    role: Literal["user", "system"] = "user"
    prefix: str = "Hint: "
    strict: bool = True
    sibling_shows: Literal["nothing", "names", "lines"] = "names"
    max_sibling_characters: int = 160
    judge_url: str = ""
    judge_model: str = ""
    judge_key_variable: str = ""
    judge_timeout_seconds: float = 60.0
    from_other_tasks: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "layers", tuple(self.layers))
        odd = [layer for layer in self.layers if layer not in LAYERS and ":" not in layer]
        if not self.layers or odd:
            problem = f"there is no layer {odd[0]!r}" if odd else "no layer is named"
            raise _unusable(
                "layers", problem, f"take some of {', '.join(LAYERS)}, or package.module:function."
            )
        if len(set(self.layers)) != len(self.layers):
            raise _unusable("layers", "a layer is named twice", "name each once.")
        for name in ("max_characters", "max_turns", "max_sibling_characters"):
            if getattr(self, name) < 1:
                raise _unusable(name, f"{getattr(self, name)} is below 1", "give a number from 1.")
        if not self.judge_timeout_seconds > 0:
            raise _unusable("judge_timeout_seconds", "it is not above 0", "give seconds, for example 60.")
        for name, allowed in (("role", ("user", "system")), ("sibling_shows", ("nothing", "names", "lines"))):
            if getattr(self, name) not in allowed:
                raise _unusable(
                    name, f"{getattr(self, name)!r} is not one of {', '.join(allowed)}", "take one of these."
                )


def _unusable(name: str, problem: str, fix: str) -> UsageError:
    return UsageError("CR0220", f"{problem}.", where=f"hints.writing.{name}", fix=fix)
