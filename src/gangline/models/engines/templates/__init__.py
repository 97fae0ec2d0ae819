"""Probes how an engine's chat template renders conversations.

`probe` renders conversations and compares the prompts. `taken_messages` finds the forms of messages that a template
accepts, and `choices` the arguments by which it controls thinking; both use `renderings`. `fitting` adapts messages,
and a call's thinking options, to the template. `tails` finds the ids that follow a sampled turn, and `as_rendered`
checks them against the template's rendering. Start with `probe`.
"""
