"""Plug-ins of other packages that do not fulfil their contract: named, refused alone, and the node starts."""

from __future__ import annotations

import asyncio
import itertools
import json
import re
from functools import cache
from pathlib import Path
from textwrap import dedent, indent
from typing import Any, get_args

import pytest
from typer.testing import CliRunner

from gangline.agents.tools.contract import Tool
from gangline.cli.main import build_app
from gangline.domain.contracts import Builder, Evaluator, Harness
from gangline.domain.environment import EnvironmentKind
from gangline.domain.errors import InvalidRequest
from gangline.domain.sandbox import Runtime
from gangline.domain.task import TaskRequest
from gangline.interop.handlers import AgentHandler
from gangline.models.engines.contract import Engine
from gangline.node.health.offers import Offers
from gangline.serving.scripted.server import scripted_server
from gangline.settings import plugins
from gangline.settings.plugin_contracts import CONTRACTS, Kind
from gangline.settings.wings import Group
from gangline.wire.dialects.contract import Dialect
from support.node.node import running_node

_SCAN = plugins._installed.__wrapped__
_numbers = itertools.count()
KINDS: tuple[Kind, ...] = get_args(Kind)
HEAD = (
    "from typing import Any\nfrom pydantic import BaseModel\nfrom gangline.domain.sandbox import Runtime\n"
    "class Config(BaseModel):\n    a: int = 1\n"
)


