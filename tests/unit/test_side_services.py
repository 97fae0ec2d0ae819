"""The services of a runtime's specification: what would never start is refused when the task is read."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from gangline.domain.errors import InvalidRequest
from gangline.domain.sandbox import RuntimeStart
from gangline.domain.task import RuntimeSpec
from gangline.sandbox.containers.engine import container_name
from gangline.settings.plugins import make_runtime

CHECK = {"command": "true"}


NEVER_START: list[tuple[dict[str, dict[str, Any]], str]] = [
    ({"main": {}}, "'main' is the agent's own container"),
    ({"a b": {}}, "should match pattern"),
    ({"a": {"depends_on": {"b": "started"}}}, r"a\.depends_on: there is no service 'b'"),
    ({"a": {"depends_on": {"b": "ready"}}, "b": {}}, "'b' is never ready: it has no healthcheck"),
    ({"a": {"depends_on": {"b": "started"}}, "b": {"depends_on": {"a": "started"}}}, "wait for each other: "),
    ({"a": {"completes": True, "healthcheck": CHECK}}, "completes has no healthcheck"),
    ({"a": {"env": {"A=B": "c"}}}, "'A=B' is not a valid name of a variable"),
    ({"a": {"user": "--privileged"}}, "should match pattern"),
    ({f"s{number}": {} for number in range(17)}, "at most 16"),
]


@pytest.mark.parametrize(("services", "told"), NEVER_START)
def test_services_that_would_never_start_are_refused(services: dict[str, dict[str, Any]], told: str) -> None:
    given = {name: {"image": "redis:7", **fields} for name, fields in services.items()}
    with pytest.raises(ValidationError, match=told):
        RuntimeSpec.model_validate({"backend": "docker", "services": given})


@pytest.mark.parametrize("backend", ["sandbox", "process"])
async def test_runtimes_without_services_do_not_start_without_them(backend: str, tmp_path: Any) -> None:
    spec = RuntimeSpec.model_validate({"backend": backend, "network": "none", "services": {"a": {"image": "redis:7"}}})
    start = RuntimeStart(runtime_id="r", owner="o", spec=spec, folder=tmp_path / "r")
    with pytest.raises(InvalidRequest, match=rf"runtime `{backend}` starts no services \(a\)"):
        await make_runtime(backend).start(start)


def test_no_id_of_a_runtime_is_read_as_anothers_service() -> None:
    names = {container_name(runtime_id) for runtime_id in ("a", "service-1-a", "network-1-a")}
    assert names.isdisjoint({container_name("a", "service-1"), container_name("a", "network-1")})
