"""What a sandbox sees, how its limits are kept, and what people are told when it cannot be."""

from __future__ import annotations

import resource
from pathlib import Path, PurePosixPath

import pytest

from gangline.domain.errors import InvalidRequest
from gangline.domain.task import LimitsSpec
from gangline.sandbox.bubblewrap.command_line import View, arguments, content_of, private_files
from gangline.sandbox.bubblewrap.runtime import obstacle
from gangline.sandbox.confinement.cgroups import group_name, joined_groups, make_groups, remove_owned
from gangline.sandbox.confinement.limits import enforcement
from gangline.sandbox.containers.engine import checked_image
from gangline.sandbox.shared.environment import argv_of, clean_environment, exposed_folders, image_environment


def view(tmp_path: Path, *, image: Path | None, expose: list[Path]) -> View:
    return View(
        image=image,
        shared={"/workspace": tmp_path / "work", "/tmp": tmp_path / "tmp"},
        expose=expose,
        files=("passwd", "group", "hosts"),
        host_network=False,
        user_namespace=True,
    )


def mounts(args: list[str], option: str) -> list[tuple[str, str]]:
    return [(args[at + 1], args[at + 2]) for at, word in enumerate(args) if word == option]


def test_an_image_that_holds_a_mount_point_is_bound_by_its_entries(tmp_path: Path) -> None:
    image = tmp_path / "image"
    for name in ("usr/bin", "root/notes", "tmp/junk"):
        (image / name).mkdir(parents=True)
    (image / "bin").symlink_to("usr/bin")
    args = arguments(view(tmp_path, image=image, expose=[Path("/root/tools")]))
    bound = mounts(args, "--ro-bind")
    assert (str(image / "usr"), "/image/usr") in bound
    assert (str(image / "root/notes"), "/image/root/notes") in bound
    assert (str(image / "root"), "/image/root") not in bound
    assert not any(inside.startswith("/image/tmp") for _source, inside in bound)
    assert mounts(args, "--symlink") == [("usr/bin", "/image/bin")]
    assert args[-2:] == ["--remount-ro", "/image/"]


@pytest.mark.parametrize(
    "point", ["tmp", "workspace", "root", "root/tools", "etc", "etc/hosts", "etc/passwd", "etc/group"]
)
@pytest.mark.parametrize("leads_to", ["/oldroot/srv", "/etc", "nowhere", "../../.."])
def test_no_mount_follows_a_link_of_an_image(tmp_path: Path, point: str, leads_to: str) -> None:
    """While bubblewrap makes the mounts, /oldroot is the host's root."""
    image = tmp_path / "image"
    (image / point).parent.mkdir(parents=True)
    (image / point).symlink_to(leads_to)
    args = arguments(view(tmp_path, image=image, expose=[Path("/root/tools")]))
    links = {PurePosixPath(inside) for _leads_to, inside in mounts(args, "--symlink")}
    bound = [inside for option in ("--bind", "--ro-bind") for _source, inside in mounts(args, option)]
    made = [
        PurePosixPath(path) for path in (*bound, *(args[at + 1] for at, word in enumerate(args) if word == "--dir"))
    ]
    assert len(made) > 5
    assert [path for path in made if links & {path, *path.parents}] == []


@pytest.mark.parametrize(
    ("links", "inside", "there"),
    [
        ({}, "/a/b", "a/b"),
        ({"x": "/a"}, "/x/b", "a/b"),
        ({"x": "../../a"}, "/x/b", "a/b"),
        ({"a/up": ".."}, "/a/up/a/b", "a/b"),
        ({"x": "/etc"}, "/x", None),
        ({"x": "y", "y": "x"}, "/x", None),
        ({"x": "n" * 300}, "/x", None),
        ({}, "/missing", None),
        ({}, "/a/file", None),
    ],
)
def test_links_of_an_image_lead_inside_it(
    tmp_path: Path, links: dict[str, str], inside: str, there: str | None
) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "file").touch()
    for name, leads_to in links.items():
        (tmp_path / name).symlink_to(leads_to)
    assert content_of(tmp_path, inside) == (None if there is None else tmp_path / there)


def test_an_exposed_folder_inside_a_shared_one_is_mounted_after_it(tmp_path: Path) -> None:
    args = arguments(view(tmp_path, image=None, expose=[Path("/tmp/tool")]))
    assert args.index("/tmp") < max(at for at, word in enumerate(args) if word == "/tmp/tool")


def test_an_image_that_is_no_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="folder"):
        arguments(view(tmp_path, image=tmp_path / "none", expose=[]))


def test_files_that_not_everyone_may_read_are_found(tmp_path: Path) -> None:
    etc = tmp_path / "etc"
    for name, mode in (("passwd", 0o644), ("shadow", 0o640), ("shut/deep/key", 0o644)):
        (etc / name).parent.mkdir(parents=True, exist_ok=True)
        (etc / name).write_text("")
        (etc / name).chmod(mode)
    (etc / "shut").chmod(0o700)
    assert sorted(private_files(etc)) == [etc / "shadow", etc / "shut" / "deep" / "key"]


