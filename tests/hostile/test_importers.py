"""Folders and data sets that other people made, imported by a whole process with little memory and time.

Each attack succeeds on a reader without walls.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import msgspec
import pyarrow as pa
import pytest
from pyarrow import parquet

SECRET = "the-operators-own-secret"
MEMORY_BYTES = 3 << 29
LONGEST_S = 60.0
"""With the start of two processes, on a machine that does much else."""


class Attack(msgspec.Struct, frozen=True):
    name: str
    plant: Callable[[Path], Path]
    """Makes the source in an empty folder."""
    reader: str
    """A program that reads the source in argument 1 as one does who expects nothing bad."""


READ = "import sys, pathlib; print(pathlib.Path(sys.argv[1], 'instruction.md').read_text()[:10_000_000])"
READ_BELOW = """import sys, pathlib
for one in pathlib.Path(sys.argv[1], '{0}').iterdir():
  if one.is_file(): print(one.read_text())"""
READ_YAML = "import sys, yaml, json; json.dumps(yaml.safe_load(open(sys.argv[1] + '/task.yaml')))"
READ_TOML = "import sys, tomllib; tomllib.load(open(sys.argv[1] + '/task.toml', 'rb'))"
READ_PARQUET = "import sys; from pyarrow import parquet; parquet.read_table(sys.argv[1]).to_pylist()"
READ_LINES = "import sys, json\nfor line in open(sys.argv[1]): json.loads(line)"
READ_CSV = "import sys, csv; csv.field_size_limit(1 << 60); list(csv.reader(open(sys.argv[1], newline='')))"


def task(root: Path) -> Path:
    for name, text in {
        "task.toml": "",
        "environment/Dockerfile": "FROM a\nCOPY . /app/\n",
        "tests/test.sh": "true",
    }.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    (root / "instruction.md").write_text("Count.")
    return root


def linked(name: str, target: str) -> Callable[[Path], Path]:
    def plant(root: Path) -> Path:
        made = task(root / "task")
        outside = root / "outside"
        outside.mkdir()
        for file in ("test.sh", "Dockerfile", "solve.sh"):
            (outside / file).write_text(f"FROM a\nCOPY . /app/\n# {SECRET}\n")
        if (made / name).is_dir():
            (made / name).rename(root / "away")
        else:
            (made / name).unlink(missing_ok=True)
        (made / name).symlink_to(target.format(outside=outside))
        return made

    return plant


def piped(root: Path) -> Path:
    made = task(root / "task")
    (made / "instruction.md").unlink()
    os.mkfifo(made / "instruction.md")
    return made


def yaml_aliases(root: Path) -> Path:
    levels = "".join(f"a{at}: &a{at} [{', '.join([f'*a{at - 1}'] * 9)}]\n" for at in range(1, 9))
    (root / "task.yaml").write_text(f"a0: &a0 [x, x, x, x, x, x, x, x, x]\n{levels}instruction: x\n")
    return root


def toml_key(root: Path) -> Path:
    (root / "task.toml").write_text("a" + ".a" * 100_000 + " = 1")
    return root


def one_text(root: Path) -> Path:
    made: Any = cast("Any", pa).table({"instruction": ["x" * (300 << 20)], "answer": ["1"]})
    how = {"use_dictionary": False, "write_statistics": False}
    cast("Any", parquet).write_table(made, root / "rows.parquet", compression="zstd", **how)
    return root / "rows.parquet"


def one_text_for_many_rows(root: Path) -> Path:
    texts: Any = cast("Any", pa).DictionaryArray.from_arrays(
        pa.array([0] * 1000, pa.int32()), pa.array(["x" * (8 << 20)])
    )
    made: Any = cast("Any", pa).table({"instruction": texts})
    how = {"store_schema": False, "write_statistics": False}
    cast("Any", parquet).write_table(made, root / "rows.parquet", compression="zstd", **how)
    return root / "rows.parquet"


def zeros(root: Path) -> Path:
    with (root / "rows.jsonl").open("wb") as file:
        file.truncate(1 << 40)
    return root / "rows.jsonl"


def without_end(name: str, begin: str) -> Callable[[Path], Path]:
    def plant(root: Path) -> Path:
        with (root / name).open("wb") as file:
            file.write(begin.encode() + b"x" * (1 << 20))
            file.truncate(1 << 40)
        return root / name

    return plant


def deep(root: Path) -> Path:
    (root / "rows.jsonl").write_text("[" * 100_000 + "\n")
    return root / "rows.jsonl"


ATTACKS = [
    Attack("gives_the_environment_as_the_instruction", linked("instruction.md", "/proc/self/environ"), READ),
    Attack("gives_a_folder_of_the_operator_as_the_tests", linked("tests", "{outside}"), READ_BELOW.format("tests")),
    Attack(
        "gives_a_folder_of_the_operator_as_the_context",
        linked("environment", "{outside}"),
        READ_BELOW.format("environment"),
    ),
    Attack(
        "gives_a_folder_of_the_operator_as_the_solution", linked("solution", "{outside}"), READ_BELOW.format("solution")
    ),
    Attack("gives_zeros_without_end_as_the_instruction", linked("instruction.md", "/dev/zero"), READ),
    Attack("gives_a_pipe_as_the_instruction", piped, READ),
    Attack("gives_aliases_that_unpack_to_gigabytes", yaml_aliases, READ_YAML),
    Attack("gives_a_key_of_a_hundred_thousand_parts", toml_key, READ_TOML),
    Attack("gives_one_text_of_300_megabytes_in_a_few_kilobytes", one_text, READ_PARQUET),
    Attack("gives_one_text_to_a_thousand_rows", one_text_for_many_rows, READ_PARQUET),
    Attack("gives_a_terabyte_of_zeros", zeros, READ_LINES),
    Attack("gives_a_line_of_a_terabyte", without_end("rows.jsonl", '{"instruction": "'), READ_LINES),
    Attack("gives_a_field_of_a_terabyte", without_end("rows.csv", 'instruction,answer\n"'), READ_CSV),
    Attack("gives_a_row_that_is_nested_deeply", deep, READ_LINES),
]


def little_memory() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def run(command: list[str], longest_s: float) -> subprocess.CompletedProcess[str] | None:
    """None where it does not end."""
    try:
        return subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=longest_s,
            preexec_fn=little_memory,
            env={**os.environ, "OPERATORS_KEY": SECRET},
            check=False,
        )
    except subprocess.TimeoutExpired:
        return None


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.name)
def test_an_import_refuses_it_by_name_with_little_memory_and_time(attack: Attack, tmp_path: Path) -> None:
    source = attack.plant(tmp_path)
    began = time.monotonic()
    command = [
        sys.executable,
        "-m",
        "gangline",
        "tasks",
        "from",
        str(source),
        "--network",
        "proxy",
        "--runtime",
        "docker",
    ]
    ended = run([*command, "--image", "/roots/a", "--json"], LONGEST_S)
    assert ended is not None, f"no end after {LONGEST_S} s"
    assert ended.returncode != 0
    assert source.name in ended.stderr, ended.stderr
    assert "Traceback" not in ended.stderr
    assert SECRET not in ended.stdout + ended.stderr
    assert time.monotonic() - began < LONGEST_S


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.name)
def test_it_succeeds_on_a_reader_without_walls(attack: Attack, tmp_path: Path) -> None:
    ended = run([sys.executable, "-c", attack.reader, str(attack.plant(tmp_path))], 3.0)
    assert ended is None or ended.returncode != 0 or SECRET in ended.stdout
