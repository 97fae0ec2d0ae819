"""POSTRUN of one attempt: traces are built and graded, and the rewards of several steps become one. Start with
`postrun`."""
