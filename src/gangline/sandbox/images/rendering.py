"""Recipe -> the text of a definition file (Apptainer) or a Dockerfile, by Jinja2. Builds nothing.

All values of a recipe are quoted for their shell; a name that a template does not know is an error.
"""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

from gangline.domain.errors import InvalidRequest
from gangline.sandbox.images.recipe import Inputs, Recipe
from gangline.settings.installation import extra_command

__all__ = ["LOCK_NAME", "render"]

LOCK_NAME = "requirements.lock"
"""The lock file's name beside the definition, and in `/opt/gangline` of the image."""
_TEMPLATES = Path(__file__).parent / "templates"
_BUILT_IN = {"apptainer": "apptainer.def.j2", "docker": "Dockerfile.j2"}


def render(recipe: Recipe, inputs: Inputs) -> str:
    """Raises: InvalidRequest when a template is wrong, or Jinja2 is missing."""
    source = recipe.definition or _TEMPLATES / _BUILT_IN[recipe.kind]
    text = _read(source)
    return _filled(text, source.name, _variables(recipe, inputs)) if source.suffix == ".j2" else text


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"{path} cannot be read: {error}.") from error


def _filled(text: str, name: str, variables: dict[str, Any]) -> str:
    try:
        import jinja2  # noqa: PLC0415 (an extra)
        import jinja2.sandbox  # noqa: PLC0415
    except ModuleNotFoundError as error:
        raise InvalidRequest(f"images need Jinja2. Run: {extra_command('images')}") from error
    environment = jinja2.sandbox.SandboxedEnvironment(
        undefined=jinja2.StrictUndefined,
        autoescape=False,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["quoted"] = lambda value: shlex.quote(str(value))
    try:
        return environment.from_string(text).render(variables)
    except jinja2.TemplateError as error:
        raise InvalidRequest(f"the template {name} is wrong: {error}") from error


def _variables(recipe: Recipe, inputs: Inputs) -> dict[str, Any]:
    """Variables of the templates; docs/guides/images.md lists them."""
    npm = [tool for tool in recipe.tools if tool.source == "npm"]
    return {
        "name": recipe.name,
        "base": recipe.base_name,
        "bootstrap": "localimage" if recipe.is_base_local else recipe.base.rpartition("://")[0] or "docker",
        "packages": recipe.packages,
        "lock": LOCK_NAME if recipe.lock is not None else None,
        "npm_requirements": [one for tool in npm for one in tool.requirements],
        "npm_node": ".".join(map(str, max((tool.oldest for tool in npm), default=(0, 0)))),
        "pypi_tools": [tool for tool in recipe.tools if tool.source == "pypi"],
        "harnesses": [tool.harness for tool in recipe.tools],
        "framework": inputs.framework,
    }
