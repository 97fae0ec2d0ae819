"""The laboratory of chat templates: files that packages ship, requests that clients send, and what comes of each pair.

`cells` puts a recording through a template. `record` makes the recordings.
"""
