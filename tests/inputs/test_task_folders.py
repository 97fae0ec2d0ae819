"""Folders of tasks that other people made: nothing of this machine gets into a task, and nothing stops the import."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from gangline.cli.tasks.files import read_tasks, sent_along
from gangline.domain.errors import GanglineError, InvalidRequest
from gangline.machine.reading.imported import Choices, Imported, LeftOut
from gangline.tasks.importers.source import Wanted, read_source
from gangline.tasks.presets.preset import find_preset

SECRET = "the-operators-own-secret"
LONGEST_S = 5.0
"""On a machine that does much else; alone it is a fraction of a second."""

HARBOR = {
    "task.toml": '[task]\nname = "a/b"\n[environment]\nskills_dir = "/app/skills"\n',
    "instruction.md": "Count.",
    "environment/Dockerfile": (
        "FROM debian:12\nWORKDIR /app\nCOPY data /app/data\nCOPY one.txt /app/\nCOPY skills /app/skills\n"
    ),
    "environment/data/deep/numbers.txt": "1 2",
    "environment/one.txt": "1",
    "environment/skills/count/SKILL.md": "Count well.",
    "environment/docker-compose.yaml": "services: {main: {environment: {A: b}}, db: {build: ./db}}\n",
    "environment/db/Dockerfile": "FROM redis:7\n",
    "tests/test.sh": "#!/bin/sh\n",
    "tests/deep/test_it.py": "pass\n",
    "solution/solve.sh": "#!/bin/sh\n",
}
STEPS = {
    "task.toml": '[task]\nname = "a/b"\n[[steps]]\nname = "first"\n',
    "environment/Dockerfile": "FROM debian:12\n",
    "tests/test.sh": "#!/bin/sh\n",
    "steps/first/instruction.md": "Count.",
    "steps/first/workdir/setup.sh": "true\n",
    "steps/first/workdir/deep/seed.txt": "4",
    "steps/first/tests/test_first.py": "pass\n",
    "steps/first/solution/solve.sh": "true\n",
}
TERMINAL_BENCH = {
    "task.yaml": "instruction: Count.\n",
    "Dockerfile": "FROM debian:12\nCOPY one.txt /app/\n",
    "one.txt": "1",
    "docker-compose.yaml": "services: {client: {build: ./inner}}\n",
    "inner/Dockerfile": "FROM debian:12\nCOPY two.txt /app/\n",
    "inner/two.txt": "2",
    "run-tests.sh": "true\n",
    "tests/deep/test_it.py": "pass\n",
    "tests/test_other.py": "pass\n",
    "solution.sh": "true\n",
}
KINDS = {"harbor": HARBOR, "steps": STEPS, "terminal-bench": TERMINAL_BENCH}
AMONG_OTHERS = ("numbers.txt", "seed.txt", "test_it.py", "test_first.py", "test_other.py")
UNREAD = {"terminal-bench:Dockerfile", "terminal-bench:one.txt"}
"""The build context is another."""


def made(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def places() -> list[tuple[str, str]]:
    """Every file and every folder that an importer reads."""
    found: list[tuple[str, str]] = []
    for kind, files in KINDS.items():
        names = {str(above) for name in files for above in (Path(name), *Path(name).parents)} - {"."}
        found += [(kind, name) for name in sorted(names) if f"{kind}:{name}" not in UNREAD]
    return found


def linked(target: str) -> Callable[[Path, Path], None]:
    return lambda path, outside: path.symlink_to(target.format(outside=outside))


def relative(path: Path, outside: Path) -> None:
    path.symlink_to(os.path.relpath(outside / "a-file", path.parent))


def looped(path: Path, outside: Path) -> None:
    path.symlink_to(path.name)


def mutual(path: Path, outside: Path) -> None:
    other = path.with_name(path.name + "-other")
    other.symlink_to(path.name)
    path.symlink_to(other.name)


def inside(path: Path, outside: Path) -> None:
    path.with_name(path.name + "-real").write_text("x")
    path.symlink_to(path.name + "-real")


def pipe(path: Path, outside: Path) -> None:
    os.mkfifo(path)


def plug(path: Path, outside: Path) -> None:
    with socket.socket(socket.AF_UNIX) as one:
        here = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:  # the path itself may be longer than an address
            one.bind(f"/proc/self/fd/{here}/{path.name}")
        finally:
            os.close(here)


def sparse(path: Path, outside: Path) -> None:
    with path.open("wb") as file:
        file.truncate(1 << 40)


def other_kind(was_folder: bool) -> Callable[[Path, Path], None]:
    return lambda path, outside: (path.write_text(SECRET), None)[1] if was_folder else path.mkdir()


PLANTS: dict[str, Callable[[Path, Path], None]] = {
    "environ": linked("/proc/self/environ"),
    "file": linked("{outside}/a-file"),
    "folder": linked("{outside}"),
    "relative": relative,
    "nowhere": linked("nowhere"),
    "itself": looped,
    "each_other": mutual,
    "inside": inside,
    "zeros": linked("/dev/zero"),
    "terminal": linked("/dev/stdin"),
    "pipe": pipe,
    "socket": plug,
    "sparse": sparse,
}


@pytest.fixture
def outside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that has everything that a task may have, and is not the task's."""
    monkeypatch.setenv("OPERATORS_KEY", SECRET)
    folder = tmp_path / "outside"
    for files in KINDS.values():
        made(folder, {name: f"{text}\n# {SECRET}\n" for name, text in files.items()})
    (folder / "a-file").write_text(SECRET)
    return folder


