"""`eaglefeed serve-target`: a target that trainers on other machines ask for supervision."""

import threading
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from eaglefeed import logs
from eaglefeed.cli.common import (
    ConfigOption,
    EngineOption,
    JsonOption,
    TargetOption,
    access_token,
    emit,
    read_settings,
    stop_on_signals,
    worker_name,
)

__all__ = ["serve_target"]


def serve_target(
    ctx: typer.Context,
    target: TargetOption = None,
    engine: EngineOption = None,
    tp_size: Annotated[int | None, typer.Option("--tp-size", help="GPUs that share the target.")] = None,
    host: Annotated[str | None, typer.Option("--host", help="Address to listen on.")] = None,
    port: Annotated[int | None, typer.Option("--port", help="Port to listen on; 0 for a free one.")] = None,
    nccl_port: Annotated[
        int | None, typer.Option("--nccl-port", help="Where pair groups meet; port + 100 by default.")
    ] = None,
    aux_layer_ids: Annotated[
        tuple[int, int, int] | None,
        typer.Option("--aux-layer-ids", metavar="A B C", help="Three 0-based decoder layers whose outputs are taken."),
    ] = None,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run code that comes with the checkpoint.")
    ] = False,
    token_file: Annotated[
        Path | None, typer.Option("--token-file", help="A file with the token that clients must show.")
    ] = None,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Serve a target to trainers with target-backend remote, until Ctrl-C: the first drains, the second stops."""
    settings = read_settings(
        ctx,
        config,
        target__name=target,
        target__engine=engine,
        target__tp_size=tp_size,
        target__aux_layer_ids=",".join(map(str, aux_layer_ids)) if aux_layer_ids else None,
        target__trust_remote_code=trust_remote_code or None,
        serve__host=host,
        serve__port=port,
        serve__nccl_port=nccl_port,
        access__token_file=token_file,
    )
    logs.bind(role="target", worker=worker_name())
    from eaglefeed.cli.targets import opened_target
    from eaglefeed.producer.opening import info_of
    from eaglefeed.producer.server import TargetServer, check_server, ready_report, stats_line

    serve, token = settings.serve, access_token(settings)
    check_server(serve.host, token, serve.port, serve.nccl_port)
    stop = threading.Event()

    def say_ready() -> None:
        document, line = ready_report(server)
        emit(as_json, document, [line])

    with stop_on_signals(stop.set), opened_target(settings) as opened:
        info = info_of(opened, settings.target.name)
        server = TargetServer(opened, info, token=token, **serve.model_dump())
        stats = server.serve(stop, say_ready)
    emit(as_json, asdict(stats), [stats_line(stats)])
