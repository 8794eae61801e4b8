"""The plugin that ``verifiers`` imports by its name: ``vf-eval composer-replication-verifiers``."""

from composer_replication.rollouts.environment.verifiers_face import (
    FeatureDeletionHarness,
    FeatureDeletionTaskset,
    FeatureDeletionVerifiersEnv,
    load_environment,
)

__all__ = [
    "FeatureDeletionHarness",
    "FeatureDeletionTaskset",
    "FeatureDeletionVerifiersEnv",
    "load_environment",
]
