"""Rows against the log of an engine that shares no code with ours, over generated conversations of four SDKs."""

from __future__ import annotations

import ast
import random
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gangline.domain.completion import Completion, CompletionTree
from gangline.rows.builders.per_request import PerRequestBuilder
from gangline.rows.builders.prefix_merging import PrefixMergingBuilder, PrefixMergingConfig
from gangline.rows.builders.tree import TreeBuilder
from gangline.rows.shared_prefixes import with_whole_prompts
from support.engines import second_opinion
from support.engines.picture_talks import DIALECTS
from support.engines.second_opinion import LoggedCall, Row, SecondOpinion, disagreements, serving
from support.node.proxy import proxied_engine

# The SDK derives its client session from aiohttp's, which aiohttp discourages.
pytestmark = pytest.mark.filterwarnings("ignore:Inheritance class AiohttpClientSession:DeprecationWarning")

NUM_CONVERSATIONS = 40

_SAID = ("Go on.", "What of <|end|> here?", "café 日本", "the fishing\n\nline ", "<think>no</think>")


async def _converse(dialect: str, chance: random.Random) -> tuple[list[Completion], list[LoggedCall]]:
    """A conversation of two to five calls, and what the engine logged of it."""
    engine = SecondOpinion(chance, takes_prompt_ids=chance.random() < 0.7)
    thinking = chance.choice(("retain", "follow_template"))
    async with serving(engine) as url, proxied_engine(url, thinking=thinking) as running:
        await running.engine.capabilities()
        engine.log.clear()  # the probe's calls
        engine.odd_prompts.clear()
        talk = DIALECTS[dialect](running.url, running.session.session_id, running.session.key)
        try:
            for _ in range(chance.randint(2, 5)):
                await talk.step(chance.choice(_SAID), ())
        finally:
            await talk.close()
        assert engine.odd_prompts == []
        return running.journal.completions, engine.log


def _rows(builder: Any, completions: Sequence[Completion]) -> list[Row]:
    built = builder.build(CompletionTree(completions), session_id="s1", task_id="t1")
    traces = with_whole_prompts(built.traces)
    return [
        Row(
            np.concatenate([trace.prompt_ids, trace.response_ids]).tolist(),
            [0] * len(trace.prompt_ids) + [int(one) for one in trace.loss_mask],
            [0.0] * len(trace.prompt_ids) + trace.response_logprobs.tolist(),
        )
        for trace in traces
    ]


@pytest.mark.parametrize("dialect", sorted(DIALECTS))
async def test_every_trained_token_is_a_logged_sample_in_its_logged_context_once(dialect: str) -> None:
    seen: Counter[str] = Counter()
    num_spliced_wrongly = 0
    for seed in range(NUM_CONVERSATIONS):
        completions, log = await _converse(dialect, random.Random(f"{dialect} {seed}"))
        for builder in (PrefixMergingBuilder(), PerRequestBuilder(), TreeBuilder()):
            assert disagreements(_rows(builder, completions), log) == [], seed
        spliced = _rows(PrefixMergingBuilder(PrefixMergingConfig(on_divergence="splice")), completions)
        num_spliced_wrongly += bool(disagreements(spliced, log))
        seen.update(completion.certificate.prompt_source for completion in completions)
        seen.update(completion.certificate.context for completion in completions)
        seen.update(str(completion.certificate.cause) for completion in completions)
        seen.update(completion.certificate.finish_reason for completion in completions)
    # The conversations did reach it all, and the comparison does notice rows that were spliced.
    assert all(seen[one] for one in ("stitched", "diverged", "length", "thinking_dropped")), seen
    assert num_spliced_wrongly > 0


_LOG = [LoggedCall([1, 2], [3, 4], [-0.5, -0.1]), LoggedCall([1, 2, 3, 4, 5], [6], [-0.3])]
_GOOD = Row([1, 2, 3, 4, 5, 6], [0, 0, 1, 1, 0, 1], [0.0, 0.0, -0.5, -0.1, 0.0, -0.3])


def test_the_comparison_takes_rows_that_are_the_log() -> None:
    assert disagreements([_GOOD], _LOG) == []
    assert disagreements([_GOOD._replace(mask=[0, 0, 1, 1, 0, 0]), _GOOD._replace(mask=[0] * 5 + [1])], _LOG) == []


@pytest.mark.parametrize(
    "rows",
    [
        [],
        [_GOOD, _GOOD],
        [_GOOD._replace(ids=[1, 9, 3, 4, 5, 6])],
        [_GOOD._replace(ids=[1, 2, 3, 9, 5, 6])],
        [_GOOD._replace(mask=[0, 0, 1, 0, 0, 1])],
        [_GOOD._replace(mask=[0, 0, 1, 1, 1, 1])],
        [_GOOD._replace(mask=[0, 0, 1, 1, 0, 0])],
        [_GOOD._replace(logprobs=[0.0, 0.0, -0.1, -0.5, 0.0, -0.3])],
    ],
    ids=["none", "twice", "context", "sample", "cut", "trained context", "missing", "shifted log-probs"],
)
def test_the_comparison_finds_every_kind_of_wrong_row(rows: list[Row]) -> None:
    assert disagreements(rows, _LOG) != []


def test_the_second_opinion_shares_no_code_with_the_first() -> None:
    tree = ast.parse(Path(second_opinion.__file__).read_text())
    imported = {name.name for node in ast.walk(tree) if isinstance(node, ast.Import) for name in node.names}
    imported |= {str(node.module) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert not [name for name in imported if name.split(".")[0] in ("gangline", "support")]
