"""`gangline engine`: runs an engine server on this machine, with a small real model or a script."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from gangline.cli.processes.serving import AllowedHostOption, HostOption, ParentOption, Service, serve
from gangline.cli.terminal.output import JsonOption, LogFormatOption
from gangline.domain.errors import InvalidRequest


def engine(
    model: Annotated[
        str | None,
        typer.Option("--model", help="smollm2, a folder, or a Hugging Face name.", show_default="smollm2"),
    ] = None,
    scripted: Annotated[
        Path | None,
        typer.Option("--scripted", help="Script (JSON or TOML) of replies, instead of a model."),
    ] = None,
    tokenizer: Annotated[
        str, typer.Option("--tokenizer", help="Tokenizer of a scripted engine: smollm2, a folder, or a name.")
    ] = "smollm2",
    host: HostOption = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", help="Port to listen on; 0 picks a free one.")] = 8800,
    allowed_host: AllowedHostOption = None,
    threads: Annotated[int | None, typer.Option("--threads", help="CPU threads for the model.")] = None,
    max_batch: Annotated[int, typer.Option("--max-batch", help="Sequences that decode together.")] = 32,
    max_context: Annotated[
        int | None, typer.Option("--max-context", help="Maximum context in tokens. Default: the model's own.")
    ] = None,
    device: Annotated[str, typer.Option("--device", help="Device of the model, as PyTorch names it.")] = "cpu",
    returns_masks: Annotated[
        bool,
        typer.Option(
            "--return-sampling-mask",
            help="Report on /inference/v1/generate which ids top-k and top-p left to draw from, as vLLM does.",
        ),
    ] = False,
    log_format: LogFormatOption = None,
    as_json: JsonOption = False,
    parent: ParentOption = None,
) -> None:
    """Run an engine server with vLLM's routes and fields: a small real model on the CPU or a GPU, or a script.

    Prints one line of JSON with its URL when it is ready, and serves until SIGTERM.
    """
    if model is not None and scripted is not None:
        raise InvalidRequest("--model and --scripted exclude each other: choose one.")
    if returns_masks and scripted is not None:
        raise InvalidRequest("--return-sampling-mask needs a model: a script draws nothing.")
    at: dict[str, Any] = {"host": host, "port": port, "allowed_hosts": allowed_host or ()}
    service = (
        _scripted(scripted, tokenizer, at)
        if scripted is not None
        else _embedded(
            at,
            model=model or "smollm2",
            threads=threads,
            max_batch=max_batch,
            max_context=max_context,
            device=device,
            returns_masks=returns_masks,
        )
    )
    serve(service, kind="engine", parent=parent, log_format=log_format)


def _scripted(script: Path, tokenizer: str, at: Mapping[str, Any]) -> Service:
    from gangline.settings.plugins import load

    if not script.is_file():
        raise InvalidRequest(f"there is no script {script}.")
    serve_engine = load("engine_server", "scripted")
    return lambda on_ready: serve_engine(script=script, tokenizer=tokenizer, **at, on_ready=on_ready)


def _embedded(at: Mapping[str, Any], **options: Any) -> Service:
    from gangline.settings.plugins import load

    serve_engine = load("engine_server", "embedded")
    return lambda on_ready: serve_engine(**options, **at, on_ready=on_ready)


def register(app: typer.Typer) -> None:
    app.command()(engine)
