"""Agent programs are installed once, by npm or pip as they are on the machine; here both are played by scripts."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sysconfig
from pathlib import Path
from zipfile import ZipFile

import msgspec
import pytest

from gangline.agents.harnesses.installation import (
    Program,
    check_program,
    find_program,
    install,
    installed_version,
    npm_requirements,
)
from gangline.domain.errors import HarnessError, InvalidRequest
from support.node.folder_runtime import FolderRuntime
from support.requirements import need_module

NPM = Program(harness="sledge", command="sledge", source="npm", package="@dogs/sledge", version="1.2.3", oldest=(22, 0))
PYPI = Program(
    harness="musher",
    command="musher",
    source="pypi",
    package="Musher.Agent",
    version="4.5",
    beside=("harness==1",),
    oldest=(3, 8),
)


def program(folder: Path, name: str, script: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(f"#!/bin/sh\n{script}\n")
    (folder / name).chmod(0o755)


def machine_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, **scripts: str) -> Path:
    """A machine whose programs are these; where npm and others write what they were asked to do."""
    for name, script in scripts.items():
        program(tmp_path / "machine", name, script)
    monkeypatch.setenv("PATH", f"{tmp_path / 'machine'}:{os.defpath}")
    return tmp_path / "asked"


def packed(tools: Path, name: str, version: str) -> None:
    folder = tools / "node_modules" / name
    folder.mkdir(parents=True)
    (folder / "package.json").write_text(json.dumps({"name": name, "version": version}))


def test_an_older_node_brings_a_newer_one_and_all_packages_go_in_one_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tools, asked = tmp_path / "tools", tmp_path / "asked"
    newer = f"mkdir -p {tools}/node_modules/.bin; printf '#!/bin/sh\\necho v22.1.0' > {tools}/node_modules/.bin/node"
    npm = f'echo "$@" >> {asked}; {newer}; chmod +x {tools}/node_modules/.bin/node'
    machine_with(tmp_path, monkeypatch, node="echo v20.20.2", npm=npm)
    other = Program(harness="other", command="other", source="npm", package="other", version="7.0.0", oldest=(18, 0))
    install([(NPM, None), (other, "8.0.0")], tools)
    lines = asked.read_text().splitlines()
    front = f"--prefix {tools} --loglevel=error"
    install_line = f"{front} install --ignore-scripts --no-audit --no-fund --save-exact"
    assert lines == [
        f"{install_line} node@22",
        f"{front} rebuild node",
        f"{install_line} @dogs/sledge@1.2.3 other@8.0.0",
    ]


def test_only_a_package_that_needs_its_install_script_runs_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = machine_with(tmp_path, monkeypatch, node="echo v24.0.1", npm=f'echo "$@" >> {tmp_path / "asked"}')
    needy = msgspec.structs.replace(NPM, package="needy", needs_script=True)
    install([(NPM, None), (needy, None)], tmp_path / "tools")
    assert asked.read_text().splitlines()[-1].endswith(" rebuild needy")


def test_what_npm_brings_along_is_known_by_its_hash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The lock goes to the folder before npm is called, and has all that adapters install."""
    found = tmp_path / "lock"
    machine_with(tmp_path, monkeypatch, node="echo v24.0.1", npm=f"cp {tmp_path}/tools/package-lock.json {found}")
    install([(NPM, None)], tmp_path / "tools")
    packages = json.loads(found.read_text())["packages"]
    assert [name for name, one in packages.items() if name and not one["integrity"].startswith("sha512-")] == []
    for requirement in npm_requirements():
        name, _, version = requirement.rpartition("@")
        locked = packages[f"node_modules/{name}"]["version"]
        assert locked == version or locked.startswith(f"{version}."), "run: make lock"


def test_a_new_enough_node_of_the_machine_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = machine_with(tmp_path, monkeypatch, node="echo v24.0.1", npm=f'echo "$@" >> {tmp_path / "asked"}')
    install([(NPM, None)], tmp_path / "tools")
    assert asked.read_text().count("\n") == 1


def test_what_is_there_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine_with(tmp_path, monkeypatch, npm="exit 1")
    packed(tmp_path / "tools", "@dogs/sledge", "1.2.3")
    install([(NPM, None)], tmp_path / "tools")
    assert installed_version(NPM, tmp_path / "tools") == "1.2.3"
    with pytest.raises(HarnessError, match="install"):
        install([(NPM, "1.2.4")], tmp_path / "tools")


def test_what_npm_says_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine_with(tmp_path, monkeypatch, node="echo v24.0.1", npm="echo no such package >&2; exit 3")
    with pytest.raises(HarnessError, match=r"(?s)exit code 3.*no such package"):
        install([(NPM, None)], tmp_path / "tools")