class Site:
    """A folder of installed packages."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self._monkeypatch = monkeypatch

    def install(
        self, kind: Kind, code: str, *, name: str = "mine", package: str = "my-plug", attribute: str = "Mine"
    ) -> None:
        module = f"my_plug_{next(_numbers)}"
        (self.folder / f"{module}.py").write_text(HEAD + dedent(code))
        metadata = self.folder / f"{package.replace('-', '_')}-0.3.dist-info"
        metadata.mkdir(exist_ok=True)
        (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 0.3\n")
        with (metadata / "entry_points.txt").open("a") as file:
            file.write(f"[{CONTRACTS[kind].group}]\n{name} = {module}:{attribute}\n")
        self._monkeypatch.setattr(plugins, "_installed", cache(_SCAN))


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Site:
    folder = tmp_path / "site"
    folder.mkdir()
    monkeypatch.syspath_prepend(str(folder))
    return Site(folder, monkeypatch)


def refusal(kind: Kind, name: str = "mine") -> str:
    with pytest.raises(InvalidRequest) as error:
        plugins.load(kind, name)
    return error.value.message


def good(kind: Kind, without: str = "", *, changed: str = "") -> str:
    """The code of a right plug-in, without one of its parts, or with another one in its place."""
    contract = CONTRACTS[kind]
    if not contract.is_class and not contract.waits:
        return "def Mine(*args, **more): return 1.0\n"
    lines = [f'{field} = "mine"' for field in contract.fields if field != without]
    lines += ["Config = Config"] if contract.has_config and without != "Config" else []
    lines += [f"{field} = ()" for field in contract.own_fields if field != without]
    lines += [
        f"{'async ' * (method in contract.waits)}def {method}(self, {', '.join('abc'[:number])}): ..."
        for method, number in (*contract.waits.items(), *contract.answers.items())
        if method not in (without, changed.partition("(")[0].split()[-1] if changed else "")
    ]
    made = "def __init__(self, *given): pass"
    bases = "" if contract.base is None else f"({contract.base.__name__})"
    return f"class Mine{bases}:\n" + indent("\n".join([made, *lines, *([changed] if changed else [])]), "    ") + "\n"


@pytest.mark.parametrize("kind", KINDS)
def test_a_right_plug_in_is_loaded_and_one_that_lacks_a_part_is_refused_with_its_package_and_page(
    site: Site, kind: Kind
) -> None:
    contract = CONTRACTS[kind]
    config = ["Config"] if contract.has_config else []
    parts = [*contract.fields, *contract.waits, *contract.answers, *config]
    site.install(kind, good(kind))
    for part in parts:
        site.install(kind, good(kind, part).replace('"mine"', f'"{part}"'), name=part)
    assert plugins.load(kind, "mine").__name__ == "Mine"
    assert sorted(plugins.refusals()) == sorted(
        f"my-plug 0.3: {kind.replace('_', ' ')} `{part}` lacks {part}: {contract.page}" for part in parts
    )
    for part in parts:
        assert f"lacks {part}" in refusal(kind, part)


FAULTS: list[tuple[Kind, str, str]] = [
    *((kind, "def (:\n", "cannot be imported: SyntaxError") for kind in KINDS),
    *((kind, "raise SystemExit(3)\n", "cannot be imported: SystemExit: 3") for kind in KINDS),
    *((kind, "1 / 0\n", "cannot be imported: ZeroDivisionError") for kind in KINDS),
    *((kind, "Other = 1\n", "cannot be imported: AttributeError") for kind in KINDS),
    *((kind, "from my_plug_of_nobody import x\n", "needs the Python package 'my_plug_of_nobody'") for kind in KINDS),
    *((kind, "from typing import nothing\n", "cannot be imported: ImportError") for kind in KINDS),
    *((kind, "Mine = 3\n", "of type int") for kind in KINDS),
    *((kind, "Mine = None\n", "of type NoneType") for kind in KINDS),
    *((kind, "def Mine(*args): ...\n", "is not a class") for kind in KINDS if CONTRACTS[kind].is_class),
    ("evaluator", good("evaluator", changed="def evaluate(self, a): return 1"), "evaluate is not `async def`"),
    ("evaluator", good("evaluator", changed="async def evaluate(self): ..."), "evaluate does not take 1 arguments"),
    ("evaluator", good("evaluator", changed="evaluate = 3"), "evaluate is not a method"),
    ("evaluator", good("evaluator", "Config") + "    Config = dict\n", "its Config is not a pydantic model"),
    ("evaluator", good("evaluator") + "    def __init__(self): ...\n", "is not made of its Config"),
    *(
        (
            kind,
            f"class Meta(type):\n    def __getattr__(cls, name): raise {error}(name)\n"
            + re.sub(r"class Mine.*:", "class Mine(metaclass=Meta):", good(kind, CONTRACTS[kind].fields[0])),
            f"cannot be read: {error}",
        )
        for kind, error in (("runtime", "RuntimeError"), ("harness", "KeyError"), ("dialect", "SystemExit"))
    ),
    (
        "harness",
        good("harness", "judge") + "    def judge(self, a): ...\n    judge.__wrapped__ = judge\n",
        "cannot be read: ValueError",
    ),
    ("harness", good("harness", changed="async def judge(self, a): ..."), "judge is `async def`"),
    ("builder", good("builder", changed="async def build(self, a): ..."), "build is `async def`"),
    ("runtime", good("runtime") + "    def __init__(self, config): ...\n", "is not made of nothing"),
    ("runtime", good("runtime") + "    name = 'yours'\n", "its `name` is 'yours'"),
    (
        "runtime",
        "class Mine:\n    name = 'mine'\n    async def check(self): ...\n",
        "is not a subclass of gangline.domain.sandbox.Runtime; lacks start, reap: runtimes.md#writing-a-runtime",
    ),
    ("runtime", "class Mine(Runtime):\n    name: str\n", "lacks start, reap"),
    ("runtime", "class Mine(Runtime):\n    async def start(self, start): ...\n", "lacks name, reap"),
    ("runtime", good("runtime", changed="def start(self, start): ..."), "start is not `async def`"),
    ("runtime", good("runtime", changed="async def reap(self, owner): ..."), "reap does not take 2 arguments"),
    ("runtime", good("runtime").replace("(Runtime)", ""), "is not a subclass of gangline.domain.sandbox.Runtime"),
    (
        "handler",
        "from gangline.interop.handlers import AgentHandler\n"
        "class Mine(AgentHandler):\n    async def init(self, job): ...\n",
        "lacks run, eval",
    ),
]


@pytest.mark.parametrize("kind", KINDS)
def test_a_plug_in_with_a_fault_is_refused_with_the_cause(site: Site, kind: Kind) -> None:
    faulty = {f"mine{number}": one for number, one in enumerate(FAULTS) if one[0] == kind}
    for name, (_, code, _) in faulty.items():
        site.install(kind, code.replace("'mine'", f"'{name}'").replace('"mine"', f'"{name}"'), name=name)
    for name, (_, _, why) in faulty.items():
        assert why in refusal(kind, name)
    assert len(plugins.refusals()) == len(faulty)


def test_a_method_of_another_make_that_works_is_taken(site: Site) -> None:
    methods = [
        "def evaluate(self, a) -> 'Awaitable[Any]': return self",
        "async def evaluate(self, a, b=1, *, c=2): ...",
        "async def evaluate(self, *args): ...",
        "@staticmethod\n    async def evaluate(a): ...",
    ]
    for number, method in enumerate(methods):
        site.install("evaluator", good("evaluator", "evaluate") + f"    {method}\n", name=f"mine{number}")
    assert plugins.refusals() == []


def test_an_object_that_lacks_what_each_must_have_is_refused_when_it_is_made(site: Site) -> None:
    site.install("environment", good("environment", "command"))
    site.install("harness", good("harness") + "    def __init__(self, config): 1 / 0\n")
    with pytest.raises(InvalidRequest, match=r"environment `mine` lacks command: environments.md"):
        plugins.make_environment("mine", {})
    with pytest.raises(InvalidRequest, match="harness `mine` cannot be made: ZeroDivisionError"):
        plugins.make_harness("mine", {})
    exits = good("environment", "command") + "    @property\n    def command(self): raise SystemExit(3)\n"
    site.install("environment", exits, name="exits")
    with pytest.raises(InvalidRequest, match="environment `exits` cannot be made: SystemExit: 3"):
        plugins.make_environment("exits", {})
    bad_model = "    class Config(BaseModel):\n        def model_post_init(self, context): raise KeyError('a')\n"
    site.install("builder", good("builder", "Config") + bad_model, name="odd")
    with pytest.raises(InvalidRequest, match="builder `odd` cannot read its configuration: KeyError"):
        plugins.make_builder("odd", {})


def test_a_module_that_the_package_does_not_have_is_named(site: Site) -> None:
    site.install("tool", good("tool"))
    next(iter(site.folder.glob("my_plug_*.py"))).unlink()
    assert "tool `mine` has no module my_plug_" in refusal("tool")


def test_an_import_that_fails_without_a_modules_name_is_told_in_its_own_words(site: Site) -> None:
    site.install("tool", "raise ModuleNotFoundError('Could not import Processor')\n" + good("tool"))
    assert "tool `mine` cannot be imported: ModuleNotFoundError: Could not import Processor" in refusal("tool")


def test_a_name_of_two_packages_is_nobodys(site: Site) -> None:
    site.install("reward", good("reward"), package="one")
    site.install("reward", good("reward"), package="two")
    assert "is there twice, from one 0.3" in refusal("reward")


def test_a_name_of_ours_stays_ours(site: Site) -> None:
    site.install("evaluator", good("evaluator"), name="math")
    assert plugins.load("evaluator", "math").__module__.startswith("gangline.")
    (message,) = plugins.refusals()
    assert message.startswith("my-plug 0.3: evaluator `math` has the name of one of Gangline's own")


@pytest.mark.parametrize("kind", KINDS)
def test_each_of_our_own_fulfils_its_contract(kind: Kind) -> None:
    from gangline.settings.plugin_contracts import faults

    for name in plugins.names(kind):
        try:
            found = plugins.load(kind, name)
        except InvalidRequest:
            continue  # its extra is not installed
        assert faults(kind, name, found) == ""


async def test_a_node_starts_without_a_refused_runtime_and_a_task_is_told_why(
    site: Site, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    site.install("runtime", "class Mine(Runtime):\n    name = 'mine'\n    async def check(self): ...\n")
    site.install("dialect", "raise RuntimeError('no')\n", name="theirs")
    site.install("runtime", good("runtime").replace('"mine"', '"odd"') + "    def missing(self): 1 / 0\n", name="odd")
    async with scripted_server({"default": {"text": "hi"}}) as url, running_node(tmp_path / "node", url):
        offer = await asyncio.to_thread(lambda: Offers().offer)
        assert "process" in offer.runtimes
        assert {"mine", "odd"} & set(offer.runtimes) == set()
        assert "lacks start, reap" in offer.missing["mine"]
    logged = [record.getMessage() for record in caplog.records if "plugin.refused" in record.getMessage()]
    assert sorted(line.split("`")[1] for line in logged) == ["mine", "theirs"]
    task = TaskRequest.model_validate(
        {
            "task_id": "t",
            "instruction": "x",
            "agent": {"harness": "shell", "settings": {"command": "true"}},
            "runtime": {"backend": "mine"},
        }
    )
    with pytest.raises(
        InvalidRequest, match=r"my-plug 0.3: runtime `mine` lacks start, reap: runtimes.md#writing-a-runtime"
    ):
        plugins.check_task(task)


def test_the_lists_of_plug_ins_name_the_refused_ones(site: Site) -> None:
    site.install("harness", "class Mine:\n    name = 'mine'\n")
    listed = CliRunner().invoke(build_app(), ["harness", "list", "--json"])
    assert listed.exit_code == 0
    assert "mine" not in [line["harness"] for line in json.loads(listed.stdout)]
    assert "my-plug 0.3: harness `mine` lacks Config, prepare, judge" in " ".join(listed.stderr.split())
    from gangline.cli.machine.checks_service import check_plugins
    from gangline.settings.machine import Settings

    check = check_plugins(Settings.from_environ())
    assert (check.state, check.found) == ("optional", "1 refused")
    assert "harness `mine` lacks" in check.advice


# -- the tables, the Protocols, the page ------------------------------------------------------------------------------

PROTOCOLS: dict[Kind, type[Any]] = {
    "runtime": Runtime,
    "harness": Harness,
    "builder": Builder,
    "evaluator": Evaluator,
    "environment": EnvironmentKind,
    "tool": Tool,
    "engine": Engine,
    "dialect": Dialect,
    "handler": AgentHandler,
}


@pytest.mark.parametrize("kind", PROTOCOLS)
def test_the_contract_of_a_kind_is_its_protocol(kind: Kind) -> None:
    contract, protocol = CONTRACTS[kind], PROTOCOLS[kind]
    methods = {name for name, one in vars(protocol).items() if callable(one) and not name.startswith("_")}
    if contract.base is not None:
        assert contract.base is protocol
        methods = set(protocol.__abstractmethods__)
    assert {*contract.waits, *contract.answers} == methods
    if kind != "handler":
        fields = {*contract.fields, *contract.own_fields, *(["Config"] if contract.has_config else [])}
        assert fields == {name for name in protocol.__annotations__ if not hasattr(protocol, name)}


def test_the_page_has_each_group_and_each_part() -> None:
    docs = Path(__file__).parents[2] / "docs"
    page = (docs / "guides/plugins.md").read_text()
    rows = {line.split("`")[1]: line for line in page.splitlines() if line.startswith("| `gangline.")}
    assert set(rows) == {contract.group for contract in CONTRACTS.values()}
    for contract in CONTRACTS.values():
        target, _, section = contract.page.partition("#")
        heads = [
            line.lstrip("# ").lower()
            for line in (docs / "guides" / target).read_text().splitlines()
            if line.startswith("#")
        ]
        assert section in {"".join(c for c in head.replace(" ", "-") if c.isalnum() or c == "-") for head in heads}
        link = f"#{section}" if target == "plugins.md" else contract.page
        assert link in rows[contract.group]
        if contract.group not in ("gangline.engines", "gangline.dialects", "gangline.handlers"):
            for part in (*contract.fields, *contract.own_fields, *contract.waits, *contract.answers):
                assert part in rows[contract.group]


def test_pyproject_has_no_group_that_the_page_lacks() -> None:
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    groups = {line.split('"')[1] for line in text.splitlines() if line.startswith('[project.entry-points."gangline.')}
    assert groups <= {contract.group for contract in CONTRACTS.values()} | set(get_args(Group))
    page = (Path(__file__).parents[2] / "docs" / "guides" / "plugins.md").read_text()
    assert all(f"`{group}`" in page for group in groups)