def moved(path: Path) -> None:
    """Away, whatever is there."""
    path.rename(path.parent / f".away-{path.name}") if path.is_dir() else path.unlink()


def imported(source: Path, **wanted: Any) -> str:
    """Everything that was made, as text."""
    choices = Choices(network="proxy", runtime="docker")
    made_of = list(read_source(source, Wanted(choices=choices, **wanted)))
    assert all(isinstance(one, Imported) for one in made_of)
    return json.dumps([(one.name, one.body, one.notes) for one in made_of if isinstance(one, Imported)])


def refused(source: Path, **wanted: Any) -> str:
    """Quickly, and without a word of the file."""
    began = time.monotonic()
    with pytest.raises(InvalidRequest) as caught:
        imported(source, **wanted)
    assert time.monotonic() - began < LONGEST_S
    assert SECRET not in str(caught.value)
    return caught.value.message


@pytest.mark.parametrize("plant", PLANTS)
@pytest.mark.parametrize(("kind", "name"), places())
def test_what_stands_in_place_of_a_file_or_folder_is_refused_by_its_name(
    kind: str, name: str, plant: str, tmp_path: Path, outside: Path
) -> None:
    task = made(tmp_path / "tasks" / "one", KINDS[kind])
    assert SECRET not in imported(task.parent)
    moved(task / name)
    PLANTS[plant](task / name, outside)
    for source in (task, task.parent):
        assert name in refused(source), source


@pytest.mark.parametrize(("kind", "name"), places())
def test_a_file_in_place_of_a_folder_and_a_folder_in_place_of_a_file_are_refused(
    kind: str, name: str, tmp_path: Path
) -> None:
    task = made(tmp_path / "tasks" / "one", KINDS[kind])
    was_folder = (task / name).is_dir()
    moved(task / name)
    (task / name).write_text("x") if was_folder else (task / name).mkdir()
    if Path(name).name in {"data", "one.txt", "two.txt", "deep", "count"} | {Path(one).name for one in AMONG_OTHERS}:
        imported(task)  # COPY takes either, and so does a folder that is taken whole
    else:
        assert Path(name).name in refused(task)


@pytest.mark.parametrize("plant", PLANTS)
def test_what_lies_among_the_tests_is_refused_by_its_name(plant: str, tmp_path: Path, outside: Path) -> None:
    task = made(tmp_path / "one", HARBOR)
    PLANTS[plant](task / "tests" / "deep" / "more", outside)
    assert re.search("deep/more|tests", refused(task))


