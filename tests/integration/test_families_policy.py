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

from gangline.domain.session import SessionResult
from gangline.models.language.models import resolve_tokenizer
from gangline.models.language.tokenizer import load_tokenizer
from gangline.node.sessions.attempt import Attempt
from gangline.serving.scripted.server import scripted_server
from gangline.train.run.evaluation import require_disjoint
from gangline.train.run.experiment import read_experiment
from support.node.attempt import lease_of, node_parts

EXAMPLE = Path(__file__).parents[2] / "examples" / "families"
# Modules of examples have names that others have too: they are imported in a process of their own.
MADE = """
import json, random, sys
from policy import Form, make_tokenizer
from transcripts import transcript
from transformers import AutoTokenizer
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1]) if sys.argv[1] else make_tokenizer()
form, draw = Form(tokenizer), random.Random(7)
for _ in range(200):
    made = transcript(draw, 1.0)
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


def test_an_author_who_knows_the_work_does_what_is_asked() -> None:
    verbs = {"List": "ls", "Read": "cat", "Find": "grep -l", "Count": "wc", "Sort": "cut", "Set": "sed", "Rename": "mv"}
    verbs |= {"Replace": "sed", "Run": "sh", "Show": "grep ERROR"}
    for one in made():
        _, (_, instruction), *turns = one["made"]
        *sentences, question = [re.sub(r"\A\d ", "", line) for line in instruction.splitlines()]
        *commands, given = [_said(text) for role, text in turns if role == "assistant"]
        shown = [text for role, text in turns if role == "user"]
        notes = [text.split("\n")[0] for role, text in turns if role == "assistant"]
        assert notes == [f"step {turn}" for turn in range(1, len(notes) + 1)]
        assert len(sentences) == len(commands) == len(shown) >= 2
        for sentence, command in zip(sentences, commands, strict=True):
            assert command.startswith(verbs[sentence.split(" ")[0]])
            for named in re.findall(r"\b[a-z]+\.[a-z]+(?=[ .])", sentence):
                assert named in command, (sentence, command)
        (turn,) = re.findall(r"in output (\d)\?", question)
        answer = given.removeprefix("answer ").removeprefix("echo ANSWER ").removeprefix("Final: ")
        assert answer in re.split(r"[\s=]+", shown[int(turn) - 1]), "the answer is in that output"


def test_careless_authors_err_in_every_way_and_seldom_note_their_step() -> None:
    program = """
