"""Images for runtimes: their content, when one is reused, and how they are built.

`recipe` describes the request, `building` writes the definition from the Jinja2 templates in `templates/` and runs
`apptainer build` or `docker build`, and `shelf` records the existing images. Start with `recipe`.
"""
