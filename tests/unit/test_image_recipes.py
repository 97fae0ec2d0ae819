"""Which image will do for a recipe, and the text that it becomes."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError

from gangline.domain.errors import InvalidRequest
from gangline.sandbox.images.building import render
from gangline.sandbox.images.recipe import Inputs, Recipe, Tool, digest_of

PI = Tool(harness="pi", command="pi", source="npm", requirements=("@scope/pi@1.2.3",), oldest=(20, 6))
AIDER = Tool(harness="aider", command="aider", source="pypi", requirements=("aider-chat==1.0", "beside>2"))


def _key(recipe: Recipe, *, base: str = "sha256:1", lock: str = "aa", framework: str = "1.0") -> str | None:
    inputs = Inputs(base=base, lock_sha256=lock, definition_sha256=None, framework=framework)
    return inputs.key(recipe)


def _recipe(caching: str, **fields: object) -> Recipe:
    return Recipe.model_validate({"name": "swe", "caching": caching, "lock": Path("lock"), **fields})


def test_from_scratch_no_image_ever_does() -> None:
    assert _key(_recipe("scratch")) is None


def test_versioned_asks_for_the_same_base_and_the_same_version() -> None:
    same = _key(_recipe("versioned"))
    assert same == _key(_recipe("versioned"), lock="bb")
    assert same != _key(_recipe("versioned"), base="sha256:2")
    assert same != _key(_recipe("versioned"), framework="1.1")


def test_lock_asks_for_the_same_lock_alone() -> None:
    same = _key(_recipe("lock"))
    assert same == _key(_recipe("lock"), base="sha256:2", framework="1.1")
    assert same != _key(_recipe("lock"), lock="bb")


@pytest.mark.parametrize("caching", ["versioned", "lock"])
def test_an_image_of_another_name_or_without_what_is_asked_for_never_does(caching: str) -> None:
    keys = [
        _key(_recipe(caching)),
        _key(_recipe(caching, name="other")),
        _key(_recipe(caching, kind="docker")),
        _key(_recipe(caching, tools=(PI,))),
        _key(_recipe(caching, packages=("git",))),
    ]
    assert len(set(keys)) == len(keys)


def test_a_digest_tells_where_one_part_ends() -> None:
    assert digest_of(["ab", "c"]) != digest_of(["a", "bc"])


def test_what_a_file_holds_counts_and_not_its_name(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    one.write_text("a==1")
    two.write_text("a==1")
    read = [Inputs.read(_recipe("lock", lock=path), "b") for path in (one, two)]
    assert read[0] == read[1]
    with pytest.raises(InvalidRequest, match="cannot be read"):
        Inputs.read(_recipe("lock", lock=tmp_path / "none"), "b")


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"name": "../up"}, "name"),
        ({"name": "a b"}, "name"),
        ({"base": "debian\nRUN evil"}, "not a name of an image"),
        ({"packages": ["git; evil"]}, "packages"),
        ({"packages": ["--option"]}, "packages"),
        ({"caching": "lock", "lock": None}, "needs a lock file"),
        ({"kind": "docker", "base": "/images/x.sif"}, "docker import"),
        ({"kind": "lxc"}, "kind"),
    ],
)
def test_a_recipe_that_cannot_be_is_refused(fields: dict[str, object], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        Recipe.model_validate({"name": "swe", **fields})


def _rendered(**fields: object) -> str:
    recipe = Recipe.model_validate({"name": "swe", **fields})
    return render(recipe, Inputs(base="x", lock_sha256=None, definition_sha256=None, framework="1.0"))


def test_the_plain_definition_is_the_base_and_labels() -> None:
    assert _rendered(base="docker://debian:12") == (
        "Bootstrap: docker\nFrom: debian:12\n\n%post\n    set -eu\n    rm -rf /var/lib/apt/lists/*\n\n"
        "%labels\n    org.gangline.name swe\n    org.gangline.version 1.0\n    org.gangline.harnesses none\n"
    )


def test_a_definition_has_tools_packages_and_the_lock() -> None:
    text = _rendered(base="/images/base.sif", packages=("git",), tools=(PI, AIDER), lock=Path("l"))
    assert text.startswith("Bootstrap: localimage\nFrom: /images/base.sif\n")
    assert "%files\n    requirements.lock /opt/gangline/requirements.lock\n" in text
    lines = [line.strip() for line in text.splitlines()]
    assert "npm install --global --no-audit --no-fund @scope/pi@1.2.3" in lines
    assert "/opt/gangline/python/aider/bin/pip install --no-cache-dir aider-chat==1.0 'beside>2'" in lines
    assert "ca-certificates git python3 python3-venv python3-pip $(command -v npm" in text
    assert "oldest=20.6" in lines
    assert "org.gangline.harnesses pi,aider" in lines


def test_a_dockerfile_has_the_same() -> None:
    text = _rendered(kind="docker", base="docker://debian:12", packages=("git",), tools=(PI, AIDER), lock=Path("l"))
    assert text.startswith("FROM debian:12\nCOPY requirements.lock /opt/gangline/requirements.lock\n")
    assert " && npm install --global --no-audit --no-fund @scope/pi@1.2.3 \\\n" in text
    assert "/bin/pip install --no-cache-dir aider-chat==1.0 'beside>2' \\\n" in text
    assert 'org.gangline.harnesses="pi,aider"\n' in text
    for line in text.splitlines():
        assert line.strip() not in ("", "&&"), "an instruction's lines belong together"


def test_a_definition_of_ones_own_is_used_as_it_is(tmp_path: Path) -> None:
    own = tmp_path / "qemu.def"
    own.write_text("Bootstrap: docker\nFrom: {{ OWN }}\n")
    assert _rendered(definition=own) == own.read_text()


def test_a_template_of_ones_own_knows_the_same_names(tmp_path: Path) -> None:
    own = tmp_path / "mine.def.j2"
    own.write_text("From: {{ base }}\n%post\n  echo {{ name | quoted }} {{ harnesses | join(' ') }}\n")
    assert _rendered(definition=own, base="debian:12", tools=(PI,)) == "From: debian:12\n%post\n  echo swe pi\n"


@pytest.mark.parametrize("text", ["{{ nothing_of_the_kind }}", "{% if %}", "{{ ''.__class__.__mro__ }}"])
def test_a_template_that_is_wrong_says_so(tmp_path: Path, text: str) -> None:
    own = tmp_path / "mine.def.j2"
    own.write_text(text)
    with pytest.raises(InvalidRequest, match=r"mine\.def\.j2 is wrong"):
        _rendered(definition=own)
