"""Loads all plug-ins, including built-in ones, by entry point.

Requests and experiments select plug-ins by name; dotted paths are never accepted. A plug-in is checked against its
contract when it is loaded (`plugin_contracts` has them all). If it fails, only that plug-in is refused, each time it is
named, with its package, its faults and the page to read.
"""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cache
from importlib import invalidate_caches
from importlib.metadata import Distribution, EntryPoint, entry_points
from typing import Any

from pydantic import BaseModel, ValidationError

from gangline.domain.contracts import (
    Builder,
    Capability,
    Evaluator,
    GradesClean,
    Harness,
    SupportsCapabilities,
    Tidies,
    depends_on_tools,
)
from gangline.domain.environment import EnvironmentKind
from gangline.domain.errors import GanglineError, InvalidRequest, UnknownPlugin
from gangline.domain.evidence.contract import EvidenceKind
from gangline.domain.mistakes import mistakes
from gangline.domain.sandbox import Runtime
from gangline.domain.task import AgentSpec, EvaluatorSpec, RuntimeSpec, TaskRequest
from gangline.settings.installation import extra_command, package_command
from gangline.settings.plugin_contracts import CONTRACTS, Kind, faults, instance_faults

__all__ = [
    "Kind",
    "check_evaluator",
    "check_task",
    "has_tools",
    "load",
    "log_refusals",
    "made",
    "make_builder",
    "make_environment",
    "make_evaluator",
    "make_evidence",
    "make_harness",
    "make_runtime",
    "make_tool",
    "names",
    "refusals",
    "usable",
    "version",
]

log = logging.getLogger("gangline.settings.plugins")

_REQUIREMENT = re.compile(r"(?P<package>(?P<name>[\w.-]+)\s*(?:\[[^\]]*\])?[^;]*)(?:;(?P<marker>.*))?")
_EXTRA = re.compile(r"""extra\s*==\s*['"]([^'"]+)['"]""")
"""The extra in the marker of a `Requires-Dist`. Source: the core metadata specification, PEP 508."""


@cache
def _installed() -> Mapping[Kind, Sequence[EntryPoint]]:
    """All entry points of each kind, our own last."""
    every = entry_points()
    return {kind: sorted(every.select(group=one.group), key=_is_ours) for kind, one in CONTRACTS.items()}


def _registry(kind: Kind) -> dict[str, EntryPoint]:
    """Our own take precedence over others with the same name."""
    return {entry.name: entry for entry in _installed()[kind]}


def _is_ours(entry: EntryPoint) -> bool:
    return entry.dist is not None and _is_gangline(entry.dist)


@cache
def _is_gangline(dist: Distribution) -> bool:
    """Its name is read from its file of metadata, a millisecond each time."""
    return _plain(dist.name) == "gangline"


def names(kind: Kind) -> list[str]:
    return sorted(_registry(kind))


def usable(kind: Kind) -> list[str]:
    """Names of the plug-ins that are not refused."""
    return [name for name in names(kind) if not _is_refused(kind, name)]


def _is_refused(kind: Kind, name: str) -> bool:
    try:
        load(kind, name)
    except InvalidRequest:
        return True
    return False


def log_refusals() -> None:
    """Called when a server or a node starts without them."""
    for message in refusals():
        log.warning("plugin.refused message=%s", message)


def refusals() -> list[str]:
    """Why plug-ins of other packages are refused, one line each. Imports all of them."""
    found: list[str] = []
    for kind in CONTRACTS:
        entries = _installed()[kind]
        ours = {entry.name for entry in entries if _is_ours(entry)}
        found += [_shadowed(kind, entry) for entry in entries if entry.name in ours and not _is_ours(entry)]
        for name in sorted({entry.name for entry in entries} - ours):
            try:
                load(kind, name)
            except InvalidRequest as error:
                found.append(error.message)
    return found


def version(kind: Kind, name: str) -> str:
    """Distribution and version of a known plug-in; empty if its installer left no metadata."""
    found = _registry(kind)[name].dist
    return "" if found is None else f"{found.name} {found.version}"


