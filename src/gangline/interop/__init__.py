"""One folder for each partner, with all of its parts: sandboxes, tasks, rewards, routes.

A folder here never imports another wing. Start with `harbor`.
"""
