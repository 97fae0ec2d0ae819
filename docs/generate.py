"""Make docs/reference from the code: `python docs/generate.py`; with `--check`, only tell whether it is current."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import typer.main
from access import access
from aiohttp import web
from dialect_fields import dialect_fields
from harness_table import harness_table
from limits import limits
from log_actions import logs
from metric_names import metrics
from rewards_table import rewards_table
from settings_table import settings
from templates_table import templates_table

from gangline.cli.commands import COMMANDS, load_command
from gangline.cli.main import build_app
from gangline.cli.terminal.exits import EXPLAINED
from gangline.models.engine_server.app import create_app
from gangline.node.calls.proxy import Proxy
from gangline.node.node import TITLE as NODE_TITLE
from gangline.node.node import control_routes
from gangline.server.app import TITLE, all_routes
from gangline.serving.scripted.script import Reply, Script
from gangline.serving.scripted.server import ScriptedSampler
from gangline.serving.scripted.tiny_tokenizer import TinyTokenizer
from gangline.wire.http.openapi import describe
from gangline.wire.http.routes import Route

REFERENCE = Path(__file__).parent / "reference"
_NOTE = "<!-- Made by docs/generate.py from the code; `make docs` makes it again. -->\n\n"


def command_line() -> str:
    """docs/reference/cli.md"""
    root: Any = typer.main.get_command(build_app())
    parts = [
        f"{_NOTE}# The command line\n",
        f"{inspect.cleandoc(root.help)}\n",
        "Documents go to stdout, notes and logs to stderr. With `--json` stdout is one JSON document, or one a line; "
        'an error is then `{"error": {"code", "message", "retryable"}}` there too. `--debug` before the command shows '
        "tracebacks.\n",
        *(_command(name, load_command(name)) for name in COMMANDS),
        "## Exit codes\n\n| code | meaning |\n|---|---|",
        *(f"| {int(code)} | {meaning} |" for code, meaning in EXPLAINED.items()),
        "\n## Environment and config file\n",
        "Each option of `up`, `server`, `node` and `cluster` is also a key of `gangline.toml` and an environment "
        "variable: [settings](settings.md).",
    ]
    return "\n".join(parts) + "\n"


def _command(name: str, command: Any) -> str:
    if inner := getattr(command, "commands", None):
        lines = [f"## gangline {name}\n", f"{inspect.cleandoc(command.help or '')}\n"]
        return "\n".join([*lines, *(_command(f"{name} {sub}", one) for sub, one in inner.items())])
    shown = [param for param in command.params if not getattr(param, "hidden", False)]
    arguments = [param for param in shown if not any(opt.startswith("-") for opt in param.opts)]
    options = [param for param in shown if param not in arguments]
    usage = " ".join(["gangline", name, *(_argument(param) for param in arguments), "[OPTIONS]"])
    lines = [f"## gangline {name}\n", f"```\n{usage}\n```\n", f"{inspect.cleandoc(command.help or '')}\n"]
    if options:
        lines += ["| option | default | meaning |", "|---|---|---|", *(_option(param) for param in options), ""]
    return "\n".join(lines)


def _argument(param: Any) -> str:
    name = param.metavar or param.name.upper()
    return name if param.required or name.startswith("[") else f"[{name}]"


def _option(param: Any) -> str:
    names = ", ".join(f"`{opt}`" for opt in param.opts if opt != "-h")
    default = "" if param.default is None or param.is_flag else f"`{param.default}`"
    default = "required" if param.required else default
    return f"| {names} | {default} | {_one_line(param.help)} |"


def _one_line(text: str | None) -> str:
    return " ".join((text or "").split()).replace("|", "\\|")


def http() -> str:
    """docs/reference/http.md"""
    description = describe(all_routes(cast(Any, SimpleNamespace(store=None))), TITLE)
    node = describe(_node_routes(), NODE_TITLE)
    parts = [
        f"{_NOTE}# HTTP\n",
        "Server and node answer alike. Every route but `/health` wants `Authorization: Bearer CONTROL_TOKEN`, or, "
        "where a table says so, the session's key. Errors are problem+json (`code`, `title`, `detail`). Records are "
        "JSON, or MessagePack where `Accept` prefers `application/msgpack`; an `Accept` that allows neither gets "
        "JSON. Routes below `/v1/` refuse query parameters that they do not have; a number below its minimum is "
        "refused, one above its maximum is held to it. An empty body is `{}`. `GET /openapi.json` describes all of it "
        "to machines.\n",
        "## The server\n",
        "| route | what it does | query | body | answer |\n|---|---|---|---|---|",
        *_own_routes(description),
        "## A node\n",
        "Harnesses call these with the session's key, as `Authorization: Bearer KEY`; `{session}` is the session's id. "
        "Errors have the shape of the provider whose API was called.\n",
        "| route |\n|---|",
        *_plain_routes(Proxy().routes()),
        "\nThe node's own routes; those of agents, below a session, want its key too. "
        "[Sessions of your own agents](../guides/external-sessions.md) shows them at work.\n",
        "| route | what it does | query | body | answer |\n|---|---|---|---|---|",
        *_own_routes(node),
        "\n## An engine server\n",
        "What `gangline engine` serves: vLLM's routes and fields, as far as Gangline uses them. See vLLM's "
        "documentation for the fields.\n",
        "| route |\n|---|",
        *_plain_routes(_engine_app().router.routes()),
        "\n## Records\n",
        *_records(description["components"]["schemas"] | node["components"]["schemas"]),
    ]
    return "\n".join(parts) + "\n"


def _node_routes() -> list[Route]:
    parts: Any = SimpleNamespace(gate=None, backends=None)
    return control_routes(parts, *([cast(Any, None)] * 3))


def _engine_app() -> web.Application:
    script = Script(default=Reply(text="x"))
    return create_app(ScriptedSampler(script, TinyTokenizer()))


def _own_routes(description: dict[str, Any]) -> Iterator[str]:
    for path, methods in description["paths"].items():
        for method, operation in methods.items():
            query = ", ".join(f"`{one['name']}`" for one in operation["parameters"] if one["in"] == "query")
            body = _type_of(operation.get("requestBody", {}))
            answer = _type_of(operation["responses"]["200"])
            key = " (session's key)" if {"session": []} in operation["security"] else ""
            summary = _one_line(operation["summary"]) + key
            yield f"| `{method.upper()} {path}` | {summary} | {query} | {body} | {answer} |"


def _type_of(described: dict[str, Any]) -> str:
    for media in described.get("content", {}).values():
        return _name_of(media["schema"])
    return ""


def _name_of(schema: dict[str, Any]) -> str:
    if "$ref" in schema:
        name = schema["$ref"].rsplit("/", 1)[1]
        return f"[{name}](#{name.lower()})"
    if schema.get("type") == "array":
        items = schema.get("items")
        return f"list of {_name_of(items)}" if items else "list"
    if kinds := schema.get("anyOf") or schema.get("oneOf"):
        return " or ".join(_name_of(kind) for kind in kinds)
    if "enum" in schema:
        return ", ".join(f"`{value}`" for value in schema["enum"])
    if "const" in schema:
        return f"`{schema['const']}`"
    return str(schema.get("type", "any"))


def _records(schemas: dict[str, Any]) -> Iterator[str]:
    for name, schema in sorted(schemas.items()):
        yield f"#### {name}\n"
        if about := schema.get("description"):
            yield f"{_one_line(about)}\n"
        properties: dict[str, Any] = schema.get("properties", {})
        if not properties:
            continue
        required = set(schema.get("required", ()))
        yield "| field | type | meaning |\n|---|---|---|"
        for field, inner in properties.items():
            default = f" Default: `{inner['default']}`." if inner.get("default") not in (None, "", (), [], {}) else ""
            meaning = _one_line(inner.get("description")) + default
            yield f"| `{field}`{'' if field not in required else ' (required)'} | {_name_of(inner)} | {meaning} |"
        yield ""


def _plain_routes(routes: Any) -> Iterator[str]:
    for route in routes:
        path = route.path if isinstance(route, web.RouteDef) else route.resource.canonical
        if not (isinstance(route, web.AbstractRoute) and route.method == "HEAD"):
            yield f"| `{route.method} {path}` |"


PAGES: dict[str, Callable[[], str]] = {
    "access.md": access,
    "cli.md": command_line,
    "dialect-fields.md": dialect_fields,
    "harnesses.md": harness_table,
    "http.md": http,
    "logs.md": logs,
    "limits.md": limits,
    "metrics.md": metrics,
    "rewards.md": rewards_table,
    "settings.md": settings,
    "templates.md": templates_table,
}


def main() -> int:
    stale = [name for name, make in PAGES.items() if not _is_current(REFERENCE / name, make())]
    if "--check" in sys.argv[1:]:
        print(f"stale: {', '.join(stale)}; run make docs" if stale else "docs/reference is current")
        return 1 if stale else 0
    REFERENCE.mkdir(exist_ok=True)
    for name in stale:
        (REFERENCE / name).write_text(PAGES[name]())
        print(f"docs/reference/{name}")
    return 0


def _is_current(path: Path, text: str) -> bool:
    return path.exists() and path.read_text() == text


if __name__ == "__main__":
    sys.exit(main())