def load(kind: Kind, name: str) -> Any:
    """The object behind a plug-in's name, which fulfils its contract.

    Raises: UnknownPlugin (lists the known ones and the nearest match), InvalidRequest if it is refused, or its extra is
    not installed.
    """
    registry = _registry(kind)
    if name not in registry:
        if _is_new(kind, name):
            raise UnknownPlugin(
                f"{kind} {name!r} was installed after this process started. Restart the service (server and nodes) to "
                "use it."
            )
        raise UnknownPlugin.named(kind, name, registry)
    entry = registry[name]
    if _is_ours(entry):
        return _imported(kind, entry)
    found = _imported(kind, entry)
    if fault := _fault(kind, entry):
        raise InvalidRequest(_refused(kind, entry, fault))
    return found


def _imported(kind: Kind, entry: EntryPoint) -> Any:
    """Raises: InvalidRequest for any error during the module's import."""
    try:
        return entry.load()
    except (Exception, SystemExit) as error:
        if isinstance(error, ModuleNotFoundError) and (module := error.name):  # libraries raise it without one, too
            if f"{entry.module}.".startswith(f"{module}.") and not _is_ours(entry):
                raise InvalidRequest(_refused(kind, entry, f"has no module {module}")) from error
            raise InvalidRequest(_missing(kind, entry, module)) from error
        if _is_ours(entry):
            raise
        raise InvalidRequest(_refused(kind, entry, f"cannot be imported: {type(error).__name__}: {error}")) from error


@cache
def _fault(kind: Kind, entry: EntryPoint) -> str:
    """Why an imported plug-in is refused; empty if it is not. Two plug-ins with the same name are ambiguous."""
    found = [one for one in _installed()[kind] if one.name == entry.name]
    if len({(_package(one), one.value) for one in found}) > 1:
        packages = " and ".join(sorted(f"{_package(one)} ({one.value})" for one in found))
        return f"is there twice, from {packages}; uninstall one"
    try:
        return faults(kind, entry.name, entry.load())
    except (Exception, SystemExit) as error:  # raised by code of its class or metaclass
        return f"cannot be read: {type(error).__name__}: {error}"


def _shadowed(kind: Kind, entry: EntryPoint) -> str:
    return _refused(kind, entry, "has the name of one of Gangline's own, which is used: give it another name")


def _package(entry: EntryPoint) -> str:
    return "a package without metadata" if entry.dist is None else f"{entry.dist.name} {entry.dist.version}"


def _refused(kind: Kind, entry: EntryPoint, fault: str) -> str:
    return f"{_package(entry)}: {kind.replace('_', ' ')} `{entry.name}` {fault}: {CONTRACTS[kind].page}"


def _is_new(kind: Kind, name: str) -> bool:
    """Whether the plug-in was installed since the registry was read."""
    invalidate_caches()
    return any(entry.name == name for entry in entry_points(group=CONTRACTS[kind].group))


def _missing(kind: Kind, entry: EntryPoint, module: str) -> str:
    """Names the missing package and how to install it, from the metadata of the plug-in's distribution."""
    what = f"{kind} {entry.name!r} needs the Python package {module!r}, which is not installed."
    if entry.dist is None:
        return f"{what} Install it."
    distribution, requires = entry.dist.name, entry.dist.requires or []
    if (command := _command_for(module, requires, distribution)) is not None:
        return f"{what} Run: {command}"
    extras = ", ".join(f"{distribution}[{extra}]" for extra in entry.dist.metadata.get_all("Provides-Extra") or ())
    more = f" One of its extras may bring it: {extras}." if extras else ""
    return f"{what} It is none of the packages that {distribution} requires by this name.{more}"


