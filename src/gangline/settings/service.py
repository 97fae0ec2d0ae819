"""Settings of a server and of a cluster's nodes, and the resolution of all tables of gangline.toml."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from gangline.domain.errors import InvalidRequest
from gangline.settings.fields import Leaf, Setting, leaves_of
from gangline.settings.machine import Settings, machine_settings
from gangline.settings.node import NodeSettings
from gangline.settings.plugins import explain
from gangline.settings.sources import DEFAULT, Origin, Sources

FROM_STDIN = "--settings-from-stdin"
"""Option of a child process that reads `write_tables` from its stdin."""
_STRICT = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class ServerSettings(BaseModel):
    """Settings of `gangline server`, in the table [server]."""

    model_config = _STRICT

    host: str = "127.0.0.1"
    """Address to listen on."""
    port: Annotated[int, Field(ge=0, le=65535)] = 8700
    """Port to listen on; 0 picks a free one."""
    public_url: str | None = None
    """URL under which other machines reach it. Default: its address, or the machine's name if it listens on every
    address."""
    allowed_hosts: Annotated[tuple[str, ...], Setting(option="--allowed-host", words=True)] = ()
    """Additional host names under which clients reach it, such as a reverse proxy's; the option is repeatable. Its own
    address, loopback and the host of --public-url are always allowed.
    """
    no_token: Annotated[bool, Setting(unset="--with-token")] = False
    """Require no control token. Any program on this machine can then run commands."""
    results: str | None = None
    """Folder or fsspec URL (s3://BUCKET/PATH) for results. Default: in the data folder. Servers with a common database
    need a common results folder."""
    keep_days: Annotated[float | None, Field(ge=0)] = None
    """Days after its end until a task is deleted. Default: never."""
    keep_gb: Annotated[float | None, Field(ge=0)] = None
    """Gigabytes of results beyond which the oldest ended tasks are removed. Default: no limit."""


class ClusterSettings(BaseModel):
    """Settings of nodes on a Ray cluster, in the table [cluster]."""

    model_config = _STRICT

    ray_address: str | None = None
    """HOST:PORT of the Ray cluster. Default: RAY_ADDRESS, else the cluster of this machine."""
    num_nodes: Annotated[int | None, Setting(option="--nodes"), Field(ge=1)] = None
    """Number of nodes. Default: 1 on this machine; on a Ray cluster one on each machine with enough resources, also
    when it joins later."""
    max_nodes: Annotated[int | None, Field(ge=1)] = None
    """Start and drain nodes by the number of queued and running sessions, up to this many. Ray's autoscaler starts and
    ends their machines. Default: their number is fixed."""
    min_nodes: Annotated[int, Field(ge=0)] = 1
    """With --max-nodes, the number of nodes that stay when there is nothing to do."""
    shrink_after_s: Annotated[float, Setting(option="--shrink-after"), Field(ge=0)] = 30.0
    """With --max-nodes, seconds for which there are more nodes than asked for until some are drained."""
    drain_timeout_s: Annotated[float, Setting(option="--drain-timeout"), Field(ge=0)] = 3600.0
    """With --max-nodes, seconds after which a drained node ends although sessions run; they go back to the queue."""
    node_cpus: Annotated[float, Field(ge=0)] = 1.0
    """CPUs that a node requests from Ray; 0 requests none."""
    node_resources: dict[str, float] = {}
    """Resources that a node requests from Ray in addition to CPUs, as JSON: {"sandboxes": 1}."""
    node_data: Path | None = None
    """Data folder of the nodes, on a disk of each machine. Default: the same path as --data."""


class UpSettings(BaseModel):
    """Settings of `gangline up` alone, in the table [up]."""

    model_config = _STRICT

    tokenizer: str = "smollm2"
    """Tokenizer of a scripted engine: smollm2, a folder, or a name."""
    on_cluster: Annotated[bool, Setting(option="--cluster")] = False
    """Run the nodes on the machines of a Ray cluster."""


UP_DEFAULTS: Mapping[str, Any] = {
    "node.engines": ("embedded:smollm2",),
    "node.engine_wait_s": 10.0,
    "node.node_id": "node-1",
}
"""By key: defaults of a whole service on one machine, which differ from the models'. A running engine that is given to
it is expected to be up.
"""
_MODELS: dict[str, type[BaseModel]] = {
    "": Settings,
    "server": ServerSettings,
    "node": NodeSettings,
    "cluster": ClusterSettings,
    "up": UpSettings,
}
LEAVES: dict[str, Leaf] = leaves_of(_MODELS)
"""All settings, by key in gangline.toml."""


class Resolved(NamedTuple):
    """All settings, with their origins."""

    machine: Settings
    server: ServerSettings
    node: NodeSettings
    cluster: ClusterSettings
    up: UpSettings
    origins: Mapping[str, Origin]
    """By key, for values that are not defaults."""
    file: Path | None
    """The config file that was read."""

    def value(self, key: str) -> Any:
        table, _, name = key.rpartition(".")
        return getattr(getattr(self, table or "machine"), name)

    def origin(self, key: str) -> Origin:
        return self.origins.get(key, DEFAULT)

    def is_default(self, key: str) -> bool:
        return key not in self.origins

    def option(self, key: str) -> Any:
        """The value if it was set by an option; else None."""
        return self.value(key) if self.origin(key).source == "option" else None

    def environment(self) -> dict[str, str]:
        """Variables that pass the machine's settings to a child process, which then reads no config file."""
        given = {name: one for name, one in self.origins.items() if name in Settings.model_fields}
        texts = {
            LEAVES[name].env[0]: LEAVES[name].write(self.value(name))
            for name, origin in given.items()
            if origin.source in ("file", "option")
        }
        return {**texts, "GANGLINE_CONFIG": ""}


def write_tables(options: Mapping[str, str] | None = None, /, **tables: BaseModel) -> bytes:
    """Encode tables for a child process, which decodes them with `read_tables`.

    options: values by key, for options that were unknown when the child was started.
    """
    written = {name: table.model_dump(mode="json") for name, table in tables.items()}
    return json.dumps({"options": dict(options or {}), "tables": written}).encode()


def read_tables(data: bytes) -> tuple[dict[str, str], dict[str, BaseModel]]:
    """Options and tables. Raises: InvalidRequest if they come from another version."""
    try:
        document: dict[str, Any] = json.loads(data)
        tables = {name: _MODELS[name].model_validate(table) for name, table in document["tables"].items()}
        return document["options"], tables
    except ValidationError as error:
        raise InvalidRequest(f"settings from the parent process: {explain(error)}") from error


def resolve(
    options: Mapping[str, Any] | None = None,
    *,
    environ: Mapping[str, str] | None = None,
    config: Path | None = None,
    handed_over: Mapping[str, BaseModel] | None = None,
    defaults: Mapping[str, Any] | None = None,
) -> Resolved:
    """Read every source of settings.

    options: values by key, for options that were given. environ: None: the process's own. config: path of the config
    file, instead of the default ones. handed_over: tables from a parent process. defaults: a command's own, by key.
    Raises: InvalidRequest for an invalid value or key.
    """
    sources = Sources.found(environ, config=config, options=options, handed_over=handed_over, known=LEAVES)
    machine, origins = machine_settings(sources)
    tables: dict[str, Any] = {}
    for table, model in _MODELS.items():
        if table:
            values, found = sources.values(table, model)
            own = {key.rpartition(".")[2]: one for key, one in (defaults or {}).items() if key.startswith(f"{table}.")}
            tables[table] = model(**{**own, **values})
            origins |= {f"{table}.{name}": origin for name, origin in found.items()}
    if machine.database_url is not None and "://" not in machine.database_url:
        named = origins["database_url"].where
        raise InvalidRequest(f"{named} is a URL, such as postgresql://USER@HOST/NAME; for SQLite give --data.")
    return Resolved(machine, **tables, origins=origins, file=sources.file and sources.file.path)
