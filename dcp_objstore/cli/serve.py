"""`dcp-objstore serve`: a real S3 server on loopback, to try things with."""

from __future__ import annotations

import signal
import sys
from typing import Annotated

import typer

from dcp_objstore.cli.terminal import say


def serve(
    bucket: Annotated[str, typer.Option(help="The bucket to make.")] = "bucket",
    port: Annotated[
        int | None, typer.Option(help="Port of the server. Default: a free one.", min=1, max=65535)
    ] = None,
) -> None:
    """Run an S3 server on this machine, until Ctrl-C.

    It is SeaweedFS, a real server with conditional writes, and can be reached from this machine
    only. What it prints sets up another terminal.
    """
    from dcp_objstore.cli.seaweedfs import SeaweedServer

    with SeaweedServer(port=port) as server:
        url = server.create_bucket(bucket)
        say(
            f"# An S3 server with the bucket {url}, until Ctrl-C. Its data goes with it."
            " In another terminal:",
            f"export AWS_ENDPOINT_URL={server.endpoint_url}",
            f"export AWS_ACCESS_KEY_ID={server.access_key}",
            f"export AWS_SECRET_ACCESS_KEY={server.secret_key}",
        )
        sys.stdout.flush()
        try:
            while True:
                signal.pause()
        except KeyboardInterrupt:
            say("ended")
