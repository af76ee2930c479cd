"""Text environments: Gymnasium environments whose observations and actions are strings.

``reset`` and ``step`` are Gymnasium's. Two entries of ``info`` are read if present:

* ``success`` (bool): whether the task is solved; without it, a positive total reward means solved.
* ``invalid_move`` (bool): the action was not one that the environment knows.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import gymnasium
from gymnasium.spaces import Text

FROZEN_LAKE = "headrace/FrozenLakeText-v0"

gymnasium.register(FROZEN_LAKE, entry_point="actors.environments.frozen_lake:FrozenLakeText")


class EnvironmentSetupError(ValueError):
    """An environment cannot be made, or is not a text environment."""


def make(environment_id: str, kwargs: Mapping[str, Any]) -> gymnasium.Env[str, str]:
    """Make a text environment from Gymnasium's registry.

    Args:
        environment_id: registry id; ``"module:Id-v0"`` imports ``module`` first, so that it can register the id.
        kwargs: arguments of the environment's constructor.

    Raises:
        EnvironmentSetupError: unknown id, arguments that do not fit, or spaces that are not ``Text``.
    """
    try:
        # The checker looks at every step and costs more than a small environment; `make` checks the spaces itself.
        environment = gymnasium.make(environment_id, disable_env_checker=True, **kwargs)
    except (gymnasium.error.Error, ImportError, TypeError, ValueError) as error:
        raise EnvironmentSetupError(
            f"cannot make environment {environment_id!r} with {dict(kwargs)}: {error}"
        ) from error
    for name in ("observation_space", "action_space"):
        space = getattr(environment, name)
        if not isinstance(space, Text):
            environment.close()
            raise EnvironmentSetupError(
                f"environment {environment_id!r} has {name} {space}; expected gymnasium.spaces.Text: "
                "wrap the environment in one that reads and writes text"
            )
    return environment
