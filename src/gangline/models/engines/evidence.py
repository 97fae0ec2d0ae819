"""Evidence in the messages of one engine: the fields of each kind that it may report."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple, TypeVar, cast

import msgspec

from gangline.domain.errors import EngineError
from gangline.domain.evidence.contract import AskedEvidence, EvidenceKind, EvidenceWire
from gangline.settings.evidence import evidence_kinds

ChoiceT = TypeVar("ChoiceT", bound=msgspec.Struct)


class Found(NamedTuple):
    """Evidence of a choice."""

    values: dict[str, Any]
    """By the name of its kind."""
    logprobs: list[float] | None = None
    """[T]: they stand in the place of the reply's own."""


class WireEvidence:
    """The evidence fields of one engine. Each engine has a separate instance, which keeps the results of its probe."""

    def __init__(self, engine: str, options: Mapping[str, Any] | None = None) -> None:
        """engine: see `EngineCapabilities`. options: of this engine, which a kind may need."""
        found = ((kind, kind.wire(engine, options or {})) for kind in evidence_kinds())
        self._wires: dict[str, tuple[EvidenceKind, EvidenceWire]] = {
            kind.name: (kind, wire) for kind, wire in found if wire is not None
        }

    def fields(self, asked: Iterable[AskedEvidence]) -> dict[str, Any]:
        """Request fields that ask for this evidence."""
        return {name: value for kind, start in asked for name, value in self._wires[kind.name][1].ask(start).items()}

    def extended(self, choice: type[ChoiceT]) -> type[ChoiceT]:
        """The type of a choice, extended by the evidence fields."""
        return _extended(choice, tuple(type(wire) for _, wire in self._wires.values()))

    def read(self, choice: Any) -> Found:
        """choice: of an `extended` type. Raises: ValueError."""
        values: dict[str, Any] = {}
        logprobs: list[float] | None = None
        for name, (kind, wire) in self._wires.items():
            try:
                reported = wire.read(choice)
            except (ValueError, msgspec.ValidationError) as error:
                raise ValueError(f"odd {kind.title}: {error}") from error
            if reported is not None:
                values[name] = reported.value
                logprobs = logprobs if reported.logprobs is None else reported.logprobs
        return Found(values, logprobs)

    # -- the probe -----------------------------------------------------------------------------------------------

    def asked_at_once(self) -> tuple[AskedEvidence, ...]:
        """Evidence to request in the first call of a probe."""
        return tuple(AskedEvidence(kind, 0) for kind, wire in self._wires.values() if wire.probe == "asked")

    def learn(self, choice: Any, num_tokens: int) -> None:
        """See `EvidenceWire.learn`. Raises: ValueError."""
        for _, wire in self._wires.values():
            wire.learn(choice, num_tokens)

    async def reported(
        self, found: Collection[str], ask: Callable[[AskedEvidence], Awaitable[Sequence[Collection[str]]]]
    ) -> frozenset[str]:
        """Names of the kinds that the engine reports.

        found: names in the reply to the first call. ask: makes a call for one kind, returns the names in each choice.
        """
        names = set(found)
        for name, (kind, wire) in self._wires.items():
            if wire.probe == "apart" and name not in names:
                try:
                    choices = await ask(AskedEvidence(kind, 0))
                except (EngineError, msgspec.ValidationError, ValueError):
                    continue
                names.update({name} if choices and all(name in choice for choice in choices) else ())
        return frozenset(names)


@cache
def _extended(choice: type[ChoiceT], wires: tuple[type[EvidenceWire], ...]) -> type[ChoiceT]:
    fields = {field[0]: field for wire in wires for field in wire.fields if field[0] not in choice.__struct_fields__}
    return cast("type[ChoiceT]", msgspec.defstruct(choice.__name__, list(fields.values()), bases=(choice,), gc=False))
