"""Inference engines as a node asks them: for tokens, log-probs and texts, and for new weights.

Every engine implements `contract`; `vllm/`, `sglang/`, `text/` and `generate/` are the kinds that there are, and `auto`
finds out which one a URL is. They share `http`, the `fields` of a request, the reading of `replies`, and `templates/`,
which learns a chat template by asking. Start with `contract`, then `vllm/engine`.
"""
