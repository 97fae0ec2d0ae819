"""The contract of each kind of plug-in as data, and the check of an object against it. Imports no plug-in's package.

The classes and Protocols are the contract in full; `tests/integration/test_plugins_refused.py` compares these tables
with them.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from types import FunctionType
from typing import Any, Literal, cast

import msgspec
from pydantic import BaseModel

from gangline.domain.completion import OWN_EVIDENCE
from gangline.domain.sandbox import Runtime

Kind = Literal[
    "dialect",
    "engine",
    "runtime",
    "harness",
    "builder",
    "evaluator",
    "reward",
    "engine_server",
    "tool",
    "handler",
    "environment",
    "hook",
    "evidence",
]


class Contract(msgspec.Struct, frozen=True, kw_only=True):
    """Requirements on the object behind an entry point."""

    group: str
    page: str
    """Page in docs/guides, with the section."""
    what: str
    """Readable description of the object."""
    is_class: bool = True
    base: type[Any] | None = None
    """The class that it is a subclass of, where that has more than the names below: defaults of abilities."""
    has_config: bool = False
    """Whether it has a pydantic `Config` for its constructor; otherwise the constructor takes no arguments."""
    waits: Mapping[str, int] = {}
    """`async def` methods -> number of positional arguments they are called with."""
    answers: Mapping[str, int] = {}
    """Synchronous methods -> number of positional arguments they are called with."""
    fields: Sequence[str] = ()
    """Attributes of the class."""
    own_fields: Sequence[str] = ()
    """Attributes of each instance."""


_ENGINE = {"probe": 0, "capabilities": 0, "chat": 1, "render": 1, "detokenize": 1, "check_health": 1, "close": 0}
_DIALECT = {"speaks": 1, "key_of": 1, "parse_call": 1, "parse_count": 1, "reply_body": 2, "count_body": 1}
CONTRACTS: Mapping[Kind, Contract] = {
    "harness": Contract(
        group="gangline.harnesses",
        page="harnesses.md#your-own",
        what="starts an agent program",
        has_config=True,
        fields=("name",),
        waits={"prepare": 1},
        answers={"judge": 1},
    ),
    "runtime": Contract(
        group="gangline.runtimes",
        page="runtimes.md#writing-a-runtime",
        what="starts sandboxes of one kind",
        base=Runtime,
        fields=("name",),
        waits={"start": 1, "reap": 2},
    ),
    "evaluator": Contract(
        group="gangline.evaluators",
        page="evaluators.md#write-your-own-grader",
        what="gives a session its reward",
        has_config=True,
        fields=("name",),
        waits={"evaluate": 1},
    ),
    "reward": Contract(
        group="gangline.rewards",
        page="evaluators.md#function",
        what="a function of the session's transcript, for evaluator `function`",
        is_class=False,
    ),
    "builder": Contract(
        group="gangline.builders",
        page="builders-and-exports.md#your-own-builder",
        what="makes traces of completions",
        has_config=True,
        fields=("name",),
        answers={"build": 1},
    ),
    "environment": Contract(
        group="gangline.environments",
        page="environments.md#write-your-own-kind",
        what="a kind of world that agents act in",
        has_config=True,
        fields=("name", "hidden_tools", "offers_tools"),
        own_fields=("command", "env"),
    ),
    "tool": Contract(
        group="gangline.tools",
        page="tools.md#write-your-own-tool",
        what="a function that a model may call, for harness `native`",
        has_config=True,
        waits={"open": 1, "run": 2, "close": 0},
        own_fields=("name", "description", "parameters"),
    ),
    "handler": Contract(
        group="gangline.handlers",
        page="papers/prorl-agent.md#port-a-handler",
        what="a task family with `init`, `run` and `eval`",
        waits={"init": 1, "run": 1, "eval": 1},
        answers={"init_exception": 2, "run_exception": 2, "eval_exception": 2, "final_result": 1},
    ),
    "hook": Contract(
        group="gangline.hooks",
        page="training.md#hooks",
        what="a function that changes what a run trains on",
        is_class=False,
    ),
    "engine": Contract(
        group="gangline.engines",
        page="engines.md#an-engine-of-your-own",
        what="a client of an inference server: a class, or a function that makes one, which may be async",
        is_class=False,
        waits=_ENGINE,
        answers={"stream": 1},
    ),
    "dialect": Contract(
        group="gangline.dialects",
        page="plugins.md#dialects",
        what="the wire format of a provider",
        fields=("name", "title", "routes"),
        answers=_DIALECT | {"event_writer": 1, "error_answer": 1, "model_list": 1, "model_card": 1},
    ),
    "evidence": Contract(
        group="gangline.evidence",
        page="plugins.md#evidence-beside-tokens",
        what="evidence alongside sampled tokens",
        fields=("name", "title", "what"),
        answers={"wire": 2, "without_last": 2, "keep": 2, "column": 2},
    ),
    "engine_server": Contract(
        group="gangline.engine_servers",
        page="plugins.md#engine-servers",
        what="a function that starts a server for `gangline engine`",
        is_class=False,
    ),
}


def faults(kind: Kind, name: str, found: Any) -> str:
    """Faults of the object behind an entry point: `lacks reap, start`; empty if there are none."""
    contract = CONTRACTS[kind]
    if contract.is_class and not isinstance(found, type):
        return f"is not a class but of type {type(found).__name__}"
    if not callable(found):
        return f"is not callable but of type {type(found).__name__}"
    return "; ".join(_class_faults(kind, name, cast("type[Any]", found))) if isinstance(found, type) else ""


def instance_faults(kind: Kind, made: Any) -> str:
    """The same for an instance created from its configuration."""
    lacking = [name for name in CONTRACTS[kind].own_fields if not hasattr(made, name)]
    return f"lacks {', '.join(lacking)}" if lacking else ""


def _class_faults(kind: Kind, name: str, found: type[Any]) -> Iterator[str]:
    contract = CONTRACTS[kind]
    methods: dict[str, int] = {**contract.waits, **contract.answers}
    config = getattr(found, "Config", None)
    wanted = [*(["Config"] if contract.has_config else []), *contract.fields, *methods]
    lacking = [one for one in wanted if not _has(found, one, contract.base)]
    if contract.base is not None and not issubclass(found, contract.base):
        yield f"is not a subclass of {contract.base.__module__}.{contract.base.__name__}"
    abstract = sorted(getattr(found, "__abstractmethods__", frozenset[str]()) - set(lacking))
    if lacking or abstract:
        yield f"lacks {', '.join([*lacking, *abstract])}"
    if contract.has_config and config is not None and not (isinstance(config, type) and issubclass(config, BaseModel)):
        yield "its Config is not a pydantic model"
    if kind in ("runtime", "evidence") and "name" not in lacking and (own := getattr(found, "name", None)) != name:
        yield f"its `name` is {own!r}"
    if kind == "evidence" and name in OWN_EVIDENCE:
        yield "has the name of a built-in kind"
    for method, num_arguments in methods.items():
        if method not in lacking and (fault := _method_fault(found, method, num_arguments, method in contract.waits)):
            yield fault
    if contract.is_class and not abstract and not _takes(found, 1 if contract.has_config else 0):
        yield f"is not made of {'its Config' if contract.has_config else 'nothing'}"


def _has(found: type[Any], name: str, base: type[Any] | None) -> bool:
    """Whether the class says more of the name than its contract: the body of a Protocol or of an abstract method is not
    an implementation; a tool's defaults are."""
    owner = next((one for one in found.__mro__ if name in one.__dict__), None)
    if owner is None:
        own = (one for one in found.__mro__ if one is not base and not _is_protocol(one))
        return any(name in getattr(one, "__annotations__", {}) for one in own)
    if getattr(owner.__dict__[name], "__isabstractmethod__", False):
        return False
    return not _is_protocol(owner) or name in ("open", "close")


