"""Tokenizers, chat templates and parsers (`language/`), and the inference engines that a node asks (`engines/`).

Start with `engines.contract`.
"""
