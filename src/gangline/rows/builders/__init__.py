"""The builders turn a session's calls into traces.

`per_request`, `prefix_merging`, `message_prefix` and `tree` are the strategies, and `splicing` joins turns by the
published rule. Start with `prefix_merging`.
"""
