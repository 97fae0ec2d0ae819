"""Checks of `gangline doctor` beyond the machine itself: other runtimes, engines, a running service, traces."""

from __future__ import annotations

import asyncio
import errno
import importlib.util
import resource
import socket
import time
from typing import Any

from gangline.cli.machine.checks import Check, Examination
from gangline.domain.errors import GanglineError
from gangline.domain.template_findings import features, lacks
from gangline.domain.views import SILENT_AFTER_S, NodeView, ServiceStatus
from gangline.settings import plugins
from gangline.settings.installation import extra_command
from gangline.settings.machine import Settings
from gangline.wire.client.running import Service, read_running, read_server
from gangline.wire.client.server import ServerClient

_USUAL_PORT = 8700
_CHECKED_ALONE = ("sandbox", "apptainer", "docker", "podman")
_ENOUGH_FILES = 8192
_PROBE_TIMEOUT_S = 30.0
_MAX_SKEW_S = 2.0


def check_runtimes(settings: Settings) -> Check:
    """Runtimes without a check of their own; they are optional."""
    lines: list[str] = []
    broken: list[str] = []
    for name in plugins.usable("runtime"):
        if name in _CHECKED_ALONE:
            continue
        try:
            asyncio.run(plugins.make_runtime(name).check())
        except GanglineError as error:
            lines.append(f"{name}: no")
            broken.append(f"{name}: {error.message}")
        else:
            lines.append(f"{name}: yes")
    state = "optional" if broken else "ok"
    return Check(name="other runtimes", state=state, found=", ".join(lines) or "none", advice=" ".join(broken))


def check_plugins(settings: Settings) -> Check:
    """Plug-ins of other packages, which are imported for this check."""
    refused = plugins.refusals()
    if not refused:
        return Check(name="plug-ins", state="ok", found="each fulfils its contract")
    return Check(name="plug-ins", state="optional", found=f"{len(refused)} refused", advice=" ".join(refused))


def check_open_files(settings: Settings) -> Check:
    """A sandbox takes about eight descriptors of its node, which raises its soft limit to the hard one."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    found = "no limit" if hard == resource.RLIM_INFINITY else f"up to {hard}"
    if hard == resource.RLIM_INFINITY or hard >= _ENOUGH_FILES:
        return Check(name="open files", state="ok", found=found)
    advice = f"enough for {hard // 8} sessions at once; raise the hard limit (ulimit -Hn, LimitNOFILE=) for more"
    return Check(name="open files", state="optional", found=found, advice=advice)


def check_server_port(settings: Settings) -> Check:
    """Whether the port is free, or used by our own service."""
    running = read_running(settings.data_dir)
    if running is not None and running.server_url.endswith(f":{_USUAL_PORT}"):
        return Check(name="server port", state="ok", found=f"{_USUAL_PORT} is this service's own")
    try:
        with socket.create_server(("127.0.0.1", _USUAL_PORT)):
            return Check(name="server port", state="ok", found=f"{_USUAL_PORT} is free")
    except OSError as error:
        why = "is in use" if error.errno == errno.EADDRINUSE else f"cannot be had: {error.strerror}"
        advice = "`gangline up` takes another one by itself; `gangline server` wants --port"
        return Check(name="server port", state="optional", found=f"{_USUAL_PORT} {why}", advice=advice)


def check_engine(url: str) -> Check:
    """Probes an engine's capabilities, as a node would."""
    name = f"engine {url}"
    try:
        found, lacking = asyncio.run(_probed(url))
    except (GanglineError, TimeoutError) as error:
        advice = error.message if isinstance(error, GanglineError) else f"no answer within {_PROBE_TIMEOUT_S:g} s"
        return Check(name=name, state="missing", found="cannot be used", advice=advice)
    return Check(name=name, state="optional" if lacking else "ok", found=found, advice=" ".join(lacking))