def test_a_python_program_gets_an_environment_of_its_own_and_a_link(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pip = f'echo "$@" >> {tmp_path / "asked"}; d=$(dirname $0)/..; mkdir -p $d/lib/python3.9/site-packages/'
    pip += 'musher_agent-4.5.dist-info; printf "#!/bin/sh\\necho 4.5" > $d/bin/musher; chmod +x $d/bin/musher'
    made = f"mkdir -p $3/bin; cp {tmp_path}/pip $3/bin/python"
    program(tmp_path, "pip", pip)
    program(tmp_path / "machine", "python", made)
    monkeypatch.setattr("gangline.agents.harnesses.installation.sys.executable", str(tmp_path / "machine" / "python"))
    tools = tmp_path / "tools"
    install([(PYPI, None)], tools)
    assert (tmp_path / "asked").read_text().split("--disable-pip-version-check ")[1] == "Musher.Agent==4.5 harness==1\n"
    assert installed_version(PYPI, tools) == "4.5"
    assert os.readlink(tools / "bin" / "musher") == "../python/musher/bin/musher"
    assert (tools / "bin" / "musher").exists()


def test_an_installation_that_was_interrupted_does_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pip = "mkdir -p $(dirname $0)/../lib/python3.9/site-packages/musher_agent-4.5.dist-info; kill -INT $PPID; exit 130"
    program(tmp_path, "pip", pip)
    program(tmp_path / "machine", "python", f"mkdir -p $3/bin; cp {tmp_path}/pip $3/bin/python")
    monkeypatch.setattr("gangline.agents.harnesses.installation.sys.executable", str(tmp_path / "machine" / "python"))
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # which a test run in the background ignores
    try:
        with pytest.raises(KeyboardInterrupt):
            install([(PYPI, None)], tmp_path / "tools")
    finally:
        signal.signal(signal.SIGINT, before)
    assert installed_version(PYPI, tmp_path / "tools") is None


WHEEL = {
    "musher_agent.py": "def main():\n    print('4.5')\n",
    "musher_agent-4.5.dist-info/METADATA": "Metadata-Version: 2.1\nName: musher-agent\nVersion: 4.5\n",
    "musher_agent-4.5.dist-info/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    "musher_agent-4.5.dist-info/entry_points.txt": "[console_scripts]\nmusher = musher_agent:main\n",
    "musher_agent-4.5.dist-info/RECORD": "",
}


@pytest.mark.parametrize("installer", ["uv", "pip", "pip after uv"])
def test_a_python_program_is_installed_by_uv_where_it_is_in_path_and_else_by_pip(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, installer: str
) -> None:
    need_module("uv", "pip install uv")
    with ZipFile(tmp_path / "musher_agent-4.5-py3-none-any.whl", "w") as wheel:
        for name, content in WHEEL.items():
            wheel.writestr(name, content)
    (tmp_path / "machine").mkdir()
    if installer != "pip":
        (tmp_path / "machine" / "uv").symlink_to(Path(sysconfig.get_path("scripts")) / "uv")
    machine_with(tmp_path, monkeypatch)
    for tool in ("PIP", "UV"):
        monkeypatch.setenv(f"{tool}_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    monkeypatch.setenv("UV_FIND_LINKS", str(tmp_path if installer == "uv" else tmp_path / "machine"))
    monkeypatch.setenv("UV_CACHE_DIR", str(tmp_path / "cache"))
    tools, alone = tmp_path / "tools", msgspec.structs.replace(PYPI, beside=())
    install([(alone, None)], tools)
    assert installed_version(alone, tools) == "4.5"
    told = subprocess.run([tools / "bin" / "musher"], capture_output=True, text=True, check=True).stdout
    assert told == "4.5\n"
    bytecode = list(tools.glob("python/musher/lib/python3*/site-packages/__pycache__/musher_agent.*.pyc"))
    assert len(bytecode) == 1, "sandboxes cannot write it"
    assert (list(tools.glob("python/musher/bin/pip*")) == []) == (installer == "uv")
    assert ("harness.uv_failed" in caplog.text) == (installer == "pip after uv")


async def test_a_program_of_the_right_version_passes(tmp_path: Path) -> None:
    program(tmp_path / "bin", "sledge", "echo 'sledge 1.2.3 (Dogs)' >&2")
    runtime = FolderRuntime(tmp_path / "r1", path=f"{tmp_path / 'bin'}:{os.defpath}")
    assert await check_program(runtime, NPM, "1.2.3") == "1.2.3"
    assert await check_program(runtime, NPM, None) == "1.2.3"


@pytest.mark.parametrize(
    ("script", "wanted", "told"),
    [
        (None, "1.2.3", r"sledge is not installed .* gangline harness install sledge \(in an image: npm install"),
        ("echo broken >&2; exit 1", "1.2.3", r"does not start \(it needs Node 22\.0 or later\).*broken"),
        ("echo 1.2.30", "1.2.3", r"sledge 1\.2\.30 is installed, the task wants 1\.2\.3"),
        ("echo hello", "2.0.0", r"of an unknown version .*install sledge --version 2\.0\.0"),
    ],
)
async def test_any_other_is_refused_with_the_line_that_installs_it(
    tmp_path: Path, script: str | None, wanted: str, told: str
) -> None:
    if script is not None:
        program(tmp_path / "bin", "sledge", script)
    runtime = FolderRuntime(tmp_path / "r1", path=f"{tmp_path / 'bin'}:{os.defpath}")
    with pytest.raises(HarnessError, match=told):
        await check_program(runtime, NPM, wanted)


def test_a_harness_of_any_program_has_none_to_install() -> None:
    assert find_program("pi").package.endswith("pi-coding-agent")
    with pytest.raises(InvalidRequest, match="shell"):
        find_program("shell")
