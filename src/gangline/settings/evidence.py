"""The kinds of evidence alongside sampled tokens: the built-in ones, and those of plug-ins."""

from __future__ import annotations

import logging

from gangline.domain.errors import InvalidRequest
from gangline.domain.evidence.contract import EvidenceKind
from gangline.domain.evidence.experts import EXPERTS
from gangline.domain.evidence.masks import MASKS
from gangline.domain.task import CaptureSpec
from gangline.settings import plugins

log = logging.getLogger("gangline.settings.plugins")

BUILT_IN: tuple[EvidenceKind, ...] = (EXPERTS, MASKS)


def evidence_kinds() -> list[EvidenceKind]:
    """All but those of plug-ins that are refused."""
    kinds = list(BUILT_IN)
    for name in plugins.usable("evidence"):
        try:
            kinds.append(plugins.make_evidence(name))
        except InvalidRequest as error:
            log.warning("plugin.refused message=%s", error.message)
    return kinds


def asked_kinds(capture: CaptureSpec) -> tuple[EvidenceKind, ...]:
    """Those that a task asks for. Raises: UnknownPlugin, InvalidRequest when one is refused."""
    own = [kind for kind in BUILT_IN if kind.asked_by(capture)]
    return (*own, *(plugins.make_evidence(name) for name in capture.evidence))
