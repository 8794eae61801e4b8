"""What the ``[agent]`` table of a recipe becomes."""

from __future__ import annotations

from composer_replication.channel_tables import AgentSection
from composer_replication.cli.agent_parts import episode_options


def test_the_loop_waits_for_the_longest_time_out_that_a_recipe_gives_its_tools() -> None:
    assert episode_options(AgentSection(), temperature=1.0).call_seconds == 300.0
    section = AgentSection.model_validate({"tools": {"test_seconds": 900.0}})
    assert episode_options(section, temperature=1.0).call_seconds == 900.0
