"""The files tool: slices, edits that are exact and whole, undo, trees, search with ripgrep and without."""

from __future__ import annotations

import asyncio
import os
import shutil
import stat
import subprocess
import sys
from collections.abc import AsyncGenerator
from pathlib import Path

import pytest
import pytest_asyncio

from gangline.agents.tools.action_server import ActionServer, Files
from gangline.agents.tools.answers import Found
from gangline.domain.errors import ActionRefused, InvalidRequest
from support.node.tools import action_server


@pytest_asyncio.fixture
async def server(tmp_path: Path) -> AsyncGenerator[ActionServer]:
    async with action_server(tmp_path) as server:
        yield server


@pytest.fixture
def files(server: ActionServer) -> Files:
    return server.files


async def refused(reason: str, action: object, match: str | None = None) -> None:
    with pytest.raises(ActionRefused, match=match) as error:
        await action  # type: ignore[misc]
    assert error.value.reason == reason, error.value.message


async def test_lines_are_viewed_in_slices_and_with_numbers(files: Files, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("".join(f"line {n}\n" for n in range(1, 101)))
    whole = await files.view("a.txt")
    assert (len(whole.lines), whole.num_lines, whole.is_whole) == (100, 100, True)
    part = await files.view(str(tmp_path / "a.txt"), first_line=99, last_line=200)
    assert (part.lines, part.first_line, part.is_whole) == (["line 99", "line 100"], 99, False)
    assert part.numbered() == "    99\tline 99\n   100\tline 100\n"
    bounded = await files.view("a.txt", max_bytes=20)
    assert (bounded.lines, bounded.is_whole) == (["line 1", "line 2"], False)
    await refused("no_such_line", files.view("a.txt", first_line=101), "has 100 lines")
    with pytest.raises(InvalidRequest):
        await files.view("a.txt", first_line=0)
    (tmp_path / "empty").write_text("")
    assert (await files.view("empty")).lines == []
    (tmp_path / "long").write_text("é" * 1000)
    front = await files.view("long", max_bytes=9)
    assert (front.lines, front.is_whole) == (["é" * 4], False)


async def test_writing_makes_folders_and_says_whether_a_file_is_new(files: Files, tmp_path: Path) -> None:
    first = await files.write("a/b/c.txt", "straße\n")
    assert (first.num_bytes, first.is_new) == (8, True)
    second = await files.write("a/b/c.txt", "x")
    assert (second.num_bytes, second.is_new) == (1, False)
    assert (tmp_path / "a/b/c.txt").read_text() == "x"
    assert os.listdir(tmp_path / "a/b") == ["c.txt"], "nothing is left alongside it"


async def test_a_replacement_is_exact_and_unique(files: Files, tmp_path: Path) -> None:
    path = tmp_path / "a.py"
    path.write_text("one\ntwo\none\n")
    await refused("many_matches", files.replace("a.py", old="one", new="x"), "2 times in a.py, on lines 1, 3")
    await refused("no_match", files.replace("a.py", old="three", new="x"), "is not in a.py")
    await refused("no_match", files.replace("a.py", old="", new="x"))
    change = await files.replace("a.py", old="two\none", new=r"\1$&")
    assert (change.line, path.read_text()) == (2, "one\n\\1$&\n")


@pytest.mark.parametrize(
    ("before", "after_line", "text", "after"),
    [
        ("a\nb\n", 0, "x", "x\na\nb\n"),
        ("a\nb\n", 1, "x\ny\n", "a\nx\ny\nb\n"),
        ("a\nb", 2, "x", "a\nb\nx\n"),
        ("", 0, "x", "x\n"),
        ("a\r\nb\r\n", 1, "x", "a\r\nx\r\nb\r\n"),
    ],
)
async def test_lines_are_inserted_whole(
    files: Files, tmp_path: Path, before: str, after_line: int, text: str, after: str
) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(before.encode())
    await files.insert("a.txt", text, after_line=after_line)
    assert path.read_bytes() == after.encode()
    await refused("no_such_line", files.insert("a.txt", "x", after_line=100))


async def test_undo_goes_back_change_by_change_and_never_over_anothers(files: Files, tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    await files.write("a.txt", "1")
    await files.write("a.txt", "2")
    await files.write("b.txt", "other")
    await files.undo("a.txt")
    assert path.read_text() == "1"
    path.write_text("someone else's")
    await refused("changed", files.undo("a.txt"), "changed since")
    path.write_text("1")
    undone = await files.undo("a.txt")
    assert (undone.num_bytes, path.exists()) == (None, False)
    await refused("nothing_to_undo", files.undo("a.txt"))
    assert (tmp_path / "b.txt").read_text() == "other"


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "latin-1"])
async def test_an_encoding_is_kept(files: Files, tmp_path: Path, encoding: str) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes("größe\nzwei\n".encode(encoding))
    assert (await files.view("a.txt")).lines == ["größe", "zwei"]
    await files.replace("a.txt", old="zwei", new="é")
    assert path.read_bytes() == "größe\né\n".encode(encoding)
    if encoding == "latin-1":
        await refused("encoding", files.replace("a.txt", old="é", new="漢"))


