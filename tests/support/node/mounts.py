"""What a sandbox may see of folders that its task names: those that the operator exposed, and read-only."""

from __future__ import annotations

from pathlib import Path

import pytest

from gangline.domain.errors import InvalidRequest
from gangline.domain.ids import new_id
from gangline.domain.sandbox import RuntimeStart, Sandbox
from gangline.domain.task import RuntimeSpec
from gangline.settings.plugins import make_runtime

__all__ = ["check_mounts"]


async def check_mounts(name: str, image: str | None, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Mounts at two paths, one through a link; what nobody exposed; and folders of the session's own."""
    named, other = root / "named", root / "other"
    for folder in (named / "inner", other):
        folder.mkdir(parents=True)
        (folder / "said").write_text(f"{folder.name}\n")
        folder.chmod(0o755)
    (root / "link").symlink_to(named / "inner")
    (named / "out").symlink_to(other)
    monkeypatch.setenv("GANGLINE_EXPOSE", str(named))
    runtime, owner = make_runtime(name), new_id("mounts")

    async def started(number: int, mounts: dict[str, str]) -> Sandbox:
        spec = RuntimeSpec(image=image, network="none", folders=("/logs",), mounts=mounts)
        runtime.check_spec(spec)
        start = RuntimeStart(runtime_id=f"r{number}", owner=owner, spec=spec, folder=root / f"{owner}{number}")
        return await runtime.start(start)

    handle = await started(0, {"/opt/tools": str(root / "link"), "/srv/a/b": str(named)})
    tried = "touch /opt/tools/x 2>/dev/null || echo closed; touch /logs/y && ls /logs"
    try:
        ended = await handle.exec(f"cat /opt/tools/said /srv/a/b/inner/said; {tried}")
        assert ended.stdout == b"inner\ninner\nclosed\ny\n", ended
    finally:
        await handle.stop()
    for number, folder in enumerate((other, named / "out", root, named / "missing"), start=1):
        with pytest.raises(InvalidRequest, match=r"GANGLINE_EXPOSE|is not a folder"):
            await started(number, {"/opt/tools": str(folder)})
    for place, told in (("/logs", "hide /logs"), ("/logs/in", "lie in /logs")):
        with pytest.raises(InvalidRequest, match=f"it would {told}"):
            await started(9, {place: str(named)})
