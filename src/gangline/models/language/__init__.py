"""The language side of a model, without its weights.

`tokenizer` has tokenizers with their chat templates, `messages` what templates read, `text` the way from ids to text
with its stop strings, and `models` the models by name; `parsing/` reads thoughts and tool calls out of text. Start with
`contract`, then `tokenizer`.
"""
