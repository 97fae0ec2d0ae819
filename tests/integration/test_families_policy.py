"""The policy of the families: transcripts that are right where their author knows the work; a model taught on them."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from gangline.language.models import resolve_tokenizer

EXAMPLE = Path(__file__).parents[2] / "examples" / "families"
# Modules of examples have names that others have too: they are imported in a process of their own.
MADE = """
import json, random, sys
from policy import Form, make_tokenizer
from transcripts import drill, transcript
from transformers import AutoTokenizer
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1]) if sys.argv[1] else make_tokenizer()
form, draw = Form(tokenizer), random.Random(7)
for number in range(200):
    made = transcript(draw, 1.0) if number % 4 else drill(draw)
    ids, learnt = form.ids(made)
    messages = [{"role": role, "content": text} for role, text in made]
    rendered = tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False)
    said = tokenizer.decode([one for one, is_learnt in zip(ids, learnt) if is_learnt])
    print(json.dumps({"made": made, "ids": ids, "said": said, "end": tokenizer.eos_token, "rendered": rendered}))
"""


@cache
def made(tokenizer: str = "") -> list[dict[str, Any]]:
    done = subprocess.run([sys.executable, "-c", MADE, tokenizer], cwd=EXAMPLE, capture_output=True, check=True)
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.parametrize("model", ["", "smollm2"])
def test_what_is_taught_is_what_the_models_template_renders(model: str) -> None:
    for one in made(str(resolve_tokenizer(model)) if model else ""):
        assert one["ids"] == one["rendered"]
        replies = [f"{text}{one['end']}" for role, text in one["made"] if role == "assistant"]
        assert one["said"].replace("<|im_end|>\n", "<|im_end|>") == "".join(replies), "replies are learnt, nothing else"


def test_an_author_who_knows_the_work_follows_the_manual() -> None:
    for one in made():
        (_, manual), *turns = one["made"]
        lines = dict(line.split(": ", 1) for line in manual.splitlines() if re.match(r"[a-z]+ [a-z]+: ", line))
        commands = {key.split()[0]: _pattern(command) for key, command in lines.items()}
        said = [_said(text) for role, text in turns if role == "assistant"]
        asked = [re.sub(r"\A\d ", "", line) for role, text in turns if role == "user" for line in text.splitlines()]
        verbs = [verb for line in asked if (verb := line.split(" ")[0].lower()) in commands and line.endswith(".")]
        assert len(verbs) >= 2
        for verb, command in zip(verbs, said, strict=False):
            assert re.fullmatch(commands[verb], command), (verb, command)
        if len(said) > len(verbs):
            (given,) = re.findall(r"(?:answer|echo ANSWER|Final:) (.*)", said[-1])
            assert given in re.split(r"[\s=]+", turns[-2][1]), "the answer is in the last output"


def test_no_verb_of_the_families_has_its_program_in_a_made_up_manual() -> None:
    real = {"grep": "find", "wc": "count", "cut": "sort", "sed": "set", "mv": "rename", "sh": "run"}
    seen: set[str] = set()
    for one in made():
        for line in one["made"][0][1].splitlines():
            if found := re.match(r"([a-z]+) [a-z]+: (\S+)", line):
                seen.add(found[2])
                assert real.get(found[2]) != found[1], line
    assert seen >= set(real), "the programs themselves do occur"


def _pattern(command: str) -> str:
    return re.sub("FILE|WORD|KEY|VALUE|OLD|NEW", r"\\S+", re.escape(command))


def _said(text: str) -> str:
    return re.sub(r"\A(```bash\n|Action: )|\n```\Z", "", text)


def test_a_taught_policy_is_a_folder_that_transformers_loads(tmp_path: Path) -> None:
    """It takes a step of each kind; what it learns is another matter."""
    program = [sys.executable, str(EXAMPLE / "policy.py"), str(tmp_path / "policy")]
    subprocess.run([*program, "--minutes", "0.02", "--batch", "2"], check=True, timeout=240)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "policy")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "policy")
    assert 2e6 < model.num_parameters() < 5e6
    assert model.config.vocab_size == len(tokenizer)
    assert tokenizer.decode(tokenizer.encode("grep -l bear *.txt 42")) == "grep -l bear *.txt 42"


def test_a_fresh_model_continues_what_it_sees_again() -> None:
    """The heads that are written into it do so before any training; chance is one in a thousand."""
    program = """
import random, torch
from policy import make_model, make_tokenizer, repeats
tokenizer = make_tokenizer()
ids, again = next(repeats(len(tokenizer) - 4, random.Random(1), 16))
with torch.no_grad():
    guessed = make_model(tokenizer, 0)(input_ids=ids).logits.argmax(-1)
print(((guessed[:, :-1] == ids[:, 1:])[again[:, 1:].bool()]).float().mean().item())
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=EXAMPLE, capture_output=True, check=True, timeout=240)
    assert float(done.stdout) > 0.8


def test_a_model_of_another_template_is_refused(tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(resolve_tokenizer("smollm2"))
    tokenizer.chat_template = "{% for message in messages %}[{{ message.role }}] {{ message.content }}{% endfor %}"
    tokenizer.save_pretrained(tmp_path)
    done = subprocess.run([sys.executable, "-c", MADE, str(tmp_path)], cwd=EXAMPLE, capture_output=True, check=False)
    assert done.returncode == 1
    assert b"chat template is not ChatML" in done.stderr