import json, random
from transcripts import transcript
draw = random.Random(3)
print(json.dumps([transcript(draw, 0.0) for _ in range(300)]))
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=EXAMPLE, capture_output=True, check=True)
    sessions = json.loads(done.stdout)
    early = [one for one in sessions if len(one) // 2 <= len(one[1][1].splitlines()) - 1]
    mistaken = [one for one in sessions if any("No such file" in text for role, text in one if role == "user")]
    replies = [text for one in sessions for role, text in one if role == "assistant"]
    noted = [text for text in replies if text.startswith("step ")]
    assert 100 < len(early) < 280
    assert 20 < len(mistaken) < 150
    assert 0 < len(noted) < 0.1 * len(replies)
    assert len(noted) + sum(text.startswith("next\n") for text in replies) == len(replies)


def _said(text: str) -> str:
    return re.sub(r"\A(step \d\n)?(```bash\n|Action: )?|\n```\Z", "", text)


def test_a_taught_policy_is_a_folder_that_transformers_loads(tmp_path: Path) -> None:
    """It takes a step of each kind; what it learns is another matter."""
    program = [sys.executable, str(EXAMPLE / "policy.py"), str(tmp_path / "policy")]
    subprocess.run([*program, "--steps", "20", "--batch", "2"], check=True, timeout=240)
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


TAUGHT = """
import json, sys
from policy import Form, make_tokenizer
tokenizer = make_tokenizer()
tokenizer.save_pretrained(sys.argv[1])
for turns in json.loads(sys.argv[2]):
    print(json.dumps(Form(tokenizer).ids([tuple(turn) for turn in turns])))
"""
"""Saves the tokenizer in a folder; prints ids, and which of them are learnt."""


def tasks(*options: str) -> list[dict[str, Any]]:
    done = subprocess.run([sys.executable, "tasks.py", *options], cwd=EXAMPLE, capture_output=True, check=True)
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.parametrize("style", ["plain", "fenced", "react"])
async def test_a_session_is_rendered_as_the_policy_was_taught(tmp_path: Path, style: str) -> None:
    """The agent program in a session: every token that its model reads is one that transcripts have there."""
    (task,) = tasks("--families", "read", "--tasks", "1", "--style", style, "--runtime", "process")
    files = {one["path"]: one["content"] for one in task["runtime"]["prepare"]}
    first = task["instruction"].split("\n")[0].split(" ")[-1].removesuffix(".")
    last = files[first].strip()
    replies = (f"cat {first}", f"cat {last}", f"answer {files[last].strip()}")
    said = [f"step {turn}\n{_in_style(style, text)}" for turn, text in enumerate(replies, 1)]
    shown = [_shown(style, turn, files[name].strip()) for turn, name in ((1, first), (2, last))]
    rules = (
        "Reply with one command, or with: answer X",
        "Reply with one block:\n```bash\nCOMMAND\n```\nTo end: echo ANSWER X",
        "Reply with: Action: COMMAND\nTo end: Final: X",
    )[("plain", "fenced", "react").index(style)]
    turns = [
        *[("system", rules), ("user", task["instruction"])],
        *[("assistant", said[0]), ("user", shown[0]), ("assistant", said[1]), ("user", shown[1])],
        ("assistant", said[2]),
    ]
    program = [sys.executable, "-c", TAUGHT, str(tmp_path / "tokenizer"), json.dumps([turns])]
    done = subprocess.run(program, cwd=EXAMPLE, capture_output=True, check=True)
    taught, learnt = json.loads(done.stdout)
    patterns = (r"\?$", r"turn 2$", r"turn 3$")
    script = {"rules": [{"pattern": one, "text": text} for one, text in zip(patterns, said, strict=True)]}
    result: SessionResult
    async with (
        scripted_server(script, load_tokenizer(tmp_path / "tokenizer")) as url,
        node_parts(tmp_path, engine_url=url) as parts,
    ):
        result = await Attempt(lease_of(**task), parts).live()
    assert (result.outcome, result.reward) == ("completed", 1.0), result.failure
    assert result.trajectory is not None
    (trace,) = result.trajectory.traces
    assert [*trace.prompt_ids, *trace.response_ids] == taught
    assert [*[0] * len(trace.prompt_ids), *trace.loss_mask] == learnt


def _in_style(style: str, text: str) -> str:
    if style == "fenced":
        return f"```bash\n{text.replace('answer', 'echo ANSWER')}\n```"
    if style == "react":
        return f"Final: {text.removeprefix('answer ')}" if text.startswith("answer ") else f"Action: {text}"
    return text


def _shown(style: str, turn: int, output: str) -> str:
    form = {"plain": "{}", "fenced": "<shell>\n{}\n</shell>", "react": "Observation: {}"}[style]
    return f"{form.format(f'output {turn}: {output}')}\nturn {turn + 1}"


def test_the_experiments_train_on_none_of_their_held_out_tasks(tmp_path: Path) -> None:
    """As the README says to make them."""
    trained = tasks("--families", "read,count,edit,rename,fix", "--tasks", "400")
    held_out = tasks("--families", "find,sort,log", "--tasks", "24", "--first", "90000")
    for name in ("imitation", "experiment"):
        (tmp_path / f"{name}.yaml").write_text((EXAMPLE / f"{name}.yaml").read_text())
        experiment = read_experiment(tmp_path / f"{name}.yaml")
        assert (experiment.control, experiment.data.seeded) == ("none", True)
    require_disjoint(trained, held_out)
    assert not {task["metadata"]["family"] for task in trained} & {task["metadata"]["family"] for task in held_out}
