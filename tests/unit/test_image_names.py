from __future__ import annotations

import pytest

from gangline.domain.image_names import engine_names, has_image, located, packed

DIGEST = "sha256:" + "ab" * 32
ID = "sha256:" + "0123456789abcdef" * 4
LISTED = [("debian", "12", DIGEST, ID), ("<none>", "<none>", "<none>", "sha256:" + "cd" * 32)]


@pytest.mark.parametrize(
    "image",
    [
        *("debian:12", "docker.io/library/debian:12", "docker.io/debian:12", "library/debian:12"),
        *(f"debian@{DIGEST}", f"debian:12@{DIGEST}", ID, ID.removeprefix("sha256:"), "0123456789ab"),
        "cdcdcdcdcdcd",
    ],
)
def test_an_image_is_found_by_each_of_its_names(image: str) -> None:
    folder, name = located(image)
    assert folder == ""
    assert has_image(packed(engine_names(LISTED)), name)


@pytest.mark.parametrize("image", ["debian", "debian:13", "other/debian:12", "ebian:12", f"ubuntu@{DIGEST}"])
def test_another_image_is_not_found(image: str) -> None:
    assert not has_image(packed(engine_names(LISTED)), located(image)[1])


def test_a_name_without_a_tag_is_the_latest_also_behind_a_port() -> None:
    listed = [("host:5000/team/agents", "latest", "<none>", ID)]
    assert has_image(packed(engine_names(listed)), located("host:5000/team/agents")[1])


def test_podman_finds_an_image_of_any_registry_by_the_end_of_its_name() -> None:
    listed = [("quay.io/team/agents", "1", "<none>", ID)]
    for image in ("team/agents:1", "agents:1"):
        name = located(image)[1]
        assert (
            has_image(packed(engine_names(listed, short=True)), name),
            has_image(packed(engine_names(listed)), name),
        ) == (
            True,
            False,
        )


def test_an_image_with_a_path_is_in_its_folder() -> None:
    assert located("/srv/images//a/../swe") == ("/srv/images", "swe")
