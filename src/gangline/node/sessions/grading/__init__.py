"""POSTRUN of one attempt: builds and grades traces, and combines the rewards of several steps. Start with `postrun`."""
