"""The kernel's accounts of control groups, as each version writes them; what is missing is unknown, never 0."""

from __future__ import annotations

from pathlib import Path

from gangline.domain.sandbox import ExecResult
from gangline.sandbox.shared.accounts import MemoryKills, cpu_s, memory_kills, peak_memory_bytes


def _folder(path: Path, **files: str) -> Path:
    path.mkdir()
    for name, text in files.items():
        (path / name.replace("_in_", "@").replace("__", ".").replace("@", "_in_")).write_text(text)
    return path


V2 = {
    "cpu__stat": "usage_usec 1234567\nuser_usec 1000000\nsystem_usec 234567\nnr_periods 0\n",
    "memory__peak": "73400320\n",
    "memory__events": "low 0\nhigh 0\nmax 12\noom 2\noom_kill 1\noom_group_kill 0\n",
}


def test_version_2(tmp_path: Path) -> None:
    group = _folder(tmp_path / "g", **V2)
    assert (cpu_s(group), peak_memory_bytes(group)) == (1.234567, 73400320)
    assert memory_kills([group]) == MemoryKills(2, 1)


def test_version_1_has_a_folder_for_each_controller(tmp_path: Path) -> None:
    cpu = _folder(tmp_path / "cpu", cpuacct__usage="2500000000\n", cpu__stat="nr_periods 0\nnr_throttled 0\n")
    memory = _folder(
        tmp_path / "memory",
        memory__max_usage_in_bytes="4096\n",
        memory__failcnt="3\n",
        memory__oom_control="oom_kill_disable 0\nunder_oom 0\noom_kill 2\n",
    )
    (memory / "memory.memsw.failcnt").write_text("4\n")
    assert (cpu_s(cpu), peak_memory_bytes(cpu)) == (2.5, None)
    assert (cpu_s(memory), peak_memory_bytes(memory)) == (None, 4096)
    assert memory_kills([cpu, memory]) == MemoryKills(7, 2)


def test_version_1_counts_no_failures_where_memory_and_swap_have_one_limit(tmp_path: Path) -> None:
    """Read on Linux 6.18 in a container that Docker limited to 256 MiB, after a kill."""
    limit = "268435456\n"
    files = {"memory__limit_in_bytes": limit, "memory__failcnt": "0\n"}
    for peak, expected in (("268432384\n", MemoryKills(1, 1)), ("100000000\n", MemoryKills(0, 1))):
        group = _folder(tmp_path / peak.strip(), **files, memory__oom_control="oom_kill_disable 0\noom_kill 1\n")
        (group / "memory.memsw.limit_in_bytes").write_text(limit)
        (group / "memory.memsw.max_usage_in_bytes").write_text(peak)
        assert memory_kills([group]) == expected


def test_a_group_that_is_gone_or_speaks_otherwise_has_no_accounts(tmp_path: Path) -> None:
    odd = _folder(tmp_path / "odd", cpu__stat="usage_usec many\n", memory__peak="max\n", memory__events="none")
    for folder in (odd, tmp_path / "gone"):
        assert (cpu_s(folder), peak_memory_bytes(folder), memory_kills([folder])) == (None, None, MemoryKills())


def test_a_kill_for_want_of_the_machines_memory_is_not_the_groups_own() -> None:
    assert MemoryKills(2, 1).began_since(MemoryKills(1, 0))
    assert not MemoryKills(1, 1).began_since(MemoryKills(1, 0)), "killed, but not at its limit"
    assert not MemoryKills(2, 1).began_since(MemoryKills(1, 1)), "at its limit, but memory was found"


def test_a_kill_names_the_limit() -> None:
    assert ExecResult(exit_code=137).memory_kill == ""
    sizes = {2 << 30: "2 GiB", 3 << 29: "1.5 GiB", 64 << 20: "64 MiB", 1023: "1023 bytes", 1 << 60: "1.049e+06 TiB"}
    for size, text in sizes.items():
        assert ExecResult(exit_code=None, signal=9, memory_limit_bytes=size).memory_kill == (
            f"killed: more than {text} of memory"
        )