async def test_windows_line_ends_are_kept_and_need_not_be_typed(files: Files, tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"one\r\ntwo\r\n")
    assert (await files.view("a.txt")).lines == ["one", "two"]
    await files.replace("a.txt", old="one\ntwo\n", new="1\n2\n3\n")
    assert path.read_bytes() == b"1\r\n2\r\n3\r\n"
    path.write_bytes(b"mixed\r\nends\n")
    await files.replace("a.txt", old="mixed\r\n", new="x\n")
    assert path.read_bytes() == b"x\nends\n"


async def test_modes_and_links_are_kept(files: Files, tmp_path: Path) -> None:
    (tmp_path / "run.sh").write_text("#!/bin/sh\n")
    (tmp_path / "run.sh").chmod(0o751)
    (tmp_path / "link").symlink_to("run.sh")
    await files.insert("link", "echo", after_line=1)
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "run.sh").read_text() == "#!/bin/sh\necho\n"
    assert stat.S_IMODE((tmp_path / "run.sh").stat().st_mode) == 0o751


async def test_what_is_no_text_file_is_refused_and_named(files: Files, tmp_path: Path) -> None:
    (tmp_path / "binary").write_bytes(b"\x7fELF\0\0")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "broken").symlink_to("nowhere")
    await refused("binary", files.view("binary"), "NUL")
    await refused("binary", files.replace("binary", old="a", new="b"))
    await refused("not_a_file", files.view("pipe"))
    await refused("not_a_file", files.write("pipe", "x"))
    await refused("is_folder", files.view("."))
    await refused("is_folder", files.write(".", "x"))
    await refused("not_found", files.view("missing"), "missing does not exist in /")
    await refused("not_found", files.view("broken"))
    await refused("failed", files.view("a\0b"))
    with open(tmp_path / "huge", "wb") as file:
        file.truncate(17 << 20)
    await refused("too_large", files.view("huge"), "use the shell")


async def test_a_file_that_may_not_be_written_is_refused_whole(files: Files, tmp_path: Path) -> None:
    if os.geteuid() == 0:
        path = "/proc/version"
    else:
        (tmp_path / "shut").mkdir(mode=0o500)
        path = "shut/a"
    await refused("failed", files.write(path, "x"), "cannot be written")


