"""Images are built once, found again, and removed, by programs that stand in for `apptainer build` and `docker`.

tests/apptainer builds for real.
"""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path

import pytest

from gangline.domain.errors import RuntimeFailed, RuntimeUnavailable
from gangline.sandbox.images.building import ImageBuilder
from gangline.sandbox.images.recipe import Recipe

APPTAINER = """#!/bin/sh
# apptainer build [--force] [--fakeroot] TARGET DEFINITION
set -e
for word in "$@"; do before=$target; target=$last; last=$word; done
grep -q fail "$last" && { echo half > "$target"; echo "FATAL: no" >&2; exit 255; }
cat "$last" > "$target"
echo "$@" >> "$CALLS"
"""
DOCKER = """#!/bin/sh
# docker build --tag TAG --label L . | image inspect --format F NAME | image rm NAME; images are files in $IMAGES
set -e
name() { echo "$IMAGES/$(echo "$1" | tr '/:' '__')"; }
case "$1 $2" in
"build --tag") cp Dockerfile "$(name "$3")"; echo "$@" >> "$CALLS" ;;
"image inspect") [ -e "$(name "$5")" ] || exit 1; case "$4" in *Id*) md5sum < "$(name "$5")" ;; *) echo 123 ;; esac ;;
"image rm") rm "$(name "$3")" ;;
*) exit 64 ;;
esac
"""


@pytest.fixture
def calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("CALLS", str(tmp_path / "calls"))
    monkeypatch.setenv("IMAGES", str(tmp_path / "docker-images"))
    (tmp_path / "docker-images").mkdir()
    (tmp_path / "calls").touch()
    return tmp_path / "calls"


@pytest.fixture
def builder(tmp_path: Path, calls: Path) -> ImageBuilder:
    programs = {"apptainer": APPTAINER, "docker": DOCKER}
    for name, text in programs.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(stat.S_IRWXU)
    return ImageBuilder(tmp_path / "images", apptainer=[str(tmp_path / "apptainer")], docker=[str(tmp_path / "docker")])


def _recipe(tmp_path: Path, kind: str, caching: str = "versioned", **fields: object) -> Recipe:
    lock = tmp_path / "requirements.txt"
    if not lock.exists():
        lock.write_text("a==1\n")
    return Recipe.model_validate({"name": "swe", "kind": kind, "caching": caching, "lock": lock, **fields})


@pytest.mark.parametrize("kind", ["apptainer", "docker"])
@pytest.mark.parametrize(("caching", "num_builds"), [("scratch", 2), ("versioned", 1), ("lock", 1)])
def test_an_image_that_will_do_is_not_built_again(
    builder: ImageBuilder, tmp_path: Path, calls: Path, kind: str, caching: str, num_builds: int
) -> None:
    first, second = builder.build(_recipe(tmp_path, kind, caching)), builder.build(_recipe(tmp_path, kind, caching))
    assert first.record.image == second.record.image
    assert (first.is_new, second.is_new) == (True, num_builds == 2)
    assert len(calls.read_text().splitlines()) == num_builds
    assert [record.image for record in builder.shelf.records()] == [first.record.image]


@pytest.mark.parametrize("kind", ["apptainer", "docker"])
def test_another_lock_makes_another_image_where_the_lock_counts(
    builder: ImageBuilder, tmp_path: Path, kind: str
) -> None:
    first = builder.build(_recipe(tmp_path, kind, "lock"))
    (tmp_path / "requirements.txt").write_text("a==2\n")
    second = builder.build(_recipe(tmp_path, kind, "lock"))
    assert second.is_new
    assert first.record.image != second.record.image


def test_a_base_file_that_changed_counts_where_versions_count(builder: ImageBuilder, tmp_path: Path) -> None:
    base = tmp_path / "base.sif"
    base.write_text("one")
    first = builder.build(_recipe(tmp_path, "apptainer", base=str(base)))
    base.write_text("two")
    second = builder.build(_recipe(tmp_path, "apptainer", base=str(base)))
    assert second.is_new
    assert first.record.image != second.record.image


def test_a_base_that_docker_has_under_the_same_name_counts_by_its_content(
    builder: ImageBuilder, tmp_path: Path
) -> None:
    (tmp_path / "docker-images" / "base_1").write_text("one")
    builder.build(_recipe(tmp_path, "docker", base="base:1"))
    (tmp_path / "docker-images" / "base_1").write_text("two")
    assert builder.build(_recipe(tmp_path, "docker", base="base:1")).is_new


@pytest.mark.parametrize("kind", ["apptainer", "docker"])
def test_an_image_that_somebody_removed_is_built_again(builder: ImageBuilder, tmp_path: Path, kind: str) -> None:
    first = builder.build(_recipe(tmp_path, kind))
    if kind == "apptainer":
        Path(first.record.image).unlink()
    else:
        (tmp_path / "docker-images" / first.record.image.replace("/", "_").replace(":", "_")).unlink()
    assert builder.build(_recipe(tmp_path, kind)).is_new


def test_a_build_that_fails_leaves_nothing(builder: ImageBuilder, tmp_path: Path) -> None:
    own = tmp_path / "own.def"
    own.write_text("fail")
    with pytest.raises(RuntimeFailed, match="exit code 255"):
        builder.build(_recipe(tmp_path, "apptainer", definition=own))
    assert builder.shelf.records() == []
    assert [path.name for path in (tmp_path / "images").iterdir()] == [".lock"]


def test_a_program_that_is_missing_is_named(tmp_path: Path) -> None:
    builder = ImageBuilder(tmp_path / "images", apptainer=["no-such-apptainer"], docker=["no-such-docker"])
    for kind in ("apptainer", "docker"):
        with pytest.raises(RuntimeUnavailable, match=f"no-such-{kind} is not installed"):
            builder.build(_recipe(tmp_path, kind))


@pytest.mark.parametrize("kind", ["apptainer", "docker"])
def test_prune_keeps_the_newest_of_each_name(builder: ImageBuilder, tmp_path: Path, kind: str) -> None:
    old = builder.build(_recipe(tmp_path, kind)).record
    new = builder.build(_recipe(tmp_path, kind, packages=("git",))).record
    other = builder.build(_recipe(tmp_path, kind, name="other")).record
    (tmp_path / "images" / "broken-0123456789ab.sif.new").write_text("half")
    assert [record.image for record in builder.prune(1)] == [old.image]
    assert {record.image for record in builder.shelf.records()} == {new.image, other.image}
    assert not list((tmp_path / "images").glob("*.new"))
    if kind == "apptainer":
        assert not Path(old.image).exists()
        assert Path(new.image).exists()
    else:
        assert len(os.listdir(tmp_path / "docker-images")) == 2


def test_a_record_says_what_went_in(builder: ImageBuilder, tmp_path: Path) -> None:
    record = builder.build(_recipe(tmp_path, "apptainer", "lock")).record
    told = json.loads((tmp_path / "images" / f"swe-{record.digest[:12]}.apptainer.json").read_text())
    assert told["image"] == record.image
    assert told["caching"] == "lock"
    assert told["lock_sha256"]
    assert record.size_bytes == Path(record.image).stat().st_size
