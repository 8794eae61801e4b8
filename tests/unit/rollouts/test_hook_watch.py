"""Before pytest 9 a proxy stands before the hooks: what is exchanged there, or behind it, is named."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pluggy
import pytest

from composer_replication.tasks.running.watched_marks import make_hook_check

spec, implementation = pluggy.HookspecMarker("watched"), pluggy.HookimplMarker("watched")


class Hooks:
    @spec
    def makereport(self) -> None: ...


class Plugin:
    @implementation
    def makereport(self) -> int:
        return 1


@pytest.mark.parametrize("has_proxy", [False, True])
@pytest.mark.parametrize("where", ["hook", "implementation", "nowhere"])
def test_what_is_exchanged_is_named(where: str, has_proxy: bool) -> None:
    manager = pluggy.PluginManager("watched")
    manager.add_hookspecs(Hooks)
    manager.register(Plugin(), name="ours")
    hook: Any = SimpleNamespace(_hook_relay=manager.hook) if has_proxy else manager.hook
    exchanged = make_hook_check(SimpleNamespace(hook=hook, pluginmanager=manager))
    if where == "hook":
        hook.makereport = lambda: 2
    elif where == "implementation":
        manager.hook.makereport.get_hookimpls()[0].function = lambda: 2
    expected = {
        "hook": ["hook makereport exchanged"],
        "implementation": ["hook makereport of ours exchanged"],
        "nowhere": [],
    }
    assert exchanged() == expected[where]
