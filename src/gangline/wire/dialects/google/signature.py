"""`thoughtSignature`: the opaque field of a part that clients echo. Ours identifies the record of the part."""

from __future__ import annotations

import base64
import binascii

# Sent by Gemini CLI and others if they have lost, or never had, a signature.
_SKIP = "skip_thought_signature_validator"
_MADE_BY_CLIENTS = frozenset({_SKIP, base64.b64encode(_SKIP.encode()).decode(), "context_engineering_is_the_way_to_go"})

_URL_SAFE = str.maketrans("-_", "+/")


def reply_signature(reply_id: str) -> str:
    return base64.b64encode(f"gangline:{reply_id}".encode()).decode()


def normal_signature(signature: str | None) -> str | None:
    """The signature as it was sent: the Python SDK echoes bytes in the URL-safe alphabet. None: not from a model."""
    if not signature or signature in _MADE_BY_CLIENTS:
        return None
    standard = signature.translate(_URL_SAFE)
    try:
        base64.b64decode(standard, validate=True)
    except (binascii.Error, ValueError):
        return signature
    return standard
