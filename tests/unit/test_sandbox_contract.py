"""What a runtime has without its own line: the defaults of `Runtime` and `Sandbox`."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import pytest

from gangline.domain.errors import InvalidRequest, RuntimeUnavailable
from gangline.domain.sandbox import ExecRequest, Runtime, RuntimeStart, Sandbox
from gangline.domain.task import RuntimeSpec
from gangline.domain.usage import AMOUNTS
from support.node.folder_runtime import FolderRuntime


class Least(Runtime):
    name: ClassVar[str] = "least"
    lacks: str | None = None

    def missing(self) -> str | None:
        return self.lacks

    async def start(self, start: RuntimeStart) -> Sandbox:
        self.check_start(start)
        return FolderRuntime(start.folder)

    async def reap(self, owner: str, root: Path, keep: frozenset[str] = frozenset()) -> int:
        return 0


def start_of(folder: Path, runtime_id: str = "r1", **spec: Any) -> RuntimeStart:
    whole = RuntimeSpec.model_validate({"backend": "least", **spec})
    return RuntimeStart(runtime_id=runtime_id, owner="me", spec=whole, folder=folder / "r1")


async def test_a_runtime_of_two_methods_starts_sandboxes_and_has_no_ability_more(tmp_path: Path) -> None:
    runtime = Least()
    await runtime.check()
    assert (await runtime.images(), runtime.num_gpus, runtime.has_services, runtime.is_keepable) == (
        {},
        None,
        False,
        False,
    )
    sandbox = await runtime.start(start_of(tmp_path))
    assert (sandbox.grader_home, sandbox.proxy_url) == (None, None)
    assert (await sandbox.exec("echo $WORD", env={"WORD": "mush"})).stdout == b"mush\n"
    assert (await sandbox.run(ExecRequest(command=["echo", "mush"]))).stdout == b"mush\n"
    with pytest.raises(RuntimeUnavailable, match="starts no services"):
        runtime.services_of("r1", RuntimeSpec())


async def test_what_a_sandbox_cannot_do_is_refused_with_the_remedy(tmp_path: Path) -> None:
    sandbox = FolderRuntime(tmp_path / "r1")
    with pytest.raises(RuntimeUnavailable, match=r"the runtime of sandbox r1 has no channels\. Use another one"):
        await sandbox.channel("true")
    for refused in (sandbox.checkpoint(), sandbox.reset()):
        with pytest.raises(RuntimeUnavailable, match="checkpoints are not supported by the runtime of sandbox r1"):
            await refused
    usage = await sandbox.usage()
    assert [getattr(usage, name) for name in AMOUNTS] == [None] * len(AMOUNTS)
    assert set(usage.measured.values()) == {"the runtime does not measure it"}


async def test_a_check_fails_with_what_is_missing() -> None:
    runtime = Least()
    runtime.lacks = "qemu is missing: apt-get install qemu"
    with pytest.raises(RuntimeUnavailable, match="apt-get install qemu"):
        await runtime.check()


@pytest.mark.parametrize("runtime_id", ["../outside", "a/b", ""])
async def test_an_odd_name_of_a_sandbox_is_refused(tmp_path: Path, runtime_id: str) -> None:
    with pytest.raises(InvalidRequest, match="runtime_id"):
        await Least().start(start_of(tmp_path, runtime_id))


async def test_services_are_refused_where_the_runtime_starts_none(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match=r"runtime `least` starts no services \(db\): use `docker`"):
        await Least().start(start_of(tmp_path, services={"db": {"image": "postgres:16"}}))


def test_a_sandbox_that_lacks_a_method_cannot_be_made() -> None:
    class Half(Sandbox):
        async def stop(self) -> None: ...

    with pytest.raises(TypeError, match="clear"):
        Half(runtime_id="r1", workdir="/w", home="/h")  # type: ignore[abstract]
