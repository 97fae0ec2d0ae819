"""Images for runtimes: what goes into one, when an old one will do, and how it is built.

recipe.py      what is asked for, and what decides whether an image that is there will do
rendering.py   recipe -> definition (Apptainer) or Dockerfile, by Jinja2 templates in templates/
shelf.py       the images that are there, as records beside them
building.py    runs `apptainer build` or `docker build`
"""
