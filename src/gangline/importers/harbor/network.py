"""The network of a Harbor task: its own policies where the submitter grants them, else the submitter's."""

from __future__ import annotations

from typing import Any, NamedTuple

from gangline.domain.errors import InvalidRequest
from gangline.domain.network import NetworkRule
from gangline.importers.harbor.config import HarborConfig, HarborEnvironment
from gangline.importers.imported import Choices

__all__ = ["Policy", "network_of"]


class Policy(NamedTuple):
    mode: str
    hosts: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.mode}: {', '.join(self.hosts)}" if self.hosts else self.mode


def network_of(name: str, config: HarborConfig, choices: Choices) -> dict[str, Any]:
    """Fields of the body's `runtime`, where agent and tests share one.

    Tests that cannot install their tools mostly leave a 0: that must not be because nobody thought of it.
    Raises: InvalidRequest when nobody decided, or the policies cannot be given.
    """
    if choices.network not in (None, "list"):
        return {"network": choices.network}
    agent, verifier = _phase(config, "agent"), _phase(config, "verifier")
    wanted = sorted({str(one) for one in (agent, verifier, _baseline(config.environment)) if one.mode != "no-network"})
    if choices.network is None and wanted:
        raise InvalidRequest(
            f"{name}: asks for the network ({' and '.join(wanted)}). Give --network list for the hosts that it names; "
            "--network full; or --network proxy, so that agent and tests reach the model only, and see by `gangline "
            "submit --oracle` whether its tests can do without."
        )
    if agent != verifier:
        raise InvalidRequest(
            f"{name}: agent.network_mode ({agent}) and verifier.network_mode ({verifier}) differ, and both work in one "
            "runtime, which has one network. Give --network full or proxy."
        )
    return _given(name, agent)


def _given(name: str, policy: Policy) -> dict[str, Any]:
    if policy.mode == "public":
        raise InvalidRequest(f"{name}: asks for the public network, which is no list. Give --network full or proxy.")
    if not policy.hosts:
        return {"network": "proxy"}
    for host in policy.hosts:
        try:
            NetworkRule.parse(host)
        except ValueError as error:
            raise InvalidRequest(f"{name}: allowed_hosts: {error}") from error
    return {"network": "list", "network_allow": list(policy.hosts)}


def _phase(config: HarborConfig, phase: str) -> Policy:
    """An explicit policy of the phase wins over the environment's."""
    own = config.agent if phase == "agent" else config.verifier
    if own.network_mode is None:
        return _baseline(config.environment)
    return Policy(own.network_mode, tuple(own.allowed_hosts or ()))


def _baseline(environment: HarborEnvironment) -> Policy:
    mode = environment.network_mode or ("no-network" if environment.allow_internet is False else "public")
    return Policy(mode, tuple(environment.allowed_hosts or ()))
