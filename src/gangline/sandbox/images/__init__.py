"""Images for runtimes: their content, the rules for reusing one, and their construction.

`recipe` describes the request, `building` writes the definition from the Jinja2 templates in `templates/` and runs
`apptainer build` or `docker build`, and `shelf` records the existing images. Start with `recipe`.
"""
