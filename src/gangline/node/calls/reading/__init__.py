"""Turns a model call's body into a canonical call: here, or in a separate process if it is large. Start with `body`."""
