"""A running node: the proxy for harnesses, the pipeline of sessions, the journal, the reaper."""

from __future__ import annotations

import asyncio
import logging
import resource
import socket
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from types import TracebackType

from aiohttp import web

from gangline.agents.tools.search.shipped import shipped_sources
from gangline.domain.errors import EngineMalformed, EngineUnavailable, GanglineError, StoreError
from gangline.domain.node_views import NodeStatus
from gangline.domain.sandbox import Sandbox
from gangline.domain.session import SessionResult
from gangline.domain.task import RuntimeSpec
from gangline.grading.untrusted.isolated import ForkServers
from gangline.machine.private import close_to_others, make_private_folder, open_data_folder
from gangline.machine.telemetry.exposition import CONTENT_TYPE
from gangline.node.backends.admission import Admission
from gangline.node.backends.by_role import BackendsByRole
from gangline.node.backends.engine import BackendSpec
from gangline.node.backends.member_file import MemberFile
from gangline.node.backends.pool import BackendPool
from gangline.node.calls.proxy import Proxy
from gangline.node.calls.reading.pool import Readers
from gangline.node.control.backends import BackendRoutes
from gangline.node.control.calls import CallRoutes
from gangline.node.control.gate import GateRoutes
from gangline.node.control.gradings import GradingRoutes
from gangline.node.control.images import ImageRoutes
from gangline.node.control.polar_gate import PolarGateRoutes
from gangline.node.control.sessions import SessionRoutes
from gangline.node.external.sessions import ExternalSessions
from gangline.node.external.store import ExternalStore
from gangline.node.health.breaker import Breaker
from gangline.node.health.disk_guard import DiskGuard
from gangline.node.health.interpreter import collect_forever, settle_interpreter
from gangline.node.health.metrics import NodeMetrics
from gangline.node.health.offers import Offers
from gangline.node.health.watchdog import Watchdog
from gangline.node.identity import node_identity, owner_of
from gangline.node.sessions.adoption import adoptable
from gangline.node.sessions.attempt import Attempt
from gangline.node.sessions.leases.delivery import Delivery
from gangline.node.sessions.leases.hooks import Hooks
from gangline.node.sessions.parts import NodeParts
from gangline.node.sessions.pipeline import Pipeline, one_error
from gangline.node.sessions.replay.regrading import regrade
from gangline.node.sessions.reuse.checkpoints import Checkpoints
from gangline.node.sessions.reuse.turns import TurnSender
from gangline.node.sessions.reuse.warm import WarmPool, WarmSizes
from gangline.node.sessions.sandboxes import start_prepared
from gangline.node.sessions.stages import Pools, PoolSizes
from gangline.sandbox.images.cache import ImageCache
from gangline.sandbox.images.pulling import Pulls
from gangline.sandbox.images.supply import ImageSupply
from gangline.sandbox.keeper.kept import Keeper, reap_keeper
from gangline.settings import plugins
from gangline.settings.addresses import local_url, reachable_url
from gangline.settings.machine import Settings
from gangline.settings.node import NodeSettings, RoleEngines
from gangline.store.audit import ActionLog
from gangline.store.journal.log import AttemptKey, Journal
from gangline.wire.client.server import ServerClient
from gangline.wire.http.listening import listening, port_unavailable
from gangline.wire.http.negotiation import answer
from gangline.wire.http.openapi import described
from gangline.wire.http.problems import problem_response
from gangline.wire.http.routes import HEALTH, Door, Route
from gangline.wire.http.same_origin import OwnNames, refuse_open_door

log = logging.getLogger("gangline.node")

TITLE = "Gangline node"

_EXPIRE_EVERY_S = 30.0
_GIB = 1 << 30


