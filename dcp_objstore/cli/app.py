"""The command line: what stands before a command, and the list of commands."""

from __future__ import annotations

import signal
import sys
from typing import Annotated, Any, Literal

import typer
from typer.core import TyperGroup

from dcp_objstore.cli.bench import measure
from dcp_objstore.cli.convert import average, copy, export, import_
from dcp_objstore.cli.diff import print_diff
from dcp_objstore.cli.doctor import diagnose
from dcp_objstore.cli.exits import EXPLAINED, exits
from dcp_objstore.cli.follow import follow
from dcp_objstore.cli.inspect import inspect
from dcp_objstore.cli.local import print_runs, remove_runs
from dcp_objstore.cli.ls import print_checkpoints
from dcp_objstore.cli.options import choose
from dcp_objstore.cli.terminal import say
from dcp_objstore.cli.upkeep import pin, remove, repair, sweep, unpin
from dcp_objstore.cli.verify import verify


class _Commands(TyperGroup):
    """Commands, and where an option of all of them stands."""

    def invoke(self, ctx: Any) -> Any:
        """Run a command; say where `--transport` belongs."""
        try:
            return super().invoke(ctx)
        except Exception as error:
            # This is click's NoSuchOption: the user wrote the option after the command's name.
            if getattr(error, "option_name", None) == "--transport":
                text = "stands before the command: dcp-objstore --transport NAME COMMAND"
                error.message = f"--transport {text} ..."  # type: ignore[attr-defined]
            raise


def _group(name: str, help_text: str, epilog: str) -> typer.Typer:
    # Plain help: importing rich would take longer than everything else together.
    return typer.Typer(
        name=name,
        cls=_Commands,
        help=help_text,
        epilog=epilog,
        no_args_is_help=True,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )


app = _group(
    "dcp-objstore", "Checkpoints of torch.distributed.checkpoint on object stores.", EXPLAINED
)
local = _group(
    "local",
    "Show and remove the copies of checkpoints on this node.",
    "Example: dcp-objstore local ls /tmp/node",
)
app.add_typer(local)


def _show_version(wanted: bool) -> None:
    if wanted:
        from dcp_objstore import __version__

        typer.echo(f"dcp-objstore {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option("--version", help="Print the version.", callback=_show_version, is_eager=True),
    ] = False,
    transport: Annotated[
        str | None,
        typer.Option(
            help="The library that sends the requests: native, boto3 (s3:// only) or fsspec. Write"
            " it before the command: dcp-objstore --transport boto3 ls URL."
        ),
    ] = None,
) -> None:
    del version  # the callback has printed it
    choose({} if transport is None else {"transport": transport})


def demo(
    ranks: Annotated[
        int | None,
        typer.Option(
            min=2, max=16, help="Ranks that train first. Default: 8; under torchrun or srun, all."
        ),
    ] = None,
    resume_ranks: Annotated[
        int | None, typer.Option(min=1, help="Ranks that resume. Default: half of them.")
    ] = None,
    url: Annotated[
        str | None,
        typer.Option(
            help="Save below this URL (s3://bucket/prefix), with credentials from the environment."
            " At the end the demo removes what it wrote. Default: a SeaweedFS server on loopback."
        ),
    ] = None,
    device: Annotated[
        Literal["cpu", "cuda"], typer.Option(help="Where the model is. A GPU for each rank.")
    ] = "cpu",
    report: Annotated[
        str | None,
        typer.Option(
            metavar="FILE.md",
            help="Measure saves and loads, too, and write what was proved into this file, in the"
            " form of the issue 'Benchmark results'.",
        ),
    ] = None,
) -> None:
    """Train, kill a rank in mid-save, resume; prove that nothing is lost.

    A language model is trained with FSDP2 and saved on the way. One rank is killed in the middle of
    a save. The torn checkpoint is invisible, training resumes on half of the ranks from the last
    committed checkpoint, bit for bit, and saves its last step when it gets SIGTERM. Stock torch
    reads what was written. Takes less than a minute on 2 cores.

    Under torchrun or srun it uses the ranks that are there: each starts a process for each phase,
    so that one can be killed and the launcher does not miss it.
    """
    from dcp_objstore.cli.demo import run_demo

    run_demo(ranks=ranks, resume_ranks=resume_ranks, url=url, device=device, report=report)


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


# Each command's parameters are its options, and its docstring is its help. `exits()` decorates it
# and turns its errors into a status. The modules of commands import most others only when a command
# runs, so that `--help` stays quick.
for name, command, example in (
    ("demo", demo, "--ranks 4 --resume-ranks 2"),
    ("serve", serve, "--port 9000"),
    ("ls", print_checkpoints, "file:///tmp/run"),
    ("follow", follow, "file:///tmp/run --until 40"),
    ("rm", remove, "file:///tmp/run/step-20"),
    ("sweep", sweep, "--grace 7d file:///tmp/run"),
    ("repair", repair, "--dry-run file:///tmp/run/step-40"),
    ("pin", pin, "file:///tmp/run/step-40 paper"),
    ("unpin", unpin, "file:///tmp/run/step-40 paper"),
    ("doctor", diagnose, "file:///tmp/run"),
    ("bench", measure, "file:///tmp/run --size 16MiB --seconds 1"),
    ("verify", verify, "--quick file:///tmp/run/step-40"),
    (
        "export",
        export,
        "file:///tmp/run/step-40 /tmp/model --keys 'model.*' --rename '^model[.]='",
    ),
    ("import", import_, "/tmp/model file:///tmp/run/step-0 --rename '^=model.'"),
    ("diff", print_diff, "file:///tmp/run/step-20 file:///tmp/run/step-40"),
    ("inspect", inspect, "file:///tmp/run/step-40 'model.*'"),
    ("average", average, "file:///tmp/run --last 2 file:///tmp/average"),
    ("cp", copy, "file:///tmp/run/step-40 file:///tmp/kept/step-40"),
):
    app.command(name, epilog=f"Example: dcp-objstore {name} {example}")(exits()(command))
for name, of_node in (("ls", print_runs), ("rm", remove_runs)):
    local.command(name, epilog=f"Example: dcp-objstore local {name} /tmp/node")(exits()(of_node))
