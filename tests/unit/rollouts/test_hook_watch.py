"""In pytest 7 and 8 a proxy stands before the hooks: what is exchanged there, or behind it, is named, and no more."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pluggy
import pytest

from composer_replication.tasks.running.watched_runner import make_hook_check

spec, implementation = pluggy.HookspecMarker("watched"), pluggy.HookimplMarker("watched")


class Hooks:
    @spec
    def makereport(self) -> None: ...


class Plugin:
    @implementation
    def makereport(self) -> int:
        return 1


@pytest.mark.parametrize("proxy", ["", "_hook_relay", "_PathAwareHookProxy__hook_caller"])
@pytest.mark.parametrize("where", ["hook", "implementation", "nowhere", "asked"])
def test_what_is_exchanged_is_named(where: str, proxy: str) -> None:
    """``proxy`` is the name by which it holds the hooks: none in pytest 9, the others in 8 and 7."""
    manager = pluggy.PluginManager("watched")
    manager.add_hookspecs(Hooks)
    manager.register(Plugin(), name="ours")
    hook: Any = SimpleNamespace(**{proxy: manager.hook}) if proxy else manager.hook
    exchanged = make_hook_check(SimpleNamespace(hook=hook, pluginmanager=manager))
    if where == "hook":
        hook.makereport = lambda: 2
    elif where == "implementation":
        manager.hook.makereport.get_hookimpls()[0].function = lambda: 2
    elif where == "asked":  # the proxy keeps it
        hook.makereport = manager.hook.makereport
    expected = {
        "hook": ["hook makereport exchanged"],
        "implementation": ["hook makereport of ours exchanged"],
    }
    assert exchanged() == expected.get(where, [])