async def serve(
    settings: NodeSettings,
    *,
    data_dir: Path,
    node_id: str,
    server_url: str,
    control_token: str | None,
    on_ready: Callable[[str], None] | None = None,
    on_result: Callable[[SessionResult], None] | None = None,
) -> None:
    """Run a node until it is cancelled or drained. Its state is in `data_dir/nodes/<node_id>`.

    Long because it lists the node's parts in their start order, which is the reverse of their stop order.

    settings: its engines are the initial backends. Later changes survive restarts with the same engines.
    node_id: replaces the one in `settings`.
    on_result: called with the result of each ended attempt, on the event loop.

    Raises: EngineUnavailable when an engine does not answer within `engine_wait_s`, EngineIncapable when it reports no
    token ids or log-probs, Conflict when the engines serve different models, PortUnavailable when the port is taken,
    InvalidRequest when anyone could reach the control routes or an engine's key is not in the environment, NodeIdTaken
    when a node with another data folder has the id, or takes it later while this one is not heard; UnknownPlugin when a
    runtime that tasks may use is not installed.
    """
    host, public_url = settings.host, settings.public_url
    allowed = settings.allowed()
    refuse_open_door(host, control_token)
    names = OwnNames(host, public_url=public_url, allowed_hosts=settings.allowed_hosts)
    wanted = PoolSizes(**{name: getattr(settings, name) for name in PoolSizes.model_fields})
    max_files = _allow_many_files()
    sizes = wanted.fitted(max_files)
    if sizes != wanted:
        log.warning(
            "node.slots_fitted run=%d ready=%d wanted_run=%d wanted_ready=%d max_files=%d: raise LimitNOFILE for more",
            *(sizes.run_slots, sizes.ready_slots, wanted.run_slots, wanted.ready_slots, max_files),
        )
    await asyncio.to_thread(plugins.log_refusals)
    folder = await asyncio.to_thread(_open_folder, data_dir, node_id)
    owner, machine = owner_of(folder), Settings.from_environ()
    async with AsyncExitStack() as stack:
        # First, for its lock: from here on no other process of this node works.
        journal = await asyncio.to_thread(Journal.open, folder / "journal")
        stack.push_async_callback(journal.close)
        runtimes_folder = folder / "runtimes"
        await asyncio.to_thread(make_private_folder, runtimes_folder)
        keeper = Keeper(folder / "keeper", owner=owner, runtimes_folder=runtimes_folder, grace_s=settings.adopt_grace_s)
        stack.push_async_exit(partial(_end_runtimes, keeper, owner, runtimes_folder))
        for_agents = await keeper.join(lambda: _bind("127.0.0.1", 0))
        stack.callback(for_agents.close)
        backends = BackendsByRole(
            partial(
                BackendPool,
                node=socket.gethostname(),
                capture=settings.capture,
                affinity_slack=settings.affinity_slack,
                admission=_admission(settings),
                is_traced=machine.otel_endpoint is not None,
            )
        )
        stack.push_async_callback(backends.close)
        named = [
            BackendSpec(url, settings.engine_kind, None, settings.engine_key_env, settings.engine_options)
            for url in settings.engines
        ]
        named += _of_roles(settings.role_engines)
        for role, of_role in settings.role_engines.items():
            backends.name_role(role, of_role.max_calls)
        memory = MemberFile(folder / "backends.json", named)
        await _add_all(backends, named, await asyncio.to_thread(memory.changed), settings.engine_wait_s)
        client = await stack.enter_async_context(ServerClient(server_url, control_token))

        listener = _bind(host, settings.port)
        stack.callback(listener.close)
        bound_port = int(listener.getsockname()[1])
        url = reachable_url(host, bound_port, public_url)
        metrics = NodeMetrics()
        turns = TurnSender(node_id, client, journal.on_kept)
        journal.on_kept.append(metrics.kept)
        readers = Readers()
        stack.push_async_callback(readers.close)
        child_work = ForkServers()
        stack.push_async_callback(child_work.close)
        checkpoints = Checkpoints(
            keeper.release,
            max_bytes=int(settings.checkpoint_gib * _GIB),
            hold_s=settings.checkpoint_hold_s,
            found=keeper.checkpoints,
        )
        stack.push_async_callback(checkpoints.close)
        max_image_bytes = None if settings.image_cache_gb is None else settings.image_cache_gb * 1e9
        cache = ImageCache(folder / "images.json", max_bytes=max_image_bytes)
        await asyncio.to_thread(cache.load)
        pulls = Pulls(at_once=settings.pulls_at_once, mirrors=machine.image_mirrors)
        images = ImageSupply(pulls, settings.pull, cache)
        stack.push_async_callback(images.pulls.close)
        spares = _warm(settings, lambda spec, runtime_id: start_prepared(parts, spec, runtime_id))
        if spares is not None:
            stack.push_async_callback(spares.close)
        proxy = Proxy(limits=settings.call_limits, readers=readers, on_error=metrics.error_told)
        parts = NodeParts(
            node_id=node_id,
            owner=owner,
            runtimes_folder=runtimes_folder,
            hidden=await asyncio.to_thread(_hidden, data_dir),
            prepare_folders=tuple(path.absolute() for path in machine.prepare_folders),
            backends=backends,
            first_model=next((view.model for view in backends.policy.views()), ""),
            proxy=proxy,
            proxy_port=int(for_agents.getsockname()[1]),
            journal=journal,
            pools=Pools(sizes),
            sampling=settings.policy(),
            grader_engines=settings.engines_of_graders(),
            search_sources={**shipped_sources(), **settings.sources_of_search()},
            mcp_sources=settings.sources_of_mcp(),
            reward_functions=frozenset(settings.reward_functions),
            allowed=allowed,
            child_work=child_work,
            metrics=metrics,
            on_result=on_result,
            recorded=client.session_result,
            turns=turns,
            checkpoints=checkpoints,
            images=images,
            warm=spares,
            keeper=keeper,
        )
        parts.gate.on_expired = backends.policy.lease_expired
        delivery = Delivery(folder / "outgoing", client, journal, _hooks(settings, sizes))
        adopted = await _adopted(keeper, delivery, parts)
        checkpoints.all_ended(attempt.key.session_id for attempt in adopted)
        external = await _external_sessions(stack, folder, parts)
        made_offers = partial(Offers, labels=settings.labels, allowed=parts.allowed, images=images)
        offers = await asyncio.to_thread(made_offers)
        pipeline = Pipeline(
            parts,
            client,
            delivery,
            url=url,
            identity=await asyncio.to_thread(node_identity, folder),
            breaker=Breaker(settings.breaker_faults, pause_s=settings.breaker_pause_s),
            watchdog=Watchdog(settings.stuck_after_s),
            disk=await asyncio.to_thread(DiskGuard, runtimes_folder, settings.disk_reserve_bytes()),
            offers=offers,
            num_external=external.num_open,
            external_ended=external.all_ended,
        )
        await offers.look_at_images()
        await pipeline.join()
        routes = control_routes(parts, external, pipeline, memory.keep, public_url)
        actions = ActionLog(folder / "actions", where=node_id)
        await _listen(stack, proxy, listener, routes, Door(control_token, names, actions))
        # Sandboxes reach a listener without control routes, so agents cannot use them even if no token is set.
        await _listen(stack, proxy, for_agents)
        stack.push_async_callback(pipeline.close)
        stack.callback(keeper.stopping)
        pipeline.adopt(adopted)
        settle_interpreter()
        log.info("node.ready node=%s url=%s engines=%s model=%s", node_id, url, ",".join(settings.engines), parts.model)
        if on_ready is not None:
            on_ready(local_url(host, bound_port))
        async with one_error(), asyncio.TaskGroup() as group:
            background = (_expire(external), metrics.loop_lag.watch(), turns.run(), collect_forever())
            keeping = [group.create_task(work) for work in (*background, images.keep_bound())]
            await pipeline.run()
            for task in keeping:
                task.cancel()


