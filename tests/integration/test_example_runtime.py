"""The example of docs/guides/runtimes.md, "Writing a runtime": short, a right plug-in, and it keeps the contract."""

from __future__ import annotations

import importlib.util
import re
import tomllib
from pathlib import Path
from types import ModuleType

import pytest

from gangline.domain.errors import InvalidRequest, RuntimeUnavailable
from gangline.domain.sandbox import Runtime, Sandbox
from gangline.domain.task import RuntimeSpec
from gangline.sandbox.supervised import SupervisedSandbox
from gangline.settings.plugin_contracts import faults
from gangline.testing.runtime_conformance import Check, checks, run_check

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples" / "runtimes"
GUIDE = (ROOT / "docs" / "guides" / "runtimes.md").read_text()
MAX_LINES = 150


def _module() -> ModuleType:
    spec = importlib.util.spec_from_file_location("gangline_unshare", FOLDER / "gangline_unshare.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


UnshareRuntime: type[Runtime] = _module().UnshareRuntime


def test_the_example_is_short_and_its_package_names_it() -> None:
    assert len((FOLDER / "gangline_unshare.py").read_text().splitlines()) <= MAX_LINES
    entries = tomllib.loads((FOLDER / "pyproject.toml").read_text())["project"]["entry-points"]["gangline.runtimes"]
    ((name, value),) = entries.items()
    assert value == "gangline_unshare:UnshareRuntime"
    assert faults("runtime", name, UnshareRuntime) == ""


def test_the_guide_shows_the_sandbox_of_the_example() -> None:
    source = (FOLDER / "gangline_unshare.py").read_text()
    (shown,) = re.findall(r"```python\n(class UnshareSandbox.*?)```", GUIDE, re.DOTALL)
    assert shown.strip() in source


def test_the_guide_names_the_whole_contract() -> None:
    names = {name for kind in (Runtime, Sandbox) for name in (*vars(kind), *kind.__annotations__)}
    names |= {"name", *SupervisedSandbox.__abstractmethods__}
    written = re.findall(r"`(\w+)`", GUIDE.partition("## Writing a runtime")[2])
    assert {name for name in names if not name.startswith("_")} - set(written) == set()
    assert SupervisedSandbox.__abstractmethods__ <= set(written)


@pytest.mark.parametrize("field", [{"image": "/images/a"}, {"folders": ["/tests"]}, {"mounts": {"/opt/a": "/data/a"}}])
def test_what_it_cannot_give_is_refused_at_submit(field: dict[str, object]) -> None:
    with pytest.raises(InvalidRequest, match=f"^runtime.{next(iter(field))}: runtime `unshare`"):
        UnshareRuntime.check_spec(RuntimeSpec.model_validate({"backend": "unshare", **field}))


@pytest.mark.parametrize("check", checks(isolated=False), ids=lambda check: check.__name__)
async def test_the_example_keeps_the_contract(check: Check, tmp_path: Path) -> None:
    runtime = UnshareRuntime()
    try:
        await runtime.check()
    except RuntimeUnavailable as error:
        pytest.skip(error.message)
    await run_check(check, runtime, tmp_path, isolated=False)
