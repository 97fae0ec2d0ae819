"""Compares a session's needs with a node's offer, and explains why they do not match. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import get_args

import msgspec

from gangline.domain.errors import InvalidRequest
from gangline.domain.image_names import full_name, has_image, is_local, located
from gangline.domain.task import NetworkPolicy, RuntimeSpec, TaskRequest
from gangline.domain.task_values import HARMLESS

_NETWORKS: tuple[str, ...] = get_args(NetworkPolicy)

_MAX_IMAGE_CHARS = 1000
"""Longest total of a task's image names, for the store's index. Longer lists are ignored."""


class Allowed(msgspec.Struct, frozen=True, kw_only=True):
    """Features that a node's operator lets tasks use. Tasks may come from people that the operator does not trust."""

    runtimes: frozenset[str] | None = None
    """Names of runtime plug-ins; None: all that are installed."""
    networks: frozenset[str] = frozenset(_NETWORKS)
    template_kwargs: frozenset[str] = frozenset(HARMLESS)
    """Names for `capture.template_kwargs`."""

    def refusal(self, runtime: str) -> str | None:
        """Returns why a runtime is refused; None: it is not."""
        if self.runtimes is None or runtime in self.runtimes:
            return None
        return f"the node's operator allows only {_listed(self.runtimes)} (`--runtimes`)"

    def check(self, runtime: str, network: str) -> None:
        """Raises: InvalidRequest when the operator refuses either."""
        if (why := self.refusal(runtime)) is not None:
            raise InvalidRequest(f"runtime `{runtime}` is refused: {why}.")
        if network not in self.networks:
            known = _listed(self.networks)
            raise InvalidRequest(
                f"network `{network}` is refused: the node's operator allows only {known} (`--networks`)."
            )

    def check_template(self, arguments: Iterable[str]) -> None:
        """Raises: InvalidRequest, naming the template arguments that the operator refuses."""
        if refused := frozenset(arguments) - self.template_kwargs:
            raise InvalidRequest(
                f"capture.template_kwargs {_listed(refused)} is refused: the node's operator allows only "
                f"{_listed(self.template_kwargs)} (`--template-kwargs`)."
            )


def _listed(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in sorted(names)) or "none"


