"""The dataset card: metadata for the hub and `datasets`, and a description for people."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec

from gangline.machine.durable import write_whole
from gangline.tasks.datasets.build import MANIFEST, Dataset
from gangline.tasks.datasets.kinds import Kind

_MEANING: dict[Kind, str] = {
    Kind.messages: "the main conversation of each accepted session, as OpenAI's `messages` and `tools`",
    Kind.tokens: "token ids of accepted sessions as the engine saw and sampled them, with the mask of sampled tokens "
    "(`assistant_masks`), their log-probs and policy versions",
    Kind.preferences: "an accepted and a rejected answer to the same problem: `prompt`, `chosen`, `rejected`",
    Kind.verdicts: "accepted and rejected conversations with the grader's verdict and details, for verifiers",
    Kind.atif: "each accepted session as a document of the Agent Trajectory Interchange Format",
}


def write_card(made: Dataset, folder: Path, *, license_name: str | None = None) -> Path:
    """Write `README.md`. Returns its path."""
    path = folder / "README.md"
    lines = [*_header(made, license_name), *_text(made)]
    write_whole(path, ("\n".join(lines) + "\n").encode())
    path.chmod(0o644)
    return path


def _header(made: Dataset, license_name: str | None) -> Iterator[str]:
    """JSON is valid YAML, and quotes all text that YAML would misread."""
    yield "---"
    if license_name is not None:
        yield f"license: {_quoted(license_name)}"
    yield f"pretty_name: {_quoted(made.name)}"
    yield 'tags: ["agent", "trajectories", "gangline"]'
    yield "configs:"
    for number, kind in enumerate(_kinds(made)):
        yield f"- config_name: {kind}"
        if number == 0:
            yield "  default: true"
        yield "  data_files:"
        for file in made.files:
            if file.kind == kind:
                yield f"  - split: {file.split}"
                yield f"    path: {file.path}"
    yield "---"


def _kinds(made: Dataset) -> list[Kind]:
    return list(dict.fromkeys(file.kind for file in made.files))


def _text(made: Dataset) -> Iterator[str]:
    yield from ("", f"# {made.name}", "")
    yield f"Made with Gangline {made.provenance.gangline} from {made.provenance.num_sessions} recorded sessions of "
    yield f"{made.provenance.num_tasks} tasks. Every row names its `task_id`, `session_id` and last `completion_id`."
    yield from ("", "| configuration | split | rows | content |", "|---|---|---|---|")
    for file in made.files:
        yield f"| `{file.kind}` | {file.split} | {file.num_rows} | {_MEANING[file.kind]} |"
    yield from ("", f"## Acceptance by `{made.by}`", "")
    yield from strata_lines(made)
    if made.reasons:
        yield from ("", "## Sessions that were not accepted", "", "| reason | sessions |", "|---|---|")
        yield from (f"| {_cell(why)} | {number} |" for why, number in made.reasons.items())
    yield from _provenance(made)


def strata_lines(made: Dataset) -> Iterator[str]:
    """The table by repository, as Markdown."""
    yield f"| {made.by} | instances | attempts | accepted | rate |"
    yield "|---|---|---|---|---|"
    for one in made.strata:
        yield (
            f"| {_cell(one.name)} | {one.num_instances} | {one.num_attempts} | {one.num_accepted} | {one.rate:.1%} |"
        )
    attempts, accepted = (sum(getattr(one, name) for one in made.strata) for name in ("num_attempts", "num_accepted"))
    instances = sum(one.num_instances for one in made.strata)
    yield f"| Total | {instances} | {attempts} | {accepted} | {accepted / attempts:.1%} |"


def _provenance(made: Dataset) -> Iterator[str]:
    found = made.provenance
    yield from ("", "## Provenance", "", "| | |", "|---|---|")
    yield f"| tasks | SHA-256 `{found.tasks_digest}` |"
    yield f"| selection | `{_cell(_quoted(found.selection))}` (`{found.selection_digest}`) |"
    names = {
        "agent programs": found.harnesses,
        "settings of agents": found.agents,
        "evaluators": found.evaluators,
        "engines": found.engines,
        "models": found.models,
        "tokenizers": found.tokenizers,
        "chat templates": found.templates,
        "policy versions": found.policy_versions,
    }
    for name, counts in names.items():
        if counts:
            yield f"| {name} | {_cell(_counted(counts))} |"
    yield from ("", f"`{MANIFEST}` has the same for programs, with the SHA-256 of each file.")


def _counted(counts: Mapping[str, int]) -> str:
    return ", ".join(f"`{value}` ({number} sessions)" for value, number in counts.items())


def _quoted(value: object) -> str:
    return msgspec.json.encode(value).decode()


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
