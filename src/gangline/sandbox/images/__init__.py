"""Images for runtimes: their content, the rules for reusing one, and their construction.

`recipe` describes the request, `rendering` writes the definition from the Jinja2 templates in `templates/`, `building`
runs `apptainer build` or `docker build`, and `shelf` records the existing images. Start with `recipe`.
"""