def _is_protocol(owner: type[Any]) -> bool:
    return bool(owner.__dict__.get("_is_protocol"))


def _method_fault(found: type[Any], name: str, num_arguments: int, waits: bool) -> str:
    method = inspect.getattr_static(found, name)
    bound: Any = getattr(method, "__func__", method)  # for a static or a class method
    if not callable(bound):
        return f"{name} is not a method"
    if isinstance(bound, FunctionType):
        own = 0 if isinstance(method, staticmethod) else 1
        if not _takes(bound, num_arguments + own):
            return f"{name} does not take {num_arguments} arguments"
        is_async = inspect.iscoroutinefunction(inspect.unwrap(bound))
        if waits and not is_async and not _may_wait(bound):
            return f"{name} is not `async def`"
        if not waits and is_async:
            return f"{name} is `async def`, and is not awaited"
    return ""


def _may_wait(function: FunctionType) -> bool:
    """Whether a plain function returns an awaitable by its annotation, or may do so because it is decorated."""
    annotation = str(function.__annotations__.get("return", ""))
    return hasattr(function, "__wrapped__") or any(word in annotation for word in ("Awaitable", "Coroutine", "Future"))


def _takes(function: Any, num_arguments: int) -> bool:
    """Whether it can be called with this many positional arguments; other required ones are passed by name."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return True  # its signature is unknown
    places = [
        parameter
        for parameter in parameters
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
    ]
    least = sum(place.default is place.empty for place in places)
    return least <= num_arguments and (
        num_arguments <= len(places) or any(parameter.kind is parameter.VAR_POSITIONAL for parameter in parameters)
    )
