"""What an engine's chat template does with a conversation, learned by asking.

`probe` has conversations rendered and compares the prompts; `taken_messages` finds which forms of messages a template
takes, `choices` what it lets its caller choose of thinking; they ask through `renderings`. `fitting` brings messages,
and a call's wishes, to the template. `tails` finds the ids that follow a sampled turn, and `as_rendered` whether those
are what the template writes. Start with `probe`.
"""
