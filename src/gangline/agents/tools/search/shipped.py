"""Search sources included in the package: every node has them, without configuration."""

from __future__ import annotations

from importlib import resources

from gangline.domain.search_source import SearchSource


def shipped_sources() -> dict[str, SearchSource]:
    """Name -> source. `gangline:stem` has the facts for the samples of preset `stem`."""
    folder = resources.files("gangline.agents.tools.search").joinpath("corpora", "stem")
    return {"gangline:stem": SearchSource(kind="local", path=str(folder))}
