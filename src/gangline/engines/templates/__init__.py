"""What an engine's chat template does with a conversation, learned by asking.

`probe` has conversations rendered and compares the prompts; `taken_messages` finds which forms of messages a template
takes; both ask through `renderings`. Start with `probe`.
"""
