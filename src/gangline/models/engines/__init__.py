"""Clients of inference engines, for tokens, log-probs, texts and weight updates.

Every engine implements `contract`; `vllm/`, `sglang/`, `text/` and `generate/` are the kinds, and `auto` detects the
kind at a URL. They share `http`, the `fields` of a request, the parsing of `replies`, and `templates/`, which probes a
chat template. Start with `contract`, then `vllm/engine`.
"""