async def _probed(url: str) -> tuple[str, list[str]]:
    """Returns the engine's description, and the features missing from its chat template."""
    async with asyncio.timeout(_PROBE_TIMEOUT_S):
        engine = await plugins.load("engine", "auto")(url)
        try:
            can = await engine.capabilities()
        finally:
            await engine.close()
    what = (
        f"{can.engine} {can.version} serves {can.model}; tier {can.tier}; template: {', '.join(features(can.template))}"
    )
    return what, lacks(can.template)


def check_service(settings: Settings) -> Check:
    """Checks the service of the data folder or GANGLINE_SERVER: whether it answers, and its state."""
    address, who = _address(settings)
    if address is None:
        return Check(name="service", state="ok", found=f"none is running on {settings.data_dir}")
    try:
        status = asyncio.run(_status(address))
    except GanglineError as error:
        return Check(name="service", state="missing", found=f"{who} does not answer as it should", advice=error.message)
    ailments = [*_ailments(status), *_skew(status)]
    found = f"{who}; {len(status.nodes)} nodes, {status.sessions.get('queued', 0)} sessions queued"
    return Check(name="service", state="optional" if ailments else "ok", found=found, advice="; ".join(ailments))


def _address(settings: Settings) -> tuple[Service | None, str]:
    running = read_running(settings.data_dir)
    if running is not None:
        address = Service(server_url=running.server_url, control_token=running.control_token)
        return address, f"{running.server_url}, pid {running.pid}"
    if (server := read_server(settings.data_dir)) is not None:
        address = Service(server_url=server.urls[0], control_token=server.control_token)
        return address, f"{server.urls[0]}, pid {server.pid}"
    if settings.server_url is None:
        return None, ""
    return Service(server_url=settings.server_url, control_token=settings.control_token), settings.server_url


async def _status(address: Service) -> ServiceStatus:
    async with ServerClient(address.server_url, address.control_token) as client:
        return await client.status()


def _ailments(status: ServiceStatus) -> list[str]:
    if not status.nodes:
        return ["no node has joined: start one with `gangline node`"]
    silent = [
        f"node {node.node_id} is silent for {node.age_s:.0f} s" for node in status.nodes if node.age_s > SILENT_AFTER_S
    ]
    return silent + [ailment for node in status.nodes for ailment in _of_backends(node)]


def _of_backends(node: NodeView) -> list[str]:
    has_none = all(backend.get("role") for backend in node.backends)
    missing = [f"node {node.node_id} has no engine: `gangline backend add URL`"] if has_none else []
    broken = [
        f"{_named(backend, node)} is {backend.get('state')}: {backend.get('error')}"
        for backend in node.backends
        if backend.get("state") == "unhealthy"
    ]
    return [*missing, *broken] + [
        f"{_named(backend, node)}: {lack}" for backend in node.backends for lack in backend.get("template_lacks", ())
    ]


def _named(backend: dict[str, Any], node: NodeView) -> str:
    role = f" for role {backend['role']}" if backend.get("role") else ""
    return f"engine {backend.get('url')}{role} of node {node.node_id}"


def _skew(status: ServiceStatus) -> list[str]:
    """Reports clock skew: any difference beyond the time of the answer."""
    skew_s = status.at - time.time()
    return [f"its clock is off by {skew_s:.0f} s: synchronise the clocks (NTP)"] if abs(skew_s) > _MAX_SKEW_S else []


def check_traces(settings: Settings) -> Check:
    """A configured collector requires the extra; without a collector it is not needed."""
    if settings.otel_endpoint is None:
        return Check(name="traces", state="ok", found="off: OTEL_EXPORTER_OTLP_ENDPOINT is not set")
    if not importlib.util.find_spec("opentelemetry") or not importlib.util.find_spec("opentelemetry.sdk"):
        advice = f"{extra_command('otel')}, or unset OTEL_EXPORTER_OTLP_ENDPOINT"
        return Check(name="traces", state="missing", found="the extra is not installed", advice=advice)
    return Check(name="traces", state="ok", found=f"sent to {settings.otel_endpoint}")


SERVICE_CHECKS: tuple[Examination, ...] = (
    check_runtimes,
    check_plugins,
    check_open_files,
    check_server_port,
    check_service,
    check_traces,
)