def _hooks(settings: NodeSettings, sizes: PoolSizes) -> Hooks | None:
    if not settings.hooks:
        return None
    return Hooks(settings.hooks, budget_s=settings.hook_timeout_s, at_once=sizes.postrun_workers)


def _warm(settings: NodeSettings, start: Callable[[RuntimeSpec, str], Awaitable[Sandbox]]) -> WarmPool | None:
    if not settings.warm_sandboxes:
        return None
    memory_bytes = int(settings.warm_memory_gib * _GIB)
    sizes = WarmSizes(count=settings.warm_sandboxes, memory_bytes=memory_bytes, age_s=settings.warm_age_s)
    return WarmPool(start, sizes)


async def reap(data_dir: Path, node_id: str) -> None:
    """Remove the leftovers of a killed node. A node also does this itself when it starts and ends."""
    folder = await asyncio.to_thread(_folder_of, data_dir, node_id)
    owner = owner_of(folder)
    await asyncio.to_thread(reap_keeper, owner)
    await _reap(owner, folder / "runtimes")


async def _adopted(keeper: Keeper, delivery: Delivery, parts: NodeParts) -> list[Attempt]:
    """Returns the attempts from before the restart that this node continues. Removes all other leftovers."""
    unclosed = {AttemptKey(opened.session_id, opened.attempt) for opened in parts.journal.unclosed()}
    found = await adoptable(keeper.kept, unclosed, delivery.leftover())
    lasting = {sandbox.runtime_id for _, sandbox in found} | {
        checkpoint.checkpoint_id for checkpoint in keeper.checkpoints
    }
    await _reap(parts.owner, parts.runtimes_folder, frozenset(lasting))
    attempts: list[Attempt] = []
    for note, sandbox in found:
        try:
            parts.sandboxes.hold(sandbox)
            attempts.append(await Attempt.adopted(note, sandbox, parts))
        except (GanglineError, ValueError) as error:  # or another version wrote it, and its task is no longer valid
            log.error("session.not_adopted runtime=%s message=%s", sandbox.runtime_id, error)
            await sandbox.stop()
    return attempts


