"""The language side of a model, without its weights: tokenizer, chat template, stop strings, replies read from text."""
