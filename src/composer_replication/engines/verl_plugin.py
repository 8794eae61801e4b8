"""What verl is given: the advantage and the losses ``composer`` and ``composer_tis``, and the trainer ``composer_sync``.

verl loads the entry point group ``verl.plugins`` in each of its processes and hides whatever goes wrong there: so the
agent loop, the first of ours to run, asks ``require_registered``.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import torch

from composer_replication.engines.group_objective import clipped_objective, group_advantages
from composer_replication.engines.verl_guard import GuardHook
from composer_replication.errors import MissingError
from composer_replication.losses.policy_terms import truncated_importance_weights

NAME = "composer"
TRUNCATED = "composer_tis"
TRAINER = "composer_sync"
_ALGORITHMS = "verl.trainer.ppo.core_algos"
_SYNC = "verl.trainer.ppo.v1.trainer_sync"


def register(open_guard: Callable[[], GuardHook | None]) -> None:
    """Register what verl is given, as soon as verl imports the modules that it belongs to.

    verl loads plug-ins while it is being imported itself, when those modules cannot be.

    Args:
        open_guard: makes the guard of this job, in the process of its trainer.
    """
    _when_imported(_ALGORITHMS, _register_algorithms)
    _when_imported(_SYNC, lambda module: _register_trainer(module, open_guard))


def require_registered() -> None:
    """Stop where verl runs without us.

    Raises:
        MissingError: so it is (CR0951).
    """
    algorithms = importlib.import_module(_ALGORITHMS)
    if NAME in algorithms.ADV_ESTIMATOR_REGISTRY and NAME in algorithms.POLICY_LOSS_REGISTRY:
        return
    raise MissingError(
        "CR0951",
        f"verl has not loaded our plug-in: it knows no advantage and no policy loss {NAME!r}.",
        where="verl.plugins",
        fix="install composer-replication in verl's environment, and leave VERL_USE_EXTERNAL_PLUGINS at auto; "
        "python -c 'import composer_replication.cli.verl_entry' says what is wrong with it.",
    )


def advantage(
    token_level_rewards: torch.Tensor,
    response_mask: torch.Tensor,
    index: Sequence[Any] = (),
    config: Any = None,
    **more: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """verl's form of ``group_advantages``; a rollout without a token that counts is not valid."""
    del config, more
    groups = list(index) if len(index) else list(range(len(token_level_rewards)))
    reward_B = token_level_rewards.sum(-1)
    advantage_B = group_advantages(reward_B, groups, response_mask.sum(-1) > 0)
    advantage_BT = advantage_B[:, None] * response_mask
    return advantage_BT, advantage_BT


def policy_loss(
    old_log_prob: torch.Tensor,
    log_prob: torch.Tensor,
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
    loss_agg_mode: str = "token-mean",
    config: Any = None,
    rollout_is_weights: torch.Tensor | None = None,
) -> tuple[torch.Tensor, dict[str, Any]]:
    """verl's form of ``clipped_objective``, with its own importance weights where it has any."""
    low = high = 0.2 if config is None else float(config.clip_ratio)
    if config is not None:
        low = low if config.clip_ratio_low is None else float(config.clip_ratio_low)
        high = high if config.clip_ratio_high is None else float(config.clip_ratio_high)
    loss_BT = clipped_objective(
        log_prob, old_log_prob, advantages, rollout_is_weights, clip_low=low, clip_high=high
    )
    algorithms = importlib.import_module(_ALGORITHMS)
    of_verl = {} if config is None else dict(config.global_batch_info)
    loss = algorithms.agg_loss(
        loss_mat=loss_BT, loss_mask=response_mask, loss_agg_mode=loss_agg_mode, **of_verl
    )
    kept_BT = response_mask.bool()
    with torch.no_grad():
        share = ((log_prob - old_log_prob).exp() - 1.0).abs()[kept_BT].mean() if kept_BT.any() else 0.0
    return loss, {"actor/composer_ratio_distance": float(share)}


def truncated_policy_loss(
    old_log_prob: torch.Tensor,
    log_prob: torch.Tensor,
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
    **more: Any,
) -> tuple[torch.Tensor, dict[str, Any]]:
    """``policy_loss`` in verl's bypass mode, where ``old_log_prob`` is the sampler's: weights min(r, 2), no clip of r."""
    more.pop("rollout_is_weights", None)
    weights_BT, metrics = truncated_importance_weights(log_prob, old_log_prob, response_mask)
    loss, figures = policy_loss(
        log_prob.detach(), log_prob, advantages, response_mask, rollout_is_weights=weights_BT, **more
    )
    return loss, {**figures, "actor/composer_effective_share": float(metrics.effective_sample_share)}


def _register_algorithms(algorithms: ModuleType) -> None:
    algorithms.register_adv_est(NAME)(advantage)
    algorithms.register_policy_loss(NAME)(policy_loss)
    algorithms.register_policy_loss(TRUNCATED)(truncated_policy_loss)


def _register_trainer(module: ModuleType, open_guard: Callable[[], GuardHook | None]) -> None:
    of_verl: Any = module.PPOTrainerSync

    class GuardedTrainer(of_verl):  # type: ignore[misc]  # verl has no types, and is not here
        """verl's synchronous trainer, which shows each step's numbers to the guard."""

        guard_hook: GuardHook | None = None

        def fit(self, *args: Any, **kwargs: Any) -> Any:
            self.guard_hook = open_guard()
            return super().fit(*args, **kwargs)

        def _compute_metrics(self, batch: Any, metrics: Any, *args: Any, **kwargs: Any) -> Any:
            answer = super()._compute_metrics(batch, metrics, *args, **kwargs)
            if self.guard_hook is not None:
                self.guard_hook.look(metrics, step=int(self.global_steps))
            return answer

    module.register_trainer(TRAINER)(GuardedTrainer)


def _when_imported(name: str, do: Callable[[ModuleType], None]) -> None:
    """Call ``do`` with a module when it has been imported; at once where it has."""
    module = sys.modules.get(name)
    if module is not None and not getattr(module.__spec__, "_initializing", False):
        do(module)
        return
    sys.meta_path.insert(0, _Waiting(name, do))


class _Waiting(MetaPathFinder):
    """Finds one module as others do, and is told when it is there."""

    def __init__(self, name: str, do: Callable[[ModuleType], None]) -> None:
        self._name, self._do = name, do

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        del path, target
        if fullname != self._name:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _Telling(spec.loader, self._do)
        return spec


class _Telling(Loader):
    def __init__(self, loader: Any, do: Callable[[ModuleType], None]) -> None:
        self._loader, self._do = loader, do

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        found: ModuleType | None = self._loader.create_module(spec)
        return found

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        self._do(module)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)