def test_a_task_that_is_a_link_in_a_folder_of_tasks_is_refused(tmp_path: Path, outside: Path) -> None:
    tasks = made(tmp_path / "tasks" / "one", HARBOR).parent
    (tasks / "README.md").symlink_to("one/instruction.md")
    (tasks / "away").symlink_to("nowhere")
    assert SECRET not in imported(tasks), "links that no one reads hurt no one"
    (tasks / "two").symlink_to(outside)
    assert f"{tasks}/two: is a link" in refused(tasks)
    (tmp_path / "mine").symlink_to(tasks / "one")
    assert imported(tmp_path / "mine"), "a path that the user names may be a link"


@pytest.mark.parametrize(
    "name", ["line\nbreak", "bell\x07", "escape\x1b[31m", os.fsdecode(b"latin-\xe9"), "delete\x7f", "return\rback"]
)
def test_names_that_no_message_can_show_are_refused(name: str, tmp_path: Path) -> None:
    task = made(tmp_path / "tasks" / "one", HARBOR)
    (task / "tests" / name).write_text("x")
    assert name not in refused(task)
    moved(task / "tests" / name)
    task.rename(task.with_name(name))
    assert name not in refused(tmp_path / "tasks")


def test_folders_with_too_much_in_them_are_refused(tmp_path: Path) -> None:
    many = made(tmp_path / "many", HARBOR)
    for number in range(21_000):
        (many / "tests" / str(number)).touch()
    assert "tests: holds more than 20,000" in refused(many)
    deep = made(tmp_path / "deep", HARBOR)
    here = os.open(deep / "tests", os.O_RDONLY)
    for _ in range(5000):
        os.mkdir("d", dir_fd=here)
        below = os.open("d", os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = below
    os.close(here)
    assert "deep" in refused(deep)
    subprocess.run(["rm", "-r", str(deep)], check=True)  # pytest cannot
    large = made(tmp_path / "large", HARBOR)
    for number in range(3):
        (large / "tests" / str(number)).write_bytes(b"x" * (20 << 20))
    assert "larger than 48 MiB" in refused(large)


def test_files_that_are_named_again_and_again_are_refused(tmp_path: Path) -> None:
    task = made(tmp_path / "one", HARBOR)
    (task / "environment" / "one.txt").write_bytes(b"x" * (20 << 20))
    copies = "".join(f"COPY one.txt /app/{number}\n" for number in range(1000))
    (task / "environment" / "Dockerfile").write_text(f"FROM debian:12\n{copies}")
    with pytest.raises(InvalidRequest, match="more than 144 MiB of files"):
        list(read_source(task, Wanted(choices=Choices(network="proxy", image="/roots/debian"))))


def test_a_file_that_is_replaced_while_it_is_opened_is_not_followed(
    tmp_path: Path, outside: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = made(tmp_path / "one", HARBOR)
    looked, swapped = os.stat, [0]

    def stat(path: Any, **how: Any) -> os.stat_result:
        found = looked(path, **how)
        if path == "instruction.md":
            moved(task / path)
            (task / path).symlink_to(outside / "a-file")
            swapped[0] += 1
        return found

    monkeypatch.setattr(os, "stat", stat)
    assert "instruction.md" in refused(task)
    assert swapped == [1]


PATHS = {
    "dockerfile_above": ("environment/Dockerfile", "FROM debian:12\nCOPY ../.. /app/\n"),
    "dockerfile_beside": ("environment/Dockerfile", "FROM debian:12\nCOPY ../tests /app/\n"),
    "dockerfile_round": ("environment/Dockerfile", "FROM debian:12\nCOPY data/../../tests /app/\n"),
    "build": ("environment/docker-compose.yaml", "services: {db: {build: ../../outside}}\n"),
    "build_absolute": ("environment/docker-compose.yaml", "services: {db: {build: /etc}}\n"),
    "dockerfile": (
        "environment/docker-compose.yaml",
        "services: {db: {build: {context: ., dockerfile: ../../outside/a-file}}}\n",
    ),
    "env_file": ("environment/docker-compose.yaml", "services: {main: {env_file: /proc/self/environ}}\n"),
    "volumes": ("environment/docker-compose.yaml", "services: {db: {image: a, volumes: ['/:/host']}}\n"),
    "include": ("environment/docker-compose.yaml", "include: [../../x.yaml]\nservices: {}\n"),
    "extends": (
        "environment/docker-compose.yaml",
        "services: {db: {extends: {file: /etc/passwd, service: db}}}\n",
    ),
    "configs": ("environment/docker-compose.yaml", "configs: {a: {file: /etc/passwd}}\nservices: {}\n"),
    "secrets": ("environment/docker-compose.yaml", "secrets: {a: {file: /etc/passwd}}\nservices: {}\n"),
    "variable": ("environment/docker-compose.yaml", "services: {main: {environment: {A: $OPERATORS_KEY}}}\n"),
    "step": ("task.toml", '[[steps]]\nname = ".."\n'),
    "step_absolute": ("task.toml", '[[steps]]\nname = "/etc"\n'),
    "variable_of_toml": ("task.toml", '[environment.env]\nA = "${OPERATORS_KEY}"\n'),
}


@pytest.mark.parametrize("case", PATHS)
def test_paths_in_the_files_of_a_task_lead_nowhere_else(case: str, tmp_path: Path, outside: Path) -> None:
    task = made(tmp_path / "tasks" / "one", {**HARBOR, "task.toml": ""})
    made(task, dict([PATHS[case]]))
    if case.startswith("dockerfile_"):
        assert SECRET not in imported(task), "only `docker build` can tell, and refuses it"
    else:
        refused(task)


def test_a_copys_target_has_no_way_out_of_the_runtime(tmp_path: Path) -> None:
    task = made(tmp_path / "one", {**HARBOR, "task.toml": ""})
    (task / "environment" / "docker-compose.yaml").unlink()
    (task / "environment" / "Dockerfile").write_text("FROM debian:12\nCOPY one.txt /app/../../../tmp/x\n")
    (one,) = read_source(task, Wanted(choices=Choices(network="proxy", runtime="sandbox")))
    assert isinstance(one, Imported)
    assert [action["path"] for action in one.body["runtime"]["prepare"]] == ["/tmp/x"]


def test_a_registry_names_folders_below_it(tmp_path: Path, outside: Path) -> None:
    made(tmp_path / "here" / "tasks" / "one", HARBOR)
    registry = tmp_path / "here" / "registry.json"
    for path in ("../outside", str(outside), "tasks/../../outside", "tasks/linked", "tasks/\x1b"):
        if not (tmp_path / "here/tasks/linked").is_symlink():
            (tmp_path / "here/tasks/linked").symlink_to(outside)
        registry.write_text(json.dumps([{"name": "d", "version": "1", "tasks": [{"name": "t", "path": path}]}]))
        assert "t: " in refused(Path("d"), registry=registry)


def rows(**fields: Any) -> str:
    return json.dumps({"instruction": "Add.", "answer": "3", **fields}) + "\n"


@pytest.mark.parametrize("plant", [name for name in PLANTS if name != "inside"])
@pytest.mark.parametrize("name", ["train.jsonl", "train.json", "data/train-00000-of-00001.parquet", "train.arrow"])
def test_a_datasets_folder_has_no_files_from_elsewhere(name: str, plant: str, tmp_path: Path, outside: Path) -> None:
    folder = made(tmp_path / "set", {"README.md": "Rows.", "data/x": ""})
    (outside / "a-file").write_text(rows(answer=SECRET))
    PLANTS[plant](folder / name, outside)
    assert re.search(f"{Path(name).stem}|neither tasks nor", refused(folder))


def test_a_download_of_hugging_face_is_read_through_its_links(tmp_path: Path) -> None:
    cache = made(tmp_path / "datasets--a--b", {"blobs/0123": rows(), "snapshots/abc/README.md": ""})
    (cache / "snapshots" / "abc" / "train.jsonl").symlink_to("../../blobs/0123")
    assert "Add." in imported(cache / "snapshots" / "abc")
    (tmp_path / "mine.jsonl").symlink_to(cache / "blobs" / "0123")
    assert "Add." in imported(tmp_path / "mine.jsonl"), "a file that the user names may be a link"


@pytest.mark.parametrize("plant", ["pipe", "socket", "sparse"])
def test_a_source_that_is_no_file_of_a_size_is_refused(plant: str, tmp_path: Path, outside: Path) -> None:
    PLANTS[plant](tmp_path / "rows.jsonl", outside)
    assert "rows.jsonl" in refused(tmp_path / "rows.jsonl")


DEEP = 100_000
BOMBS: dict[str, tuple[str, str]] = {
    "yaml_aliases": (
        "task.yaml",
        "a0: &a0 [x, x, x, x, x, x, x, x, x]\n"
        + "".join(f"a{at}: &a{at} [{', '.join([f'*a{at - 1}'] * 9)}]\n" for at in range(1, 9))
        + "instruction: x\n",
    ),
    "yaml_texts": ("task.yaml", f"a: &a {'x' * 100_000}\nb: [{', '.join(['*a'] * 10_000)}]\ninstruction: x\n"),
    "yaml_merges": (
        "task.yaml",
        "a0: &a0 {"
        + ", ".join(f"k{at}: 1" for at in range(9))
        + "}\n"
        + "".join(f"a{at}: &a{at} {{<<: [{', '.join([f'*a{at - 1}'] * 9)}]}}\n" for at in range(1, 9))
        + "instruction: x\n",
    ),
    "yaml_holds_itself": ("task.yaml", "instruction: x\na: &a [*a]\n"),
    "yaml_lists": ("task.yaml", "instruction: x\na: " + "[" * DEEP),
    "yaml_objects": ("task.yaml", "instruction: x\na: " + "{a: " * (DEEP // 2)),
    "yaml_dashes": ("task.yaml", "instruction: x\na:\n" + "- " * DEEP),
    "yaml_keys": ("task.yaml", "instruction: x\n" + "? " * DEEP),
    "yaml_number": ("task.yaml", f"instruction: x\na: {'1' * 10_000}\n"),
    "yaml_sexagesimal": ("task.yaml", f"instruction: x\na: 1{':1' * DEEP}\n"),
    "yaml_date": ("task.yaml", "instruction: x\na: 2026-99-99\n"),
    "yaml_program": ("task.yaml", "instruction: !!python/object/apply:os.getenv [OPERATORS_KEY]\n"),
    "yaml_names": ("task.yaml", "instruction: x\n~: y\n"),
    "yaml_lists_as_names": ("task.yaml", "instruction: x\n? [a, b]\n: y\n"),
    "yaml_large": ("task.yaml", "instruction: x\na: " + "x" * (1 << 20)),
    "yaml_directive": ("task.yaml", "%TAG ! tag:x,2000:" + "x" * 100_000 + "\n---\ninstruction: [\n"),
    "yaml_list": ("task.yaml", "- instruction\n"),
    "yaml_nothing": ("task.yaml", ""),
    "yaml_documents": ("task.yaml", "instruction: x\n---\ninstruction: y\n"),
    "toml_lists": ("task.toml", "a = " + "[" * DEEP),
    "toml_tables": ("task.toml", "a = " + "{a = " * (DEEP // 2)),
    "toml_key": ("task.toml", "a" + ".a" * DEEP + " = 1"),
    "toml_quoted_key": ("task.toml", '"a"' + ' . "\\""' * (DEEP // 3) + " = 1"),
    "toml_literal_key": ("task.toml", "'a'" + ".'b'" * (DEEP // 2) + " = 1"),
    "toml_header": ("task.toml", "[a" + ".a" * DEEP + "]"),
    "toml_headers": ("task.toml", "[[a" + ".a" * DEEP + "]]"),
    "toml_word": ("task.toml", "a" * (250 << 10)),
    "toml_quotes": ("task.toml", '"' * (250 << 10)),
    "toml_number": ("task.toml", f"a = {'1' * 10_000}"),
    "toml_size": ("task.toml", f'[environment]\nmemory = "{"9" * 400}G"\n'),
    "toml_large": ("task.toml", "# " + "x" * (1 << 20)),
    "toml_steps": ("task.toml", '[[steps]]\nname = "a"\n' * 10_000),
    "dockerfile_lines": ("environment/Dockerfile", "FROM a \\\n" + "b \\\n" * 60_000),
    "dockerfile_large": ("environment/Dockerfile", "FROM a\n" + "# x\n" * (1 << 20)),
    "compose_aliases": (
        "environment/docker-compose.yaml",
        "x-0: &a0 [x, x, x, x, x, x, x, x, x]\n"
        + "".join(f"x-{at}: &a{at} [{', '.join([f'*a{at - 1}'] * 9)}]\n" for at in range(1, 9)),
    ),
    "compose_deep": ("environment/docker-compose.yaml", "services: " + "[" * DEEP),
}
HARMLESS = {"yaml_sexagesimal", "dockerfile_lines", "toml_steps"}
"""May be read, as long as it is quick."""


@pytest.mark.parametrize("bomb", BOMBS)
def test_a_document_that_is_made_to_hurt_is_refused_at_once(bomb: str, tmp_path: Path) -> None:
    name, text = BOMBS[bomb]
    task = made(tmp_path / "one", TERMINAL_BENCH if name == "task.yaml" else HARBOR)
    (task / name).write_text(text)
    if bomb not in HARMLESS:
        assert Path(name).name in refused(task)
        return
    began = time.monotonic()
    with suppress(InvalidRequest):
        imported(task)
    assert time.monotonic() - began < LONGEST_S


ODD_VALUES = ["5", "[a, [b]]", "{a: {b: c}}", "~", "''", "!!int 7", "!!binary aGk=", "'\"'", '"\\0"', "x" * 1000]
COMPOSE_KEYS = [
    *("image", "build", "command", "entrypoint", "environment", "user", "working_dir", "healthcheck", "depends_on"),
    *("container_name", "hostname", "restart", "expose", "x-own"),
]


@pytest.mark.parametrize("value", ODD_VALUES)
def test_odd_values_in_a_compose_file_are_errors_of_that_file(value: str, tmp_path: Path) -> None:
    inner = [f"healthcheck: {{test: a, {key}: {value}}}" for key in ("test", "interval", "retries", "disable")]
    inner += [f"build: {{{key}: {value}}}" for key in ("context", "dockerfile")]
    inner += [f"depends_on: {{db: {value}}}", f"depends_on: {{db: {{condition: {value}}}}}", f"environment: [{value}]"]
    task = made(tmp_path / "one", HARBOR)
    for service in ("main", "db"):
        for line in [*(f"{key}: {value}" for key in COMPOSE_KEYS), *inner, f"{value}: a"]:
            text = f"services:\n  {service}: {{image: a, {line}}}\n".replace("image: a, image", "image")
            (task / "environment" / "docker-compose.yaml").write_text(text)
            with suppress(GanglineError):  # anything else fails this test
                imported(task)


@pytest.mark.parametrize("value", ODD_VALUES)
def test_odd_values_in_a_terminal_bench_task_are_errors_of_that_file(value: str, tmp_path: Path) -> None:
    lines = [f"client: {{{key}: {value}}}" for key in ("build", "environment", "volumes", "image")]
    task = made(tmp_path / "one", TERMINAL_BENCH)
    for line in [*lines, f"client: {value}", f"{value}: {{}}", f"client: {{build: {{context: {value}}}}}"]:
        (task / "docker-compose.yaml").write_text(f"services:\n  {line}\n")
        with suppress(GanglineError):
            imported(task)
    for field in ("instruction", "max_agent_timeout_sec", "parser_name", "author"):
        (task / "task.yaml").write_text(f"instruction: x\n{field}: {value}\n")
        with suppress(GanglineError):
            imported(task)


ROWS = {
    "lists": "[" * DEEP,
    "closed_lists": "[" * DEEP + "]" * DEEP,
    "objects": '{"a":' * DEEP,
    "a_bit_deep": rows(more=None)[:-1].replace("null", "[" * 500 + "]" * 500),
    "number": rows(more=0)[:-1].replace('"more": 0', f'"more": {"1" * 10_000}'),
    "twice": '{"instruction": "Add.", "answer": "1", "answer": "2"}',
    "half_a_character": '{"instruction": "\\udcff", "answer": "1"}',
    "zeros": "\0" * 1000,
    "not_text": "\udcff\udcfe",
    "list": "[1, 2]",
    "number_alone": "7",
    "nothing": "null",
    "comment": "# instruction",
}
NO_TEXT = {"zeros"}
"""Cost the whole file, the others their row."""


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json"])
@pytest.mark.parametrize("row", ROWS)
def test_a_row_that_is_made_to_hurt_is_refused_by_its_place(row: str, name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(os.fsencode(ROWS[row]))
    assert re.search(f"{name}(, (line|row) 1)?", refused(tmp_path / name))
    (tmp_path / name).write_bytes(rows().encode() + os.fsencode(ROWS[row]))
    if row in NO_TEXT:
        assert name in refused(tmp_path / name)
        return
    began = time.monotonic()
    one, left_out = read_source(tmp_path / name, Wanted())
    assert time.monotonic() - began < LONGEST_S
    assert isinstance(one, Imported)
    assert isinstance(left_out, LeftOut)
    assert f"{name}, row 2: " in left_out.why


def test_a_json_line_may_hold_the_separators_of_unicode(tmp_path: Path) -> None:
    line = json.dumps({"instruction": "a\u2028b\x85c", "answer": "1"}, ensure_ascii=False)
    (tmp_path / "rows.jsonl").write_text(f"\ufeff{line}\r\n\n{line}\n")
    assert imported(tmp_path / "rows.jsonl").count("Add") == 0
    (tmp_path / "tasks.jsonl").write_text(f"{line}\n{line}\n")
    assert len(read_tasks(str(tmp_path / "tasks.jsonl"))) == 2


@pytest.mark.parametrize("text", ["[" * DEEP, '{"a":' * DEEP, "a" + ".a" * DEEP + "=1", "a=" + "[" * DEEP, "\0"])
def test_a_task_file_that_is_made_to_hurt_is_refused_at_once(text: str, tmp_path: Path) -> None:
    (tmp_path / "task").write_text(text)
    began = time.monotonic()
    with pytest.raises(InvalidRequest):
        read_tasks(str(tmp_path / "task"))
    assert time.monotonic() - began < LONGEST_S


@pytest.mark.parametrize("plant", PLANTS)
def test_a_task_file_takes_only_files_beside_it_and_sends_only_files(plant: str, tmp_path: Path, outside: Path) -> None:
    folder = made(tmp_path / "mine", {"task.json": '{"instruction": {"from_file": "more/text.md"}}', "more/x": ""})
    PLANTS[plant](folder / "more" / "text.md", outside)
    for read in (lambda: read_tasks(str(folder / "task.json")), lambda: sent_along(str(folder / "more"))):
        with pytest.raises(InvalidRequest, match=r"more") as caught:
            read()
        assert SECRET not in str(caught.value)


def test_the_answers_of_a_preset_are_rows_like_others(tmp_path: Path, outside: Path) -> None:
    folder = made(tmp_path / "set", {"README.md": ""})
    (folder / "train.jsonl").symlink_to(outside / "a-file")
    assert "train.jsonl" in refused(folder, preset=find_preset("math"))
