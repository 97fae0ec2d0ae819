"""The network of a Harbor task: its own policies where the submitter grants them, else the submitter's."""

from __future__ import annotations

from typing import Any, NamedTuple

from gangline.domain.errors import InvalidRequest
from gangline.domain.network import NetworkRule
from gangline.interop.harbor.tasks.config import HarborAgent, HarborConfig, HarborEnvironment, HarborVerifier
from gangline.machine.reading.imported import Choices

__all__ = ["Networks", "Policy", "networks_of", "notes_on_services"]


class Policy(NamedTuple):
    mode: str
    hosts: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.mode}: {', '.join(self.hosts)}" if self.hosts else self.mode


class Networks(NamedTuple):
    """Fields of a runtime."""

    agent: dict[str, Any]
    verifier: dict[str, Any]


def networks_of(name: str, config: HarborConfig, choices: Choices, *, separate: bool) -> Networks:
    """The network of the agent, and of the verifier: the same, unless it has a runtime of its own.

    Tests that cannot install their tools mostly leave a 0: that must not be because nobody thought of it.
    Raises: InvalidRequest when nobody decided, or the policies cannot be given.
    """
    if choices.network not in (None, "list"):
        return Networks({"network": choices.network}, {"network": choices.network})
    baseline = _baseline(config.environment)
    verifiers = config.verifier.environment
    agent = _explicit(config.agent) or baseline
    verifier = _explicit(config.verifier) or (_baseline(verifiers) if separate and verifiers else baseline)
    wanted = sorted({str(one) for one in (agent, verifier, baseline) if one.mode != "no-network"})
    if choices.network is None and wanted:
        raise InvalidRequest(
            f"{name}: asks for the network ({' and '.join(wanted)}). Give --network list for the hosts that it names; "
            "--network full; or --network proxy, so that agent and tests reach the model only, and see by `gangline "
            "submit --oracle` whether its tests can do without."
        )
    if agent != verifier and not separate:
        raise InvalidRequest(
            f"{name}: agent.network_mode ({agent}) and verifier.network_mode ({verifier}) differ, and both work in one "
            "runtime, which has one network. Give --network full or proxy."
        )
    return Networks(_given(name, agent), _given(name, verifier))


def notes_on_services(config: HarborConfig, runtime: dict[str, Any]) -> list[str]:
    """What is different of the services in the agent's runtime."""
    if not runtime.get("services"):
        return []
    own = {_baseline(config.environment), _explicit(config.agent) or _baseline(config.environment)}
    notes = ["its services reach nothing outside"]
    if any(policy.mode != "public" for policy in own):
        notes.append("its services are at their names, where Harbor's Docker has them at the agent's localhost")
    return notes if runtime["network"] != "full" else notes[1:]


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


def _explicit(phase: HarborAgent | HarborVerifier) -> Policy | None:
    return None if phase.network_mode is None else Policy(phase.network_mode, tuple(phase.allowed_hosts or ()))


def _baseline(environment: HarborEnvironment) -> Policy:
    mode = environment.network_mode or ("no-network" if environment.allow_internet is False else "public")
    return Policy(mode, tuple(environment.allowed_hosts or ()))
