"""Make the policy of the math example: a Llama of 0.2 million parameters that mostly guesses, and seldom computes.

Its tokenizer is made of bytes and of whole phrases: what every session of the preset `math` begins with, the system
prompt and the tools, is one token, so a session is 40 tokens long. It is taught on conversations in the preset's form:
in about a third of them it calls the tool `python` with the expression and boxes the result, in the others it boxes a
number at random. It can do the right thing, and seldom does: reinforcement has something to strengthen.

    usage: policy.py FOLDER [--seed N]
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import torch
from rows import problem_of, random_expression
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from gangline.agents.harnesses.native.config import NativeConfig
from gangline.agents.harnesses.native.toolbox import offered
from gangline.settings import plugins
from gangline.tasks.presets.preset import find_preset

COMPUTING_SHARE = 0.35
NUM_EXAMPLES, BATCH = 4000, 64
STAGES = ((0.6, 600, 3e-3), (COMPUTING_SHARE, 150, 1e-3))
"""First it is taught to compute, then to do so seldom: share of computed answers, steps, learning rate."""
END = "<|im_end|>"
CALL, CALL_END = '<tool_call>\n{"name": "python", "arguments": {"code": "', '"}}\n</tool_call>'
PHRASES = (
    "What is $",
    "$?",
    "<|im_start|>user\n",
    "<|im_start|>tool\n",
    "<|im_start|>assistant\n",
    "\n[done]",
    "\\boxed{",
)
TEMPLATE = r"""
{%- for message in messages -%}
    {{- '<|im_start|>' + message.role + '\n' + (message.content or '') -}}
    {%- if loop.first and tools -%}
        {{- '\n\n# Tools' -}}
        {%- for tool in tools -%}{{- '\n' + tool | tojson -}}{%- endfor -%}
    {%- endif -%}
    {%- for call in message.tool_calls or [] -%}
        {%- set given = call.function.arguments -%}
        {{- '<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' -}}
        {{- given if given is string else given | tojson -}}
        {{- '}\n</tool_call>' -}}
    {%- endfor -%}
    {{- '<|im_end|>\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}
"""

Turn = dict[str, Any]
Example = tuple[list[int], list[int]]
"""ids, and 1 where the model is to learn the id."""


class Form:
    """How conversations of the preset become ids."""

    def __init__(self) -> None:
        preset = find_preset("math")
        assert preset is not None
        config = NativeConfig(**preset.template["agent"]["settings"])
        self._tools = offered(plugins.make_tool(spec.name, spec.settings) for spec in config.tool_specs)
        self._system = {"role": "system", "content": config.first_message}
        head = self._rendered(_tokenizer(()), [self._system], is_open=False)
        self.tokenizer = _tokenizer((head, CALL, CALL_END, *PHRASES))

    def ids(self, turns: Sequence[Turn], *, is_open: bool) -> list[int]:
        """is_open: the model's turn begins."""
        text = self._rendered(self.tokenizer, [self._system, *turns], is_open=is_open)
        return self.tokenizer.encode(text, add_special_tokens=False)

    def _rendered(self, tokenizer: PreTrainedTokenizerFast, turns: Sequence[Turn], *, is_open: bool) -> str:
        render: Any = cast("Any", tokenizer).apply_chat_template
        return render(list(turns), tools=self._tools, add_generation_prompt=is_open, tokenize=False)


def _tokenizer(phrases: Sequence[str]) -> PreTrainedTokenizerFast:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={letter: index for index, letter in enumerate(letters)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([AddedToken(END, special=True)])
    core.add_tokens([AddedToken(phrase, special=False, normalized=False) for phrase in phrases])
    return PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token=END, chat_template=TEMPLATE, clean_up_tokenization_spaces=False
    )


def conversation(chosen: random.Random, computing_share: float) -> list[Turn]:
    """A problem, and either a computed answer or a guess."""
    expression, result = random_expression(chosen)
    asked = [{"role": "user", "content": problem_of(expression)}]
    if chosen.random() >= computing_share:
        _, guess = random_expression(chosen)
        return [*asked, {"role": "assistant", "content": f"\\boxed{{{guess}}}"}]
    call = {"name": "python", "arguments": json.dumps({"code": expression})}
    return [
        *asked,
        {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": call}]},
        {"role": "tool", "content": f"{result}\n[done]"},
        {"role": "assistant", "content": f"\\boxed{{{result}}}"},
    ]


def example(form: Form, turns: list[Turn]) -> Example:
    """A conversation in which the model learns its own turns, up to their end."""
    ids: list[int] = []
    learn: list[int] = []
    for at, turn in enumerate(turns):
        if turn["role"] == "assistant":
            before = form.ids(turns[:at], is_open=True)
            after = form.ids(turns[: at + 1], is_open=False)[:-1]  # the line break after a turn is the next one's
            assert (before[: len(ids)], after[: len(before)]) == (ids, before), "a turn is rendered alike anywhere"
            learn += [0] * (len(before) - len(ids)) + [1] * (len(after) - len(before))
            ids = after
    return ids, learn


def taught(form: Form, stages: Sequence[tuple[float, int, float]], seed: int) -> LlamaForCausalLM:
    """stages: each with its share of computed answers, its steps and its learning rate."""
    torch.manual_seed(seed)
    chosen = random.Random(seed)
    end = form.tokenizer.convert_tokens_to_ids(END)
    shape = LlamaConfig(
        vocab_size=len(form.tokenizer),
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=3,
        num_attention_heads=4,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=end,
    )
    model = LlamaForCausalLM(shape).train()
    for share, num_steps, rate in stages:
        num_examples = min(NUM_EXAMPLES, BATCH * num_steps)
        examples = [example(form, conversation(chosen, share)) for _ in range(num_examples)]
        optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.0)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, num_steps)
        for step in range(1, num_steps + 1):
            loss = _loss(model, chosen.sample(examples, BATCH))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            if step % 50 == 0 or step == num_steps:
                print(f"step {step} of {num_steps}: loss {loss.item():.3f}", file=sys.stderr, flush=True)
    return model


def _loss(model: LlamaForCausalLM, batch: list[Example]) -> torch.Tensor:
    ids = pad_sequence([torch.tensor(row) for row, _ in batch], batch_first=True)
    learn = pad_sequence([torch.tensor(row) for _, row in batch], batch_first=True).bool()
    logits = model(input_ids=ids).logits[:, :-1]
    return functional.cross_entropy(logits[learn[:, 1:]], ids[:, 1:][learn[:, 1:]])


def write_policy(folder: Path, stages: Sequence[tuple[float, int, float]] = STAGES, seed: int = 0) -> None:
    """Teach it, and write model and tokenizer. The same seed gives the same policy on one machine."""
    form = Form()
    taught(form, stages, seed).save_pretrained(folder)
    form.tokenizer.save_pretrained(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description="Make the small policy of the math example.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=0, metavar="N")
    arguments = parser.parse_args()
    write_policy(arguments.folder, seed=arguments.seed)


if __name__ == "__main__":
    main()
