"""Fields and files of a Harbor task that are not carried. They are refused by name, never ignored."""

from __future__ import annotations

from collections.abc import Iterator

from gangline.domain.errors import InvalidRequest
from gangline.interop.harbor.tasks.config import MAIN, HarborConfig, HarborEnvironment
from gangline.interop.harbor.tasks.steps import Parts
from gangline.machine.reading.paths import SourcePath

__all__ = ["notes_on_users", "refuse_uncarried"]

_FILES = (".harborignore",)
_FILES_OF_RUN = ("trajectory.json", "tests/docker-compose.yaml", "tests/.harborignore")


def refuse_uncarried(folder: SourcePath, name: str, parts: Parts) -> None:
    """Raises: InvalidRequest, naming the fields and the files."""
    step = () if parts.step is None else ("steps", parts.step.name)
    files = [*_FILES, *dict.fromkeys("/".join((*own, path)) for own in ((), step) for path in _FILES_OF_RUN)]
    asked = [*_fields(parts.config), *(path for path in files if (folder / path).is_there())]
    if asked:
        raise InvalidRequest(f"{name}: requests unsupported features: {', '.join(asked)}.")


def notes_on_users(config: HarborConfig) -> list[str]:
    """What becomes of the users that it names: sandboxes have one of their own for the agent, who is never root."""
    users = {"agent.user": config.agent.user, "verifier.user": config.verifier.user}
    return [f"{field} {user!r} is the sandbox's own user" for field, user in users.items() if user is not None]


def _fields(config: HarborConfig) -> Iterator[str]:
    verifier = config.verifier
    asked = {
        "agent.user (root)": _is_root(config.agent.user),
        "verifier.user (root)": _is_root(verifier.user),
    }
    yield from (field for field, value in asked.items() if value)
    yield from _of_environment("environment", config.environment)
    if (own := verifier.environment) is not None:
        yield from _of_environment("verifier.environment", own)
        yield from (
            f"verifier.environment.{field}"
            for field, value in (("mcp_servers", own.mcp_servers), ("skills_dir", own.skills_dir))
            if value
        )
    for number, hook in enumerate(verifier.collect):
        if hook.service == MAIN and _is_root(hook.user):
            yield f"verifier.collect.{number}.user (root)"


def _of_environment(field: str, environment: HarborEnvironment) -> Iterator[str]:
    if environment.os.lower() != "linux":
        yield f"{field}.os"
    for name in ("gpu_types", "tpu"):
        if getattr(environment, name):
            yield f"{field}.{name}"


def _is_root(user: str | int | None) -> bool:
    return user in ("root", "0", 0)
