"""A trainer whose token sees no nodes is told so, instead of waiting for engines."""

from __future__ import annotations

import pytest

from gangline.domain.errors import NotAllowed
from gangline.domain.views import ServiceStatus
from gangline.train.weights.fleet import nodes_in, open_fleet


def status(tenant: str) -> ServiceStatus:
    return ServiceStatus(
        version="0",
        at=0.0,
        tasks={},
        sessions={},
        stages={},
        oldest_queued_s=None,
        callbacks={},
        nodes=(),
        tenant=tenant,
    )


class OneTenants:
    async def status(self) -> ServiceStatus:
        return status("vision")


async def test_weights_are_not_pushed_with_a_token_of_a_tenant() -> None:
    with pytest.raises(NotAllowed, match=r"vision.*control token"):
        async with open_fleet(OneTenants(), "glt-1-2", 60.0):
            pass


def test_a_token_of_no_tenant_sees_the_nodes() -> None:
    assert nodes_in(status("")) == ()
