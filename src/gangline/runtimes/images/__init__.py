"""Images for runtimes: what goes into one, when an old one will do, and how it is built.

`recipe` says what is asked for, `rendering` writes the definition from the Jinja2 templates in `templates/`, `building`
runs `apptainer build` or `docker build`, and `shelf` records the images that are there. Start with `recipe`.
"""
