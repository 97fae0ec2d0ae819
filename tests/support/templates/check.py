"""Agent programs over one template of each family, as `gangline harness check` runs them: docs/template_checks.json.

`PYTHONPATH=tests python -P -m support.templates.check [FAMILY]...`; `make check-templates` does. The tokenizer is
Qwen3's, with the template's special tokens added.
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

import msgspec
from transformers import PreTrainedTokenizerFast

from gangline.cli.machine.harness_check import CheckPlan, check_harnesses
from support.engines.tokenizers import qwen3_folder
from support.templates.engine import Writer
from support.templates.files import templates

__all__ = ["DATA", "FAMILIES"]

DATA = Path(__file__).parents[3] / "docs" / "template_checks.json"
FAMILIES = {
    "Qwen3.5": "trl/qwen3_5_nothink",
    "Qwen3": "trl/qwen3",
    "Qwen3.6": "trl/qwen3_6",
    "Qwen3.8": "trl/qwen3_8",
    "GLM-4.5": "trl/glm4moe",
    "gpt-oss": "trl/gptoss",
    "Kimi K2": "llama.cpp/moonshotai-Kimi-K2",
    "MiniMax M2": "llama.cpp/MiniMax-M2",
    "Nemotron 3": "trl/nemotron_3_nano",
    "Mistral": "llama.cpp/mistralai-Mistral-Nemo-Instruct-2407",
    "Gemma 4": "trl/gemma4_v5",
    "DeepSeek V3.2": "llama.cpp/deepseek-ai-DeepSeek-V3.2",
}
"""Family -> one of its templates; Mistral's takes ids of nine characters alone."""
_TAG = re.compile(r"</?[a-z_:]+>")
_HARNESSES = ("codex", "claude_code", "gemini_cli", "qwen_code", "opencode", "pi")


def write_tokenizer(template: str, folder: Path) -> None:
    """A folder that `--tokenizer` takes."""
    writer = Writer(template)
    loader: Any = PreTrainedTokenizerFast
    tokenizer = loader.from_pretrained(qwen3_folder(), local_files_only=True)
    tokens = writer.characters.specials
    # Tags that parsers read are tokens, and no special ones.
    tokenizer.add_tokens([one for one in tokens if _TAG.fullmatch(one)])
    tokenizer.add_tokens([one for one in tokens if not _TAG.fullmatch(one)], special_tokens=True)
    tokenizer.chat_template = template
    tokenizer.eos_token = writer.text_end
    tokenizer.save_pretrained(folder)
    ends = tokenizer.convert_tokens_to_ids([writer.text_end, writer.call_end])
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}), encoding="utf-8")


def main(families: list[str]) -> None:
    found: dict[str, Any] = json.loads(DATA.read_text(encoding="utf-8")) if DATA.exists() else {}
    for family in families or FAMILIES:
        with tempfile.TemporaryDirectory() as folder:
            tokenizer = Path(folder) / "tokenizer"
            write_tokenizer(templates()[FAMILIES[family]], tokenizer)
            plan = CheckPlan(
                harnesses=tuple((name, {}) for name in _HARNESSES),
                data_dir=Path(folder) / "data",
                tokenizer=str(tokenizer),
                tier="auto",
                timeout_s=300,
            )
            reports = check_harnesses(plan)
        found[family] = {"template": FAMILIES[family], "harnesses": msgspec.to_builtins(reports)}
        DATA.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        for one in reports:
            print(
                family, one.harness, "ok" if one.ok else "FAILED", one.chains, one.contexts, one.causes, *one.problems
            )
            sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1:])
