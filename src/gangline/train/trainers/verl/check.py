"""Checks whether verl accepts a configuration: `python -m gangline.train.trainers.verl.check ARGUMENT...`, in verl's
interpreter.

The arguments are the same as for verl's own command. Like that command, it composes them, fills in defaults, checks
them and creates verl's configuration classes from them. Nothing is started. Prints one line of JSON with the errors and
the whole configuration.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from gangline.domain.errors import GanglineError
from gangline.train.trainers.verl.settings import read_settings, require_supported


def check(arguments: Sequence[str]) -> dict[str, Any]:
    """`errors`: list of str, empty if verl accepts it. `config`: verl's resolved configuration; None if it is
    unreadable.
    """
    omegaconf: Any = importlib.import_module("omegaconf")
    try:
        config = _composed(list(arguments))
        resolved: Any = omegaconf.OmegaConf.to_container(config, resolve=True)
    except Exception as error:  # errors of Hydra, OmegaConf and verl's own classes
        return {"errors": [_message(error)], "config": None}
    return {"errors": list(_problems(config)), "config": resolved}


def _composed(arguments: list[str]) -> Any:
    hydra: Any = importlib.import_module("hydra")
    with hydra.initialize_config_module("verl.trainer.config", version_base=None):
        return hydra.compose("ppo_trainer", arguments)


def _problems(config: Any) -> Iterator[str]:
    for look in (_by_verls_rules, _as_verls_classes, _with_verls_trainer, read_settings, require_supported):
        try:
            look(config)
        except Exception as error:  # as above
            yield _message(error)


def _by_verls_rules(config: Any) -> None:
    """As `verl.trainer.main_ppo.main`."""
    utils: Any = importlib.import_module("verl.trainer.ppo.utils")
    validate: Callable[..., None] = importlib.import_module("verl.utils.config").validate_config
    validate(
        config=config,
        use_reference_policy=utils.need_reference_policy(config),
        use_critic=utils.need_critic(config),
    )


def _as_verls_classes(config: Any) -> None:
    """The sections that workers turn into classes, each with its own checks."""
    as_class: Callable[[Any], Any] = importlib.import_module("verl.utils.config").omega_conf_to_dataclass
    as_class(config.actor_rollout_ref.rollout)
    as_class(config.algorithm)


def _with_verls_trainer(config: Any) -> None:
    trainers: Any = importlib.import_module("verl.trainer.ppo.v1")
    trainers.get_trainer_cls(config.trainer.v1.trainer_mode)
    load: Callable[[str, str], Any] = importlib.import_module("verl.utils.import_utils").load_class_from_fqn
    load(config.actor_rollout_ref.rollout.agent.agent_loop_manager_class, "AgentLoopManager")


def _message(error: Exception) -> str:
    lines = str(error).strip() or type(error).__name__
    return lines if isinstance(error, GanglineError) else f"{type(error).__name__}: {lines}"


def main() -> None:
    with contextlib.redirect_stdout(sys.stderr):  # verl prints to stdout
        found = check(sys.argv[1:])
    print(json.dumps(found))


if __name__ == "__main__":
    main()
