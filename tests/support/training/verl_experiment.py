"""A whole experiment for verl on this machine's CPU: a random model, tasks, and the file."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]

AGENT = """
import json, os, sys, urllib.request

def ask(messages):
    fields = {"model": "policy", "messages": messages, "max_tokens": 12}
    headers = {"Content-Type": "application/json", "Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
    url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
    reply = urllib.request.urlopen(urllib.request.Request(url, json.dumps(fields).encode(), headers))
    return json.load(reply)["choices"][0]["message"]["content"] or ""

first = ask([{"role": "user", "content": sys.argv[1]}])
print(first + ask([{"role": "user", "content": "Another conversation: " + sys.argv[1]}]))
"""
"""Two conversations, so that a session has two traces."""

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write_model(folder: Path) -> Path:
    """A Llama of two layers with random weights, and a tokenizer with a chat template."""
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

    from gangline.serving.scripted.tiny_tokenizer import TinyTokenizer

    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=TinyTokenizer()._core,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=CHAT_TEMPLATE,
    )
    tokenizer.save_pretrained(folder)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def tasks(first: int, number: int) -> list[dict[str, Any]]:
    """The reward is the share of some letters that the agent printed."""
    checks = [{"kind": "regex", "value": letter} for letter in "aeiotnsr"]
    return [
        {
            "instruction": f"say {first + index}",
            "timeout_seconds": 120,
            "runtime": {"backend": "process", "prepare": [{"type": "write", "path": "agent.py", "content": AGENT}]},
            "agent": {"harness": "shell", "settings": {"command": ["python3", "agent.py", "{instruction}"]}},
            "evaluator": {"strategy": "test_on_output", "config": {"source": "stdout", "checks": checks}},
        }
        for index in range(number)
    ]


SETTINGS: Mapping[str, Any] = {
    "trainer.device": "cpu",
    "trainer.nnodes": 1,
    "trainer.resume_mode": "disable",
    "ray_kwargs.ray_init.num_cpus": 8,
    "+ray_kwargs.ray_init.include_dashboard": False,
    "+ray_kwargs.ray_init.object_store_memory": 100_000_000,
    "data.train_batch_size": 4,
    "data.max_prompt_length": 128,
    "data.max_response_length": 128,
    "data.dataloader_num_workers": 0,
    "actor_rollout_ref.model.use_remove_padding": False,
    "+actor_rollout_ref.model.override_config.attn_implementation": "sdpa",
    "actor_rollout_ref.model.enable_gradient_checkpointing": False,
    "actor_rollout_ref.actor.strategy": "fsdp2",
    "actor_rollout_ref.actor.fsdp_config.strategy": "fsdp2",
    "actor_rollout_ref.actor.ppo_mini_batch_size": 4,
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": 4,
    "actor_rollout_ref.actor.optim.lr": 1e-3,
    "actor_rollout_ref.actor.use_torch_compile": False,
    "actor_rollout_ref.actor.fsdp_config.use_torch_compile": False,
    "+actor_rollout_ref.actor.fsdp_config.mixed_precision": {
        "param_dtype": "fp32",
        "reduce_dtype": "fp32",
        "buffer_dtype": "fp32",
    },
    "actor_rollout_ref.rollout.name": "embedded",
    "actor_rollout_ref.rollout.tensor_model_parallel_size": 1,
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu": 4,
    "actor_rollout_ref.rollout.max_model_len": 512,
    "reward.num_workers": 1,
    "transfer_queue.backend.SimpleStorage.num_data_storage_units": 1,
}


def write_experiment(folder: Path, *, mode: str, num_workers: int, num_steps: int, **settings: Any) -> Path:
    """The file, with all that it names alongside it."""
    from support.training.verl_on_cpu import ENVIRONMENT

    for name, chosen in (("tasks.jsonl", tasks(0, 8)), ("held_out.jsonl", tasks(8, 2))):
        (folder / name).write_text("".join(json.dumps(task) + "\n" for task in chosen))
    document = {
        "trainer": "verl",
        "name": "tiny",
        "model": str(write_model(folder / "model")),
        "python": sys.executable,
        "environment": {
            **ENVIRONMENT,
            "PYTHONPATH": str(ROOT / "tests"),
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
            "RAY_USAGE_STATS_ENABLED": "0",
        },
        "data": {"tasks": "tasks.jsonl", "num_samples": 4},
        "evaluation": {"tasks": "held_out.jsonl"},
        "service": {"server": {"port": 0}},
        "settings": {
            **SETTINGS,
            "trainer.n_gpus_per_node": num_workers,
            "+ray_kwargs.ray_init.num_gpus": num_workers,
            "trainer.total_training_steps": num_steps,
            "trainer.v1.trainer_mode": mode,
            **settings,
        },
    }
    path = folder / "experiment.yaml"
    path.write_text(json.dumps(document))  # JSON is YAML
    return path