def _command_for(module: str, requires: Sequence[str], distribution: str) -> str | None:
    """The command that installs a module: of the distribution's requirements, the one with the module's name, or whose
    name contains it, such as PyYAML for `yaml`. If extras require it, the smallest of these extras is installed.
    """
    wanted = _plain(module.partition(".")[0])
    found = [match for require in requires if (match := _REQUIREMENT.fullmatch(require)) is not None]
    extras = [_EXTRA.findall(match["marker"] or "") for match in found]
    sizes = Counter(extra for named in extras for extra in named)
    choices = [
        (len(_plain(match["name"])), min((sizes[extra], extra) for extra in named) if named else (0, ""), match)
        for match, named in zip(found, extras, strict=True)
        if wanted in _plain(match["name"])
    ]
    if not choices:
        return None
    _, (_, extra), match = min(choices, key=lambda choice: choice[:2])
    return extra_command(extra, distribution) if extra else package_command(match["package"].strip())


def _plain(name: str) -> str:
    """A normalised name, for comparing modules and distributions."""
    return re.sub(r"[-_.]+", "-", name).lower()


def _configured(kind: Kind, name: str, config: dict[str, Any]) -> Any:
    config_type: type[BaseModel] = load(kind, name).Config
    try:
        valid = config_type.model_validate(config)
    except ValidationError as error:
        raise InvalidRequest(f"{kind} {name!r}: {explain(error, config_type)}") from error
    except (Exception, SystemExit) as error:
        if _is_ours(entry := _registry(kind)[name]) or isinstance(error, GanglineError):
            raise
        fault = f"cannot read its configuration: {type(error).__name__}: {error}"
        raise InvalidRequest(_refused(kind, entry, fault)) from error
    return made(kind, name, valid)


def made(kind: Kind, name: str, *config: BaseModel) -> Any:
    """An instance of a plug-in's class. Raises: UnknownPlugin, InvalidRequest, also if its `__init__` fails."""
    plugin, entry = load(kind, name), _registry(kind)[name]
    try:
        found = plugin(*config)
        fault = "" if _is_ours(entry) else instance_faults(kind, found)
    except ValidationError as error:
        raise InvalidRequest(f"{kind} {name!r}: {explain(error)}") from error
    except (Exception, SystemExit) as error:
        if _is_ours(entry) or isinstance(error, GanglineError):
            raise
        raise InvalidRequest(_refused(kind, entry, f"cannot be made: {type(error).__name__}: {error}")) from error
    if fault:
        raise InvalidRequest(_refused(kind, entry, fault))
    return found


def explain(error: ValidationError, model: type[BaseModel] = BaseModel) -> str:
    """A validation error as one readable line: place, problem, and the nearest name in `model`."""
    return "; ".join(mistakes(error, model)[:8])


def make_runtime(name: str) -> Runtime:
    return made("runtime", name)


def make_harness(name: str, settings: dict[str, Any]) -> Harness:
    return _configured("harness", name, settings)


def make_builder(strategy: str, config: dict[str, Any]) -> Builder:
    return _configured("builder", strategy, config)


def make_environment(kind: str, config: dict[str, Any]) -> EnvironmentKind:
    return _configured("environment", kind, config)


def make_tool(name: str, config: dict[str, Any]) -> Any:
    """A `gangline.agents.tools.contract.Tool`, whose package this module must not import."""
    return _configured("tool", name, config)


def make_evaluator(strategy: str, config: dict[str, Any]) -> Evaluator:
    return _configured("evaluator", strategy, config)


def make_evidence(name: str) -> EvidenceKind:
    found = made("evidence", name)
    if not isinstance(found, EvidenceKind):
        raise InvalidRequest(_refused("evidence", _registry("evidence")[name], "is not a subclass of EvidenceKind"))
    return found


def has_tools(task: TaskRequest) -> bool:
    """Whether its agent acts through the provider API's tools; False if only the nodes know its harness."""
    try:
        return depends_on_tools(make_harness(task.agent.harness, task.agent.settings), task)
    except GanglineError:
        return False


def check_task(task: TaskRequest) -> None:
    """Raises: UnknownPlugin, InvalidRequest if a plug-in's configuration is invalid."""
    _check_runtime(task.runtime, "runtime")
    harness = make_harness(task.agent.harness, task.agent.settings)
    _check_capabilities(task.agent, harness)
    _check_environments(task, harness)
    make_builder(task.builder.strategy, task.builder.config)
    check_evaluator(task.evaluator)
    for name in task.capture.evidence:
        make_evidence(name)
    _check_steps(task)


