"""The engines behind a node: the policy's, and each role's for which an operator named some.

Laws
- A role that an operator named is answered only by its own engines: without a healthy one its calls wait and then
  fail, even after the last engine was removed. No call falls back to the policy.
- Every other role is answered by the policy's engines. A role name that a client invents adds nothing here.
- Each role may have a different model with a different tokenizer. Weight updates apply only to the policy's engines.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from itertools import count

from gangline.domain.errors import Conflict, NotFound
from gangline.domain.node_views import BackendView
from gangline.models.engines.contract import Engine
from gangline.node.backends.engine import BackendSpec
from gangline.node.backends.pool import BackendPool


class BackendsByRole:
    def __init__(self, make: Callable[..., BackendPool] = BackendPool) -> None:
        """make: `BackendPool`, with the node's options."""
        self._make = make
        self._numbers = count(1)
        self.policy = make(numbers=self._numbers)
        self._of_role: dict[str, BackendPool] = {}
        self._slots: dict[str, asyncio.Semaphore] = {}
        """Places for calls in flight, by role."""

    def name_role(self, role: str, max_calls: int | None = None) -> None:
        """Answer the role's calls with its own engines from now on, even without any. max_calls: most in
        flight."""
        if role not in self._of_role:
            self._of_role[role] = self._new_pool(role)
        if max_calls is not None:
            self._slots.setdefault(role, asyncio.Semaphore(max_calls))

    async def add(self, spec: BackendSpec) -> BackendView:
        """See `BackendPool.add`. A role has its own engines once its first one was added.

        Raises: its errors; Conflict also when the engine already answers for another role or for the policy.
        """
        pool = self.policy if spec.role is None else self._of_role.get(spec.role) or self._new_pool(spec.role)
        if any(other.has(spec.url) for other in self._pools() if other is not pool):
            raise Conflict(
                f"backend {spec.url} is already in, for another role or for the policy: an engine answers for one of "
                "them. Remove it first, or start another engine."
            )
        added = await pool.add(spec.url, spec.kind, spec.label, spec.api_key_env, spec.options, spec.capture)
        if spec.role is not None and self._of_role.setdefault(spec.role, pool) is not pool:
            await pool.close()  # another request was the first to give the role an engine
            return await self.add(spec)
        return added

    async def remove(self, backend_id: str, drain: bool = True) -> None:
        """See `BackendPool.remove`. Raises: NotFound."""
        for pool in self._pools():
            if any(view.backend_id == backend_id for view in pool.views()):
                return await pool.remove(backend_id, drain)
        known = ", ".join(view.backend_id for view in self.views()) or "none"
        raise NotFound(f"no backend {backend_id!r}. Known: {known}.")

    async def clear(self, role: str | None = None, drain: bool = True) -> None:
        """Remove all engines of the role; None: of the policy. Raises: NotFound for a role without its own engines."""
        pool = self.policy if role is None else self._of_role.get(role)
        if pool is None:
            known = ", ".join(self._of_role) or "none"
            raise NotFound(f"role {role!r} has no engines of its own. Roles that have: {known}.")
        await pool.clear(drain)

    def views(self) -> list[BackendView]:
        return [view for pool in self._pools() for view in pool.views()]

    def members(self) -> list[BackendSpec]:
        """Specs of all engines that are not being removed, as the operator gave them."""
        return [spec for pool in self._pools() for spec in pool.members()]

    def engine_for(self, role: str, session_id: str, task_id: str) -> Engine | None:
        """See `BackendPool.engine_for`. None for a role without its own engines."""
        pool = self._of_role.get(role)
        return None if pool is None else pool.engine_for(session_id, task_id, self._slots.get(role))

    def with_tokenizer(self, digest: str) -> Engine | None:
        """Returns a healthy engine, of any role, whose `TemplateFacts` have the digest."""
        healthy = (one for pool in self._pools() for one in pool.staying() if one.state == "healthy")
        return next((one.engine for one in healthy if one.capabilities.template.tokenizer_digest == digest), None)

    def release(self, session_id: str) -> None:
        """End the session's assignments. Idempotent."""
        for pool in self._pools():
            pool.release(session_id)

    async def close(self) -> None:
        """Close all pools. Calls that wait or are in flight fail. Idempotent."""
        for pool in self._pools():
            await pool.close()

    def _new_pool(self, role: str) -> BackendPool:
        return self._make(role=role, numbers=self._numbers)

    def _pools(self) -> list[BackendPool]:
        return [self.policy, *self._of_role.values()]