async def test_a_tree_is_bounded_in_depth_and_number(files: Files, tmp_path: Path) -> None:
    for name in ("b/c/d/e.txt", "a.txt", ".git/config", "z.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("xy")
    (tmp_path / "link").symlink_to("b")
    tree = await files.tree()
    told = [(entry.path, entry.kind, entry.num_bytes) for entry in tree.entries]
    assert told == [
        (".git", "folder", None),
        ("a.txt", "file", 2),
        ("b", "folder", None),
        ("link", "link", None),
        ("z.txt", "file", 2),
        ("b/c", "folder", None),
    ]
    assert tree.is_whole
    assert "b/c/d/e.txt" in [entry.path for entry in (await files.tree(max_depth=9)).entries]
    few = await files.tree(max_entries=2)
    assert (len(few.entries), few.is_whole) == (2, False)
    await refused("not_found", files.tree("nowhere"))


def has_ripgrep() -> bool:
    return subprocess.run(["sh", "-c", "command -v rg"], capture_output=True, check=False).returncode == 0


def path_without_ripgrep(tmp_path: Path) -> str:
    """A folder that has only the programs which a shell and an interpreter need."""
    folder = tmp_path / "programs"
    folder.mkdir()
    programs = {"sh": shutil.which("sh"), "bash": shutil.which("bash"), "python3": sys.executable}
    for name, program in programs.items():
        if program is not None:
            (folder / name).write_text(f'#!/bin/sh\nexec {program} "$@"\n')
            (folder / name).chmod(0o755)
    return str(folder)


@pytest.mark.parametrize("with_ripgrep", [False, True], ids=["without ripgrep", "with ripgrep"])
async def test_search_finds_lines(tmp_path: Path, with_ripgrep: bool) -> None:
    if with_ripgrep and not has_ripgrep():
        pytest.skip("ripgrep is not installed")
    path = os.environ["PATH"] if with_ripgrep else path_without_ripgrep(tmp_path)
    work = tmp_path / "work"
    for name, content in {
        "a.py": "def f(x):\n    return x\n",
        "sub/b.py": "# f(x)\ndef g():\r\n    pass\n",
        "sub/c.txt": "def h\n",
        ".hidden": "def i\n",
        ".git/x": "def j\n",
        "ignored.log": "def k\n",
        ".gitignore": "*.log\n",
    }.items():
        (work / name).parent.mkdir(parents=True, exist_ok=True)
        (work / name).write_bytes(content.encode())
    (work / "binary").write_bytes(b"def b\0\n")
    (work / "link").symlink_to("a.py")
    async with action_server(work, env={"PATH": path}) as server:
        files = server.files
        found = await files.search(r"^def \w")
        assert [(os.path.normpath(one.path), one.line, one.text) for one in found.matches] == [
            (".hidden", 1, "def i"),
            ("a.py", 1, "def f(x):"),
            ("ignored.log", 1, "def k"),
            ("sub/b.py", 2, "def g():"),
            ("sub/c.txt", 1, "def h"),
        ]
        assert found.is_whole
        literal = await files.search("f(x)", is_regex=False, glob="*.py")
        assert [os.path.normpath(one.path) for one in literal.matches] == ["a.py", "sub/b.py"]
        one = await files.search("def", path="a.py")
        assert [(match.path, match.line) for match in one.matches] == [("a.py", 1)]
        few = await files.search("def", max_matches=2)
        assert (len(few.matches), few.is_whole) == (2, False)
        await refused("bad_pattern", files.search("("), "pattern cannot be read")
        await refused("not_found", files.search("x", path="nowhere"))
        assert (await files.search("no such text at all")).matches == []


async def test_a_pattern_that_takes_forever_holds_up_nothing_else(tmp_path: Path) -> None:
    """Python's expressions can; ripgrep's cannot."""
    work = tmp_path / "work"
    work.mkdir()
    (work / "a.txt").write_text("a" * 40 + "!\n")
    order = {"act": "search", "pattern": "(a+)+$", "path": ".", "is_regex": True, "glob": None, "max_matches": 5}
    async with action_server(work, env={"PATH": path_without_ripgrep(tmp_path)}) as server:
        link = server.files._link
        slow = asyncio.create_task(link.ask("files", {**order, "timeout_s": 1.0}, Found, 1.0))
        await asyncio.sleep(0.1)
        assert (await server.shell.run("echo on", timeout_s=20)).output.text == "on\n"
        await refused("timed_out", slow, "longer than 1 s")
        assert (await server.files.view("a.txt")).num_lines == 1
