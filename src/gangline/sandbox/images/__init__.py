"""Images for runtimes: how they arrive, and how they are built.

`supply` brings the images of sessions, `pulling` them through an engine, or `unpacked` for the sandbox, and `cache`
removes those that take too much room. Of images that are built here, `recipe` describes the request, `building` writes
the definition from the Jinja2 templates in `templates/` and runs `apptainer build` or `docker build`, and `shelf`
records them. Start with `supply`, or with `recipe`.
"""