class Needs(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Requirements of a task's sessions for a node."""

    runtimes: tuple[str, ...] = ()
    """Names of runtime plug-ins, for the agent, the grader and the environments. Sorted."""
    labels: tuple[str, ...] = ()
    """Labels that the node must have, for the same. Sorted."""
    images: tuple[tuple[str, str], ...] = ()
    """Runtime and image, for specifications with an image. Sorted."""
    gpus: tuple[tuple[str, int], ...] = ()
    """Runtime and the most GPUs of one of its sandboxes. Sorted."""
    networks: tuple[str, ...] = ()
    """Network policies that are used. Sorted."""
    template_kwargs: tuple[str, ...] = ()
    """Names of template arguments that the task sets. Sorted."""

    @property
    def num_gpus(self) -> int:
        """GPUs that a session needs: its sandboxes share them."""
        return max((number for _, number in self.gpus), default=0)


class Offer(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Capabilities that a node offers."""

    runtimes: tuple[str, ...] = ()
    """Names of runtime plug-ins that can start sandboxes there."""
    missing: dict[str, str] = {}
    """Name of any other runtime plug-in -> why it cannot."""
    labels: tuple[str, ...] = ()
    """Its architecture, and its operator's labels."""
    images: dict[str, dict[str, str]] = {}
    """Name of a runtime plug-in -> folder -> the images there (see `image_names`). An image in another folder may
    exist."""
    pulls: tuple[str, ...] = ()
    """Names of runtime plug-ins whose images of folder `""` are pulled when they are missing."""
    not_pulled: dict[str, dict[str, str]] = {}
    """Name of a runtime plug-in -> image, by its full name -> why it could not be pulled lately."""
    gpus: dict[str, int] = {}
    """Name of a runtime plug-in -> GPUs that it can give to sandboxes, including taken ones. A node's runtimes share
    them."""
    networks: tuple[str, ...] = _NETWORKS
    """Network policies that its operator allows. Sorted."""
    template_kwargs: tuple[str, ...] = HARMLESS
    """Names that its operator allows in `capture.template_kwargs`. Sorted."""

    @property
    def num_gpus(self) -> int:
        return max(self.gpus.values(), default=0)

    def lacks(self, needs: Needs) -> list[str]:
        """Returns what is missing, one sentence each; empty: the node can run it."""
        runtimes = [self._lack(name) for name in needs.runtimes if name not in self.runtimes]
        images = [why for name, image in needs.images if (why := self._lack_of_image(name, image)) is not None]
        gpus = [self._lack_of_gpus(name, num) for name, num in needs.gpus if num > self.gpus.get(name, 0)]
        networks = [
            f"network `{name}`, which its operator refuses" for name in needs.networks if name not in self.networks
        ]
        labels = [f"label `{label}`" for label in needs.labels if label not in self.labels]
        arguments = [
            f"capture.template_kwargs `{name}`, which its operator refuses (`--template-kwargs`)"
            for name in needs.template_kwargs
            if name not in self.template_kwargs
        ]
        return runtimes + images + gpus + networks + labels + arguments

    def holds(self, runtime: str, image: str) -> bool | None:
        """Returns None if it is unknown, as for a runtime that the node does not offer."""
        folder, name = located(image)
        digests = self.images.get(runtime, {}).get(folder)
        return None if digests is None else has_image(digests, name)

    def would_pull(self, needs: Needs) -> bool:
        """Whether the node has to pull an image first, as far as it is known."""
        return any(runtime in self.pulls and self.holds(runtime, image) is False for runtime, image in needs.images)

    def _lack_of_image(self, runtime: str, image: str) -> str | None:
        lack, is_here = f"image `{image}` for runtime `{runtime}`", self.holds(runtime, image)
        if runtime not in self.pulls or image.startswith("/") or is_local(image):
            return lack if is_here is False else None
        why = self.not_pulled.get(runtime, {}).get(full_name(image))
        return None if is_here or why is None else f"{lack}: {why}"

    def _lack_of_gpus(self, runtime: str, wanted: int) -> str:
        had = self.gpus.get(runtime)
        if had is None:
            return f"GPUs: runtime `{runtime}` gives none; docker and podman do"
        remedy = "" if had else ": its operator names them in GANGLINE_GPUS"
        return f"GPUs: {wanted} are asked for, and it has {had} for runtime `{runtime}`{remedy}"

    def _lack(self, runtime: str) -> str:
        return f"runtime `{runtime}`: {self.missing.get(runtime, 'the node does not have this plug-in')}"


def specs_of(task: TaskRequest) -> list[RuntimeSpec]:
    """Returns the specifications of its sandboxes: the agent's first, then the graders' and the environments'."""
    graders = (task.evaluator, *(step.evaluator for step in task.steps))
    others = (*(grader.runtime for grader in graders), *(spec.runtime for spec in task.environments.values()))
    return [task.runtime, *(other for other in others if other is not None)]


def needs_of(task: TaskRequest) -> Needs:
    specs = specs_of(task)
    images = {
        (spec.backend, image)
        for spec in specs
        for image in (spec.image, *(service.image for service in spec.services.values()))
        if image is not None
    }
    gpus = {(name, max(spec.gpus for spec in specs if spec.backend == name)) for name in {one.backend for one in specs}}
    return Needs(
        runtimes=tuple(sorted({spec.backend for spec in specs})),
        labels=tuple(sorted({label for spec in specs for label in spec.node_labels})),
        images=tuple(sorted(images)) if sum(len(image) for _, image in images) <= _MAX_IMAGE_CHARS else (),
        gpus=tuple(sorted((name, number) for name, number in gpus if number)),
        networks=tuple(sorted({spec.network for spec in specs})),
        template_kwargs=tuple(sorted(task.capture.template_kwargs)),
    )


def nearest(needs: Needs, offers: Iterable[tuple[str, Offer]]) -> str | None:
    """Returns why no node can run it, for the node that lacks the least; None if one can, or there are no nodes.

    offers: node id -> offer.
    """
    lacks = [(len(missing := offer.lacks(needs)), node_id, missing) for node_id, offer in offers]
    if not lacks or min(lacks)[0] == 0:
        return None
    _, node_id, missing = min(lacks)
    return f"no node can run it; node {node_id} lacks {'; '.join(missing)}"