def test_exposed_folders_exist_once_and_lend_their_programs_to_path(tmp_path: Path) -> None:
    tool = tmp_path / "tool"
    (tool / "node_modules" / ".bin").mkdir(parents=True)
    folders = exposed_folders([tool, tool / "node_modules", tool, tmp_path / "absent", Path("/usr/lib")])
    assert folders == [tool]
    environ = clean_environment(folders, "/home/agent", {"A": "1"})
    assert environ["PATH"] == f"{tool}/node_modules/.bin:/usr/local/bin:/usr/bin:/bin"
    assert set(environ) == {"PATH", "HOME", "LANG", "A"}


def test_programs_of_the_folder_that_is_named_first_are_found_first(tmp_path: Path) -> None:
    environment, python = tmp_path / "code" / "project" / "venv", tmp_path / "python"
    for folder in (environment, python, python / "lib" / "inner"):
        (folder / "bin").mkdir(parents=True)
    folders = exposed_folders([environment, python / "lib" / "inner", python])
    assert folders == [environment, python]
    assert clean_environment(folders, "/h", {})["PATH"].startswith(f"{environment}/bin:{python}/bin:")


def test_an_images_own_programs_come_before_the_exposed_ones(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    image = {"PATH": "/opt/conda/bin:/usr/bin", "LANG": "de_DE.UTF-8", "HOME": "/root"}
    environ = image_environment([tmp_path], "/home/agent", image, {"A": "1"})
    assert environ == {
        "PATH": f"/opt/conda/bin:/usr/bin:{tmp_path}/bin",
        "LANG": "de_DE.UTF-8",
        "HOME": "/home/agent",
        "A": "1",
    }


@pytest.mark.parametrize(
    "image",
    ["debian", "debian:12", "ghcr.io/a/b_c:v1.2", "localhost:5000/x@sha256:" + "0" * 64, "swebench/sweb.eval:x"],
)
def test_names_of_images_are_taken(image: str) -> None:
    assert checked_image(image, "docker") == image


@pytest.mark.parametrize("image", [None, "", "--privileged", "dir:/etc", "docker-archive:/x.tar", "a b", "a\n", "/etc"])
def test_what_is_no_name_of_an_image_never_reaches_a_command_line(image: str | None) -> None:
    with pytest.raises(InvalidRequest, match="image"):
        checked_image(image, "docker")


def test_a_command_must_name_a_program() -> None:
    assert argv_of("a | b") == ["sh", "-c", "a | b"]
    for empty in ([], [""]):
        with pytest.raises(InvalidRequest):
            argv_of(empty)


def test_limits_fall_back_one_by_one_and_say_so() -> None:
    limits = LimitsSpec(memory_bytes=1 << 30, cpus=2, max_pids=10)
    chosen = enforcement(limits, {"max_pids": "cgroup v2"}, own_user=True)
    assert chosen.enforced == {
        "memory_bytes": "rlimit, per process",
        "cpus": "not enforced",
        "max_pids": "cgroup v2",
        "max_file_bytes": "not set",
        "disk_bytes": "not enforced",
        "max_files": "not enforced",
    }
    assert chosen.rlimits == {resource.RLIMIT_CORE: 0, resource.RLIMIT_DATA: 1 << 30}
    assert enforcement(limits, {}, own_user=False).enforced["max_pids"] == "not enforced"


def test_no_file_may_be_larger_than_all_of_them_together() -> None:
    for asked, size in ((None, 5), (3, 3), (9, 5)):
        limits = LimitsSpec(disk_bytes=5, max_file_bytes=asked)
        assert enforcement(limits, {"disk_bytes": "measured"}, own_user=True).rlimits[resource.RLIMIT_FSIZE] == size


def _v2(root: Path, handed: str) -> Path:
    own = root / "user" / "node"
    own.mkdir(parents=True)
    for folder, text in ((root, handed), (root / "user", handed), (own, "")):
        (folder / "cgroup.subtree_control").write_text(text)
        (folder / "cgroup.controllers").write_text(handed)
        (folder / "cgroup.procs").write_text("")
    (own / "cgroup.subtree_control").unlink()
    membership = root / "membership"
    membership.write_text("0::/user/node\n")
    return membership


def test_version_2_groups_are_made_beside_the_nodes_own(tmp_path: Path) -> None:
    membership = _v2(tmp_path, "cpu memory pids")
    limits = LimitsSpec(memory_bytes=1 << 20, cpus=0.5, max_pids=7)
    groups = make_groups("gangline@o@1", limits, root=tmp_path, membership=membership)
    folder = tmp_path / "user" / "gangline@o@1"
    assert groups.folders == [folder]
    assert set(groups.enforced.values()) == {"cgroup v2"}
    assert (folder / "cpu.max").read_text() == "50000 100000"
    assert (folder / "memory.max").read_text() == str(1 << 20)
    assert (folder / "pids.max").read_text() == "7"


def test_version_2_limits_what_it_can_where_a_controller_is_missing(tmp_path: Path) -> None:
    """As systemd hands down to an ordinary user: memory and pids, but not cpu."""
    membership = _v2(tmp_path, "memory pids")
    limits = LimitsSpec(memory_bytes=1 << 20, cpus=0.5, max_pids=7)
    groups = make_groups("gangline@o@1", limits, root=tmp_path, membership=membership)
    assert groups.enforced == {"memory_bytes": "cgroup v2", "max_pids": "cgroup v2"}
    assert sorted(path.name for path in (tmp_path / "user" / "gangline@o@1").iterdir()) == ["memory.max", "pids.max"]
    chosen = enforcement(limits, groups.enforced, own_user=True)
    assert chosen.enforced["cpus"] == "not enforced"


def _container(root: Path, **files: str) -> Path:
    """What an engine made, alongside our own group: the container's membership."""
    folder = root / "machine" / "container"
    folder.mkdir(parents=True)
    for name, text in {"cgroup.procs": "", **files}.items():
        (folder / name.replace("_", ".")).write_text(text)
    membership = root / "container-membership"
    membership.write_text("0::/machine/container\n")
    return membership


def test_what_an_engines_groups_hold_is_read_back(tmp_path: Path) -> None:
    own = _v2(tmp_path, "memory pids")
    theirs = _container(tmp_path, memory_max="1044480", pids_max="9", cpu_max="max 100000")
    limits = LimitsSpec(memory_bytes=1 << 20, max_pids=9, cpus=1)
    groups = joined_groups(theirs, limits, root=tmp_path, own_membership=own)
    assert groups.procs == [str(tmp_path / "machine" / "container" / "cgroup.procs")]
    assert groups.enforced == {"memory_bytes": "cgroup v2", "max_pids": "cgroup v2"}, "cpu is without limit there"


def test_groups_that_commands_may_not_join_hold_nothing(tmp_path: Path) -> None:
    """Version 2 asks for the right on what is above both; an ordinary user has it in its own session only."""
    own = _v2(tmp_path, "memory pids")
    theirs = _container(tmp_path, pids_max="9")
    (tmp_path / "cgroup.procs").unlink()
    groups = joined_groups(theirs, LimitsSpec(max_pids=9), root=tmp_path, own_membership=own)
    assert (groups.procs, groups.enforced) == ([], {})


def test_a_container_in_our_own_group_has_none_of_its_own(tmp_path: Path) -> None:
    own = _v2(tmp_path, "memory pids")
    groups = joined_groups(own, LimitsSpec(max_pids=9), root=tmp_path, own_membership=own)
    assert groups.procs == []


def test_version_2_without_any_controller_leaves_no_group(tmp_path: Path) -> None:
    groups = make_groups("gangline@o@1", LimitsSpec(), root=tmp_path, membership=_v2(tmp_path, "hugetlb"))
    assert (groups.enforced, groups.procs, list(tmp_path.rglob("gangline@*"))) == ({}, [], [])


def test_version_1_groups_are_made_below_the_nodes_own_for_each_controller(tmp_path: Path) -> None:
    for name in ("memory", "cpu/mine"):
        (tmp_path / name).mkdir(parents=True)
    membership = tmp_path / "membership"
    membership.write_text("3:cpu:/mine\n2:memory:/\n")
    limits = LimitsSpec(memory_bytes=1 << 20, cpus=0.5, max_pids=7)
    groups = make_groups("g", limits, root=tmp_path, membership=membership)
    assert groups.enforced == {"memory_bytes": "cgroup v1", "cpus": "cgroup v1"}
    assert (tmp_path / "cpu" / "mine" / "g" / "cpu.cfs_quota_us").read_text() == "50000"


async def test_groups_of_an_owner_are_removed_but_the_kept_ones(tmp_path: Path) -> None:
    names = [group_name("me", "a"), group_name("me", "b"), group_name("you", "a")]
    for name in names:
        (tmp_path / "pids" / name).mkdir(parents=True)
    await remove_owned("me", frozenset({"b"}), root=tmp_path)
    assert sorted(path.name for path in (tmp_path / "pids").iterdir()) == sorted(names[1:])


@pytest.mark.parametrize(
    ("setting", "value", "line"),
    [
        ("kernel/unprivileged_userns_clone", "0", "sysctl -w kernel.unprivileged_userns_clone=1"),
        ("kernel/apparmor_restrict_unprivileged_userns", "1", "sysctl -w kernel.apparmor_restrict"),
        ("user/max_user_namespaces", "0", "sysctl -w user.max_user_namespaces="),
    ],
)
def test_an_obstacle_comes_with_the_line_to_run(tmp_path: Path, setting: str, value: str, line: str) -> None:
    (tmp_path / "bwrap").write_text("#!/bin/sh\n")
    (tmp_path / "bwrap").chmod(0o755)
    (tmp_path / setting).parent.mkdir(parents=True)
    (tmp_path / setting).write_text(f"{value}\n")
    assert line in obstacle("setting up uid map: Permission denied", proc_sys=tmp_path, path=str(tmp_path))
    assert "apt-get install" in obstacle("", proc_sys=tmp_path, path=str(tmp_path / "empty"))
    mount = obstacle("Can't mount proc on /newroot/proc", proc_sys=tmp_path / "none", path=str(tmp_path))
    assert "systempaths=unconfined" in mount
