"""`gangline image`: images for runtimes, built, listed and removed; `prefetch` is in another module."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gangline.cli.machine.prefetch import prefetch
from gangline.cli.terminal.output import JsonOption, console, notes, print_json
from gangline.domain.errors import InvalidRequest
from gangline.settings.machine import Settings

if TYPE_CHECKING:
    from gangline.sandbox.images.building import ImageBuilder
    from gangline.sandbox.images.recipe import Recipe, Tool
    from gangline.sandbox.images.shelf import ImageRecord

image = typer.Typer(no_args_is_help=True, help="Build, list, remove and prefetch images for runtimes.")


@image.command()
def build(
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="Name of the image; each build has a digest alongside it.")
    ],
    kind: Annotated[str, typer.Option("--kind", help="apptainer or docker.")] = "apptainer",
    base: Annotated[
        str, typer.Option("--from", help="Image to start from: a name in a registry, an image file, a root folder.")
    ] = "docker://debian:bookworm-slim",
    caching: Annotated[
        str,
        typer.Option(
            "--cache",
            help="When to reuse an existing image. scratch: never. versioned: for the same base image and Gangline "
            "version. lock: for the same dependency lock.",
        ),
    ] = "versioned",
    lock: Annotated[Path | None, typer.Option("--lock", help="File of pinned Python requirements to install.")] = None,
    package: Annotated[
        list[str] | None, typer.Option("--package", help="Debian package to install; repeatable.")
    ] = None,
    harness: Annotated[
        list[str] | None,
        typer.Option("--harness", help="Harness whose agent program is installed into the image; repeatable."),
    ] = None,
    definition: Annotated[
        Path | None,
        typer.Option(
            "--definition", help="Your own definition file or Dockerfile; a Jinja2 template if its name ends in .j2."
        ),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the definition and build nothing.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Build an image unless a suitable one exists, and print its value for `runtime.image`.

    Apptainer images go to the cache folder, Docker images to the Docker daemon.
    """
    recipe = _recipe(
        name=name,
        kind=kind,
        base=base,
        caching=caching,
        lock=lock,
        packages=package or (),
        tools=[_tool(one) for one in harness or ()],
        definition=definition,
    )
    builder = _builder()
    if dry_run:
        sys.stdout.write(builder.definition(recipe))
        return
    built = builder.build(recipe)
    if as_json:
        print_json({"is_new": built.is_new, "image": built.record})
        return
    notes().print("Built:" if built.is_new else "It is there already:")
    console().print(built.record.image, soft_wrap=True)


@image.command("list")
def list_(as_json: JsonOption = False) -> None:
    """Show the images built on this machine, newest first."""
    records = _builder().shelf.records()
    if as_json:
        print_json(records)
        return
    from gangline.cli.terminal.tables import Column, FactTable, prose

    table = FactTable(
        *("name", Column("kind", 2), Column("cache", 4), Column("base", 3), prose("harnesses", 5), "MiB#"),
        *(Column("built", 1), "image"),
    )
    for record in records:
        table.add_row(*_row(record))
    console().print(table)


@image.command()
def prune(
    keep: Annotated[int, typer.Option("--keep", min=0, help="Number of images to keep for each name and kind.")] = 1,
    as_json: JsonOption = False,
) -> None:
    """Remove all but the newest images of each name, and the remains of failed builds."""
    removed = _builder().prune(keep)
    if as_json:
        print_json(removed)
        return
    for record in removed:
        console().print(record.image, soft_wrap=True)
    notes().print(f"Removed: {len(removed)}.")


def _builder() -> ImageBuilder:
    from gangline.sandbox.images.building import ImageBuilder
    from gangline.sandbox.images.listing import built_images

    settings = Settings.from_environ()
    return ImageBuilder(built_images(settings), apptainer=settings.apptainer, docker=settings.docker)


def _recipe(**fields: Any) -> Recipe:
    """Raises: InvalidRequest."""
    from pydantic import ValidationError

    from gangline.sandbox.images.recipe import Recipe
    from gangline.settings.plugins import explain

    try:
        return Recipe.model_validate(fields)
    except ValidationError as error:
        raise InvalidRequest(explain(error)) from error


def _tool(harness: str) -> Tool:
    """Raises: UnknownPlugin, InvalidRequest when the harness has no program."""
    from gangline.agents.harnesses.installation import find_program
    from gangline.sandbox.images.recipe import Tool

    program = find_program(harness)
    return Tool(
        harness=harness,
        command=program.command,
        source=program.source,
        requirements=program.requirements(),
        oldest=program.oldest,
    )


def _row(record: ImageRecord) -> tuple[str, ...]:
    from datetime import UTC, datetime

    built = datetime.fromtimestamp(record.built_at, UTC).strftime("%Y-%m-%d %H:%M")
    size_mib = f"{record.size_bytes / (1 << 20):.0f}"
    harnesses = ", ".join(record.harnesses)
    return record.name, record.kind, record.caching, record.base, harnesses, size_mib, built, record.image


def register(app: typer.Typer) -> None:
    image.command()(prefetch)
    app.add_typer(image, name="image")
