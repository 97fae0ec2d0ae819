"""The one door through which every plug-in comes, the built-in ones too: entry points.

Groups: `gangline.dialects`, `gangline.engines`, `gangline.runtimes`, `gangline.harnesses`, `gangline.builders`,
`gangline.evaluators`, `gangline.engine_servers`. Requests choose by name only; a dotted path is never taken from a
request.
"""

from __future__ import annotations

from functools import cache
from importlib import invalidate_caches
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Literal

from pydantic import BaseModel, ValidationError

from gangline.domain.contracts import (
    Builder,
    Capability,
    Evaluator,
    GradesClean,
    Harness,
    Runtime,
    SupportsCapabilities,
)
from gangline.domain.errors import InvalidRequest, UnknownPlugin
from gangline.domain.task import AgentSpec, EvaluatorSpec, TaskRequest

__all__ = [
    "Kind",
    "check_task",
    "load",
    "make_builder",
    "make_evaluator",
    "make_harness",
    "make_runtime",
    "names",
]

Kind = Literal["dialect", "engine", "runtime", "harness", "builder", "evaluator", "engine_server"]

_PLURAL = {"harness": "harnesses"}

_EXTRAS = {
    "renderers": ("renderers", "httpx"),
    "tokenizer": ("transformers", "tokenizers", "jinja2", "safetensors", "gguf"),
}
"""Extra -> modules of ours that it brings; the embedded engine's extra brings the others."""


@cache
def _registry(kind: Kind) -> dict[str, EntryPoint]:
    return {entry.name: entry for entry in entry_points(group=_group(kind))}


def _group(kind: Kind) -> str:
    return f"gangline.{_PLURAL.get(kind, kind + 's')}"


def names(kind: Kind) -> list[str]:
    return sorted(_registry(kind))


def load(kind: Kind, name: str) -> Any:
    """The object behind a plug-in's name.

    Raises: UnknownPlugin (names the known ones, the nearest match), InvalidRequest when its extra is not installed.
    """
    registry = _registry(kind)
    if name not in registry:
        if _is_new(kind, name):
            raise UnknownPlugin(
                f"{kind} {name!r} was installed after this process started. Restart the service (server and nodes) to "
                "use it."
            )
        raise UnknownPlugin.named(kind, name, registry)
    try:
        return registry[name].load()
    except ModuleNotFoundError as error:
        raise InvalidRequest(_missing(kind, registry[name], error.name or "")) from error


def _is_new(kind: Kind, name: str) -> bool:
    """Whether the plug-in was installed since the registry was read."""
    invalidate_caches()
    return any(entry.name == name for entry in entry_points(group=_group(kind)))


def _missing(kind: Kind, entry: EntryPoint, module: str) -> str:
    """The package to install for a plug-in that lacks one."""
    what = f"{kind} {entry.name!r} needs the Python package {module!r}, which is not installed."
    distribution = entry.dist.name if entry.dist is not None else "gangline"
    if distribution != "gangline":
        return f"{what} It comes with {distribution}: reinstall that with its dependencies."
    top = module.partition(".")[0]
    extra = next((extra for extra, modules in _EXTRAS.items() if top in modules), "engine")
    return f"{what} Run: pip install 'gangline[{extra}]'."


def _configured(kind: Kind, name: str, config: dict[str, Any]) -> Any:
    plugin = load(kind, name)
    config_type: type[BaseModel] = plugin.Config
    try:
        return plugin(config_type.model_validate(config))
    except ValidationError as error:
        raise InvalidRequest(f"{kind} {name!r}: {explain(error)}") from error


def explain(error: ValidationError) -> str:
    """A validation error as one line for people: place and problem."""
    found = [f"{'.'.join(str(step) for step in item['loc']) or 'body'}: {item['msg']}" for item in error.errors()[:8]]
    return "; ".join(found)


def make_runtime(name: str) -> Runtime:
    return load("runtime", name)()


def make_harness(name: str, settings: dict[str, Any]) -> Harness:
    return _configured("harness", name, settings)


def make_builder(strategy: str, config: dict[str, Any]) -> Builder:
    return _configured("builder", strategy, config)


def make_evaluator(strategy: str, config: dict[str, Any]) -> Evaluator:
    return _configured("evaluator", strategy, config)


def check_task(task: TaskRequest) -> None:
    """Raises: UnknownPlugin, InvalidRequest when the configuration of a plug-in is wrong."""
    load("runtime", task.runtime.backend)
    _check_capabilities(task.agent, make_harness(task.agent.harness, task.agent.settings))
    make_builder(task.builder.strategy, task.builder.config)
    _check_refresh(task.evaluator, make_evaluator(task.evaluator.strategy, task.evaluator.config))


def _check_refresh(spec: EvaluatorSpec, evaluator: Evaluator) -> None:
    """Raises: InvalidRequest when the evaluator would ignore that a clean runtime is asked for."""
    if spec.refresh_runtime and not (isinstance(evaluator, GradesClean) and evaluator.grades_clean):
        raise InvalidRequest(
            f"evaluator.refresh_runtime: evaluator {spec.strategy!r} grades in no clean runtime; leave refresh_runtime "
            "out, or choose an evaluator that does, such as `script`."
        )


def _check_capabilities(agent: AgentSpec, harness: Harness) -> None:
    """Raises: InvalidRequest when the harness would have to drop a field of the task."""
    asked: dict[Capability, bool] = {"mcp_servers": bool(agent.mcp_servers), "skills": bool(agent.skills)}
    takes = harness.takes if isinstance(harness, SupportsCapabilities) else frozenset[Capability]()
    refused = [f"`agent.{field}`" for field, is_asked in asked.items() if is_asked and field not in takes]
    if refused:
        raise InvalidRequest(
            f"harness {agent.harness!r} has no way to give its program {' or '.join(refused)}: leave that out, or "
            "choose a harness that has (`gangline harness list`)."
        )