def _check_steps(task: TaskRequest) -> None:
    """Raises: UnknownPlugin, InvalidRequest if a step has invalid settings, or its grading would remain visible to the
    agent's next step.
    """
    for number, step in enumerate(task.steps, start=1):
        try:
            prepare = (*task.runtime.prepare, *step.prepare)
            _check_runtime(task.runtime.model_copy(update={"prepare": prepare}), "runtime")
            make_harness(task.agent.harness, task.agent.settings | step.settings)
            check_evaluator(step.evaluator)
            evaluator = make_evaluator(step.evaluator.strategy, step.evaluator.config)
        except InvalidRequest as error:
            raise InvalidRequest(f"steps.{number - 1} ({step.name}): {error.message}") from error
        is_apart = step.evaluator.refresh_runtime or isinstance(evaluator, Tidies)
        if number < len(task.steps) and not is_apart:
            raise InvalidRequest(
                f"steps.{number - 1} ({step.name}): evaluator {step.evaluator.strategy!r} may leave files where the "
                "agent's next step begins. Grade in a clean runtime (refresh_runtime), or by `script`, which removes "
                "its files."
            )


def _check_runtime(spec: RuntimeSpec, field: str) -> None:
    """Raises: UnknownPlugin, InvalidRequest if the runtime would start the sandbox without its services."""
    runtime: type[Runtime] = load("runtime", spec.backend)
    if spec.services and not runtime.has_services:
        raise InvalidRequest(
            f"{field}.services: runtime `{spec.backend}` starts no services ({', '.join(spec.services)}): use `docker` "
            "or `podman`."
        )
    try:
        runtime.check_spec(spec)
    except InvalidRequest as error:
        raise InvalidRequest(f"{field}{error.message.removeprefix('runtime')}") from error


def check_evaluator(spec: EvaluatorSpec) -> None:
    """Raises: UnknownPlugin, InvalidRequest if its configuration is invalid, or it would ignore the request for a clean
    runtime.
    """
    evaluator = make_evaluator(spec.strategy, spec.config)
    if spec.runtime is not None:
        _check_runtime(spec.runtime, "evaluator.runtime")
    if spec.refresh_runtime and not (isinstance(evaluator, GradesClean) and evaluator.grades_clean):
        raise InvalidRequest(
            f"evaluator.refresh_runtime: evaluator {spec.strategy!r} grades in no clean runtime; leave refresh_runtime "
            "out, or choose an evaluator that does, such as `script`."
        )


def _check_environments(task: TaskRequest, harness: Harness) -> None:
    """Raises: UnknownPlugin, InvalidRequest if an environment's configuration is invalid, or the harness cannot give
    the environment's tools to its program.
    """
    for name, spec in task.environments.items():
        try:
            kind = make_environment(spec.kind, spec.config)
        except InvalidRequest as error:
            raise InvalidRequest(f"environments.{name}: {error.message}") from error
        if spec.runtime is not None:
            _check_runtime(spec.runtime, f"environments.{name}.runtime")
        if kind.offers_tools and not _taken(harness) & {"mcp_servers", "environments"}:
            raise InvalidRequest(
                f"environments.{name}: harness {task.agent.harness!r} has no way to give its program an environment's "
                "tools: choose one that takes `mcp_servers` or `environments` (`gangline harness list`)."
            )


def _taken(harness: Harness) -> frozenset[Capability]:
    return harness.takes if isinstance(harness, SupportsCapabilities) else frozenset[Capability]()


def _check_capabilities(agent: AgentSpec, harness: Harness) -> None:
    """Raises: InvalidRequest if the harness would have to drop a field of the task."""
    asked: dict[Capability, bool] = {"mcp_servers": bool(agent.mcp_servers), "skills": bool(agent.skills)}
    takes = _taken(harness)
    refused = [f"`agent.{field}`" for field, is_asked in asked.items() if is_asked and field not in takes]
    if refused:
        raise InvalidRequest(
            f"harness {agent.harness!r} has no way to give its program {' or '.join(refused)}: leave that out, or "
            "choose a harness that has (`gangline harness list`)."
        )