async def _end_runtimes(
    keeper: Keeper,
    owner: str,
    folder: Path,
    _kind: type[BaseException] | None,
    error: BaseException | None,
    _trace: TracebackType | None,
) -> None:
    """Stop all sandboxes, or keep them for the next try if the node could not start."""
    if keeper.kept and isinstance(error, GanglineError):
        await keeper.leave()
        return
    await keeper.close()
    await _reap(owner, folder)


def _allow_many_files() -> int:
    """Returns how many files may be open. The usual soft limit of 1024 is meant for programs that use `select`."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return sys.maxsize if hard == resource.RLIM_INFINITY else hard


def _folder_of(data_dir: Path, node_id: str) -> Path:
    return (data_dir / "nodes" / node_id).resolve()


def _hidden(data_dir: Path) -> tuple[Path, ...]:
    """Returns absolute paths, since a keeper has another working folder."""
    settings = Settings.from_environ()
    return tuple(dict.fromkeys(path.resolve() for path in (data_dir, settings.data_dir, *settings.hide)))


def _open_folder(data_dir: Path, node_id: str) -> Path:
    """Returns the node's folder, closed to other users except for the part that sandboxes see. Raises: StoreError."""
    folder = _folder_of(data_dir, node_id)
    try:
        open_data_folder(data_dir)
        close_to_others(folder, leave=("runtimes",))
    except OSError as error:
        raise StoreError(f"the data folder {data_dir} cannot be used: {error.strerror}.") from error
    return folder


def _admission(settings: NodeSettings) -> Admission | None:
    if settings.session_places == "off":
        return None
    return Admission(max_wait_s=settings.places_wait_s, is_eager=settings.session_places == "on")


def _of_roles(engines: Mapping[str, RoleEngines]) -> list[BackendSpec]:
    return [
        BackendSpec(url, of_role.kind, None, of_role.key_env, of_role.options, role, of_role.capture)
        for role, of_role in engines.items()
        for url in of_role.urls
    ]


async def _add_all(
    backends: BackendsByRole, named: Sequence[BackendSpec], changed: Sequence[BackendSpec] | None, wait_s: float
) -> None:
    """Add the engines: the `named` ones, which must all answer, or the ones that were `changed` before a restart.

    Of the changed ones, one of the policy's must answer if any was named. A role without engines fails its calls.
    """
    for spec in (*named, *(changed or ())):
        if spec.role is not None:
            backends.name_role(spec.role)
    failures: list[GanglineError] = []
    wait_s = wait_s if named else 0.0
    for spec in named if changed is None else changed:
        try:
            await _add(backends, spec, wait_s)
        except GanglineError as error:
            if changed is None:
                raise
            log.error("backend.left_out url=%s message=%s", spec.url, error)
            failures.append(error)
    if failures and named and not backends.policy.views():
        raise failures[0]


async def _add(backends: BackendsByRole, spec: BackendSpec, wait_s: float) -> None:
    """Add an engine. One that is still starting gets `wait_s` seconds."""
    deadline = asyncio.get_running_loop().time() + wait_s
    while True:
        try:
            await backends.add(spec)
        except EngineUnavailable as error:
            if asyncio.get_running_loop().time() > deadline:
                is_silent = error.details.get("status") is None and not isinstance(error, EngineMalformed)
                why = f"did not answer within {wait_s:g} s" if is_silent else "answers, but cannot be used"
                raise EngineUnavailable(
                    f"the engine at {spec.url} {why} ({error}). {'Start' if is_silent else 'Repair'} it, or name "
                    f"another with {'--engine' if spec.role is None else '--role-engines'}."
                ) from error
            await asyncio.sleep(0.5)
        else:
            return


