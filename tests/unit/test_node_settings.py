"""Settings from options, environment and gangline.toml: which one wins, and the errors of each."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gangline.cli.options.settings import COMMANDS, given_to
from gangline.domain.errors import InvalidRequest
from gangline.settings.machine import Settings
from gangline.settings.node import CallLimits, NodeSettings
from gangline.settings.service import LEAVES, ClusterSettings, ServerSettings, read_tables, resolve, write_tables

WORTH: dict[str, tuple[Any, Any, Any]] = {
    "log_format": ("json", "text", "json"),
    "server.keep_days": (1.5, 2.0, 3.0),
    "server.public_url": ("http://a", "http://b", "http://c"),
    "server.no_token": (True, False, True),
    "node.run_slots": (1, 2, 3),
    "node.engines": (("http://a",), ("http://b", "http://c"), ()),
    "node.hooks": (("echo a b",), ("b",), ("c", "d")),
    "node.engine_options": ({"a": 1}, {"b": {}}, {"c": [1]}),
    "node.call_limits": (CallLimits(max_messages=1), CallLimits(max_messages=2), CallLimits(max_messages=3)),
    "cluster.node_resources": ({"x": 1.0}, {"x": 2.0}, {"y": 3.0}),
    "up.on_cluster": (True, True, False),
}
"""Values in the file, in the environment, and as an option."""


def toml(value: Any) -> str:
    """One value as TOML writes it, inline."""
    if isinstance(value, CallLimits):
        return toml(value.model_dump())
    if isinstance(value, dict):
        pairs = cast("dict[str, Any]", value).items()
        return "{" + ", ".join(f"{name} = {toml(one)}" for name, one in pairs) + "}"
    if isinstance(value, tuple | list):
        return "[" + ", ".join(toml(one) for one in cast("list[Any]", value)) + "]"
    return str(value).lower() if isinstance(value, bool) else repr(value)


def text(key: str, value: Any) -> str:
    leaf = LEAVES[key]
    return value.model_dump_json() if isinstance(value, CallLimits) else leaf.write(value)


keys = st.sets(st.sampled_from(sorted(WORTH)))


@given(in_file=keys, in_environment=keys, as_options=keys)
def test_the_strongest_source_wins_and_is_named(
    tmp_path_factory: pytest.TempPathFactory, in_file: set[str], in_environment: set[str], as_options: set[str]
) -> None:
    path = tmp_path_factory.getbasetemp() / "precedence.toml"
    ordered = sorted(in_file, key=lambda key: "." in key)  # keys above the tables come first
    path.write_text("\n".join(f"{key} = {toml(WORTH[key][0])}" for key in ordered))
    environ = {LEAVES[key].env[0]: text(key, WORTH[key][1]) for key in in_environment}
    # A variable that is empty is as good as none.
    environ = {name: value for name, value in environ.items() if value}
    options = {key: text(key, WORTH[key][2]) if LEAVES[key].is_document else WORTH[key][2] for key in as_options}
    found = resolve(options, environ=environ, config=path)
    untouched = resolve(environ={"GANGLINE_CONFIG": ""})
    for key in LEAVES:
        if key in as_options:
            wanted, source, where = WORTH[key][2], "option", LEAVES[key].given_as(WORTH[key][2])
        elif key in in_environment:
            wanted, source, where = WORTH[key][1], "environment", LEAVES[key].env[0]
        elif key in in_file:
            wanted, source, where = WORTH[key][0], "file", str(path)
        else:
            wanted, source, where = untouched.value(key), "default", ""
        assert (found.value(key), *found.origin(key)) == (wanted, source, where), key


resolved_nodes = st.builds(
    NodeSettings,
    engines=st.lists(st.text(), max_size=3).map(tuple),
    node_id=st.none() | st.text(),
    engine_options=st.dictionaries(st.text(), st.none() | st.integers() | st.text(), max_size=2),
    engine_wait_s=st.floats(0, 1e6),
    sampling=st.none() | st.just({"temperature": {"override": 0.5}}),
    call_limits=st.builds(CallLimits, max_messages=st.integers(1, 1 << 40)),
    disk_reserve_gib=st.none() | st.floats(0, 1e6),
    hooks=st.lists(st.text(), max_size=2).map(tuple),
    port=st.integers(0, 65535),
    no_token=st.booleans(),
    engines_later=st.booleans(),
)


@given(node=resolved_nodes)
def test_a_child_reads_the_settings_that_its_parent_wrote(node: NodeSettings) -> None:
    cluster = ClusterSettings(node_data=Path("/disk"), node_resources={"sandboxes": 1.0})
    server = ServerSettings(keep_gb=0.5, allowed_hosts=("proxy",))
    options, tables = read_tables(write_tables({"server_url": "http://s"}, node=node, cluster=cluster, server=server))
    assert tables == {"node": node, "cluster": cluster, "server": server}
    assert options == {"server_url": "http://s"}


def test_what_a_parent_hands_over_is_read_instead_of_file_and_environment(tmp_path: Path) -> None:
    (tmp_path / "g.toml").write_text("[node]\nrun_slots = 5\n[server]\nkeep_days = 5")
    environ = {"GANGLINE_NODE__READY_SLOTS": "5"}
    node = NodeSettings(init_workers=7)
    found = resolve({"node.port": 99}, environ=environ, config=tmp_path / "g.toml", handed_over={"node": node})
    assert found.node == node.model_copy(update={"port": 99})
    assert found.server.keep_days == 5


def test_the_machine_s_settings_reach_a_child_through_its_environment(tmp_path: Path) -> None:
    (tmp_path / "g.toml").write_text('docker = ["docker", "--host", "a b"]\nexpose = ["/opt/x", "y"]\nhide = []')
    found = resolve({"database_url": "postgresql://h/n"}, environ={}, config=tmp_path / "g.toml")
    child = Settings.from_environ(found.environment())
    assert child == found.machine
    assert child.expose[-2:] == (Path("/opt/x"), tmp_path / "y")


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ("[node]\nrun_slot = 3", "line 2: unknown key 'run_slot' in [node]. Did you mean 'run_slots'?"),
        ("[node]\nengine = []", "line 2: unknown key 'engine' in [node]. Did you mean 'engines'?"),
        ("[node]\nadopt_grace = 3", "Did you mean 'adopt_grace_s'?"),
        ("[node]\nid = 'x'", "Did you mean 'node_id'?"),
        ("run_slots = 3", "line 1: unknown key 'run_slots' above the tables. Did you mean 'run_slots' in [node]?"),
        ("[nodes]\nrun_slots = 3", "line 1: unknown key 'nodes' above the tables."),
        ("[node.call_limits]\n\nmax_message = 1", "line 3: unknown key 'max_message' in [node.call_limits]."),
        ("[node]\ncall_limits = {max_message = 1}", "line 2: unknown key 'max_message' in [node.call_limits]."),
        ("[node]\nrun_slots = '3'", "line 2: node.run_slots: must be a valid integer, got '3'"),
        ("[node]\nrun_slots = 0", "node.run_slots: must be greater than or equal to 1, got 0"),
        ("[node]\nengines = 'http://a'", "node.engines: must be a valid array, got 'http://a'"),
        ("[node]\ncapture = 'tokens'", "node.capture: must be 'ids' or 'text', got 'tokens'"),
        ("[node]\nbreaker_pause_s = nan", "node.breaker_pause_s"),
        ("[node.sampling]\ntemprature = {override = 1}", "node.sampling: temprature"),
        ("node = 3", "line 1: [node] is a table, got 3"),
        ("control_token = 'x'", "line 1: control_token is a secret. Set GANGLINE_TOKEN instead."),
        ("[node\n", "is not TOML"),
        ("database_url = 'data.db'", "is a URL, such as postgresql://"),
    ],
)
def test_a_mistake_in_the_file_is_named_with_its_place(tmp_path: Path, content: str, told: str) -> None:
    path = tmp_path / "g.toml"
    path.write_text(content)
    with pytest.raises(InvalidRequest) as refused:
        resolve(environ={}, config=path)
    assert str(path) in refused.value.message
    assert told in refused.value.message


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("GANGLINE_NODE__RUN_SLOTS", "many", "GANGLINE_NODE__RUN_SLOTS: must be a valid integer"),
        ("GANGLINE_NODE__HOOKS", "echo hello", "GANGLINE_NODE__HOOKS: it is not JSON"),
        ("GANGLINE_NODE__RUN_SLOT", "3", "Did you mean 'GANGLINE_NODE__RUN_SLOTS'?"),
        ("GANGLINE_LOG_FORMAT", "xml", "GANGLINE_LOG_FORMAT: must be 'text' or 'json', got 'xml'"),
        ("GANGLINE_CONFIG", "/no/such/file", "cannot read the config file /no/such/file"),
    ],
)
def test_a_mistake_in_the_environment_names_its_variable(name: str, value: str, told: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        resolve(environ={"GANGLINE_CONFIG": "", name: value})
    assert told in refused.value.message


def test_variables_that_kubernetes_sets_for_a_service_of_our_name_are_no_settings() -> None:
    environ = {"GANGLINE_CONFIG": "", "GANGLINE_SERVER_PORT": "tcp://10.0.0.1:8700", "GANGLINE_NODE_PORT": "tcp://x"}
    assert resolve(environ=environ).server.port == 8700


def test_only_a_usual_file_of_one_s_own_is_trusted_without_being_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert resolve(environ={}).file is None
    Path("gangline.toml").write_text("[node]\nrun_slots = 5")
    assert resolve(environ={}).node.run_slots == 5
    Path("gangline.toml").chmod(0o666)
    with pytest.raises(InvalidRequest, match="others may write"):
        resolve(environ={})
    assert resolve(environ={"GANGLINE_CONFIG": "gangline.toml"}).node.run_slots == 5
    assert resolve(environ={"GANGLINE_CONFIG": ""}).node.run_slots == 16
    Path("gangline.toml").chmod(0o600)
    if os.geteuid() == 0:
        os.chown("gangline.toml", 12345, -1)
        with pytest.raises(InvalidRequest, match="another user"):
            resolve(environ={})


def test_every_command_reads_the_machine_s_settings_of_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("gangline.toml").write_text("data_dir = 'here'\n[node]\nnot_looked_at = 1")
    assert Settings.from_environ({}).data_dir == tmp_path / "here"
    assert Settings.from_environ({"GANGLINE_DATA": "there"}).data_dir == Path("there")
    home = {"GANGLINE_CONFIG": "", "XDG_CACHE_HOME": "/c"}
    assert Settings.from_environ(home).cache_dir == Path("/c/gangline")


FLAGS = {
    ("up", "up.on_cluster"): ("--cluster", "--no-cluster"),
    ("server", "server.no_token"): ("--no-token", "--with-token"),
    ("node", "node.no_token"): ("--no-token", "--with-token"),
    ("node", "node.engines_later"): ("--engines-later", "--no-engines-later"),
}


@pytest.mark.parametrize(("place", "options"), FLAGS.items())
@pytest.mark.parametrize("wanted", [True, False])
def test_an_option_unsets_a_flag_of_the_file(
    tmp_path: Path, place: tuple[str, str], options: tuple[str, str], wanted: bool
) -> None:
    (command, key), option = place, options[0 if wanted else 1]
    config = tmp_path / "gangline.toml"
    config.write_text(f"{key} = {toml(not wanted)}\n")
    found = resolve(given_to(COMMANDS[command], [option]), environ={}, config=config)
    assert (found.value(key), *found.origin(key)) == (wanted, "option", option)


def test_every_flag_has_an_option_that_unsets_it() -> None:
    flags = {key for key, leaf in LEAVES.items() if leaf.kind is bool}
    assert flags == {key for _, key in FLAGS} | {"apptainer_fakeroot"}, "which no command has an option for"
    assert {key for key, leaf in LEAVES.items() if leaf.unset is not None} == flags
