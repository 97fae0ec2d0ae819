"""Tokenizers, chat templates and reply parsers of models, without their weights.

`tokenizer` has tokenizers with their chat templates, `messages` prepares messages for templates, `text` converts ids to
text with stop strings, and `models` finds models by name; `parsing/` extracts thoughts and tool calls from text. Start
with `contract`, then `tokenizer`.
"""