async def _reap(owner: str, folder: Path, keep: frozenset[str] = frozenset()) -> None:
    """Remove leftovers from before the restart, except sandboxes in `keep`."""
    for name in plugins.usable("runtime"):
        try:
            removed = await plugins.make_runtime(name).reap(owner, folder, keep)
        except Exception as error:  # a plug-in's error: the node starts without it
            log.warning("reaper.failed runtime=%s message=%s", name, str(error) or type(error).__name__)
        else:
            if removed:
                log.warning("reaper.removed runtime=%s count=%d", name, removed)


def _bind(host: str, port: int) -> socket.socket:
    try:
        return socket.create_server((host, port), backlog=1024)
    except OSError as error:
        raise port_unavailable(error, host, port) from error


async def _external_sessions(stack: AsyncExitStack, folder: Path, parts: NodeParts) -> ExternalSessions:
    """Returns the external sessions, continuing those from before a restart."""
    external = ExternalSessions(
        node_id=parts.node_id,
        store=await asyncio.to_thread(ExternalStore, folder / "sessions"),
        journal=parts.journal,
        host=parts,
        allowed=parts.allowed,
    )
    stack.push_async_callback(external.close)
    await external.restore()
    return external


async def _expire(external: ExternalSessions) -> None:
    while True:
        await asyncio.sleep(_EXPIRE_EVERY_S)
        try:
            await external.expire()
        except GanglineError as error:
            log.error("external.not_expired message=%s", error)


def control_routes(
    parts: NodeParts,
    external: ExternalSessions,
    pipeline: Pipeline,
    keep_backends: Callable[[Sequence[BackendSpec]], Awaitable[None]],
    public_url: str | None = None,
) -> list[Route]:
    """Returns all of the node's own routes, in the order in which they are documented."""

    async def model() -> str:
        return parts.model

    def version_set(unknown: Sequence[str]) -> None:
        parts.backends.policy.version_set(unknown)

    async def show_status(request: web.Request) -> web.StreamResponse:
        return answer(request, pipeline.status())

    async def start_drain(request: web.Request) -> web.StreamResponse:
        external.close_door()
        pipeline.drain()
        return await show_status(request)

    async def show_metrics(_request: web.Request) -> web.StreamResponse:
        return web.Response(body=parts.metrics.exposition(pipeline.now()), headers={"Content-Type": CONTENT_TYPE})

    routes = [
        HEALTH,
        Route("GET", "/v1/status", show_status, "The node's state.", answer=NodeStatus),
        Route("POST", "/v1/drain", start_drain, "Take no more sessions, and exit when the current ones have ended.",
              answer=NodeStatus),
        Route("GET", "/metrics", show_metrics, "Numbers for Prometheus.", answer_types=("text/plain",)),
        *SessionRoutes(external, model, public_url).routes(),
        *CallRoutes(lambda session_id: parts.proxy.session(session_id)).routes(),
        *ImageRoutes(lambda runtime, image: parts.images.prefetch(runtime, image)).routes(),
        *GradingRoutes(lambda wanted: regrade(wanted, parts)).routes(),
        *GateRoutes(parts.gate, version_set, lambda: parts.backends.policy.views()).routes(),
        *PolarGateRoutes(parts.gate, parts.backends).routes(),
        *BackendRoutes(parts.backends, keep_backends).routes(),
    ]  # fmt: skip
    return described(routes, TITLE)


def _root(path: str) -> str:
    """Returns `/v1/sessions` for `/v1/sessions/{session}/reward`."""
    return "/".join(path.split("/")[:3])


async def _listen(
    stack: AsyncExitStack, proxy: Proxy, listener: socket.socket, routes: Sequence[Route] = (), door: Door | None = None
) -> None:
    """Serve the node's own routes first, with everything below their first two segments, then the proxy's.

    Errors outside a route have the shape of the path's other answers.
    """
    own_roots = dict.fromkeys(_root(route.path) for route in routes if route.opened_by != "session")

    def shape(method: str, path: str, error: GanglineError) -> web.Response:
        is_own = _root(path) in own_roots or (door is not None and not proxy.owns(path))
        return problem_response(error) if is_own else proxy.shaped_error(method, path, error)

    app = web.Application()
    if door is None:
        app.add_routes([web.get(HEALTH.path, HEALTH.handler), *proxy.routes()])
    else:
        app.add_routes([*door.served(routes), *map(door.beyond, own_roots), *proxy.routes(), door.beyond()])
    await stack.enter_async_context(listening(app, shutdown_s=1.0, shape=shape, sock=listener))
