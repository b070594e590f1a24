"""The commands of `dcp-objstore`: options and their help; the work is done elsewhere."""

from __future__ import annotations

from typing import Annotated

import typer

from dcp_objstore.cli.access import choose
from dcp_objstore.cli.exits import EXPLAINED, exits

# Plain help: rich would take longer to import than everything else together.
app = typer.Typer(
    name="dcp-objstore",
    help="Checkpoints of torch.distributed.checkpoint on object stores.",
    epilog=EXPLAINED,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


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
            help="What carries the requests: native, boto3 (s3:// only) or fsspec. Before the"
            " command: dcp-objstore --transport boto3 ls URL."
        ),
    ] = None,
) -> None:
    del version  # its callback has printed it
    choose({} if transport is None else {"transport": transport})


@app.command()
def demo(
    ranks: Annotated[int, typer.Option(min=2, max=16, help="Ranks that train first.")] = 8,
    resume_ranks: Annotated[int, typer.Option(min=1, max=16, help="Ranks that resume.")] = 4,
    url: Annotated[
        str | None,
        typer.Option(
            help="Save below this URL (s3://bucket/prefix), with credentials from the environment;"
            " what the demo wrote is removed at its end. Default: a SeaweedFS server on loopback."
        ),
    ] = None,
    keep: Annotated[
        bool,
        typer.Option(
            "--keep",
            help="Leave the checkpoints below --url; without --url, leave the server running until"
            " Ctrl-C, to look around.",
        ),
    ] = False,
) -> None:
    """Train, kill a rank in mid-save, resume: proves that nothing is lost.

    A language model is trained with FSDP2 on 8 ranks and saved on the way; one rank is killed in
    the middle of a save. The torn checkpoint is invisible; training resumes on 4 ranks from the
    last committed one, bit for bit; and stock torch reads what was written. Takes about a
    minute on 2 cores.
    """
    with exits():
        from dcp_objstore.cli.demo.stage import run_demo
        from dcp_objstore.cli.demo.story import Settings

        run_demo(Settings(ranks=ranks, resume_ranks=resume_ranks), url, keep=keep)


@app.command("ls")
def list_checkpoints(
    url: Annotated[str, typer.Argument(help="A checkpoint, or what its steps lie below.")],
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object per line.")] = False,
) -> None:
    """List the checkpoint at a URL, or those below it.

    Data objects of a save that was never committed are listed too, as what they are.
    """
    with exits():
        from dcp_objstore.cli.ls import print_checkpoints

        print_checkpoints(url, as_json=as_json)


_Checkpoint = Annotated[str, typer.Argument(help="A checkpoint.")]
_Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


@app.command("rm")
def remove_checkpoint(
    url: _Checkpoint,
    now: Annotated[
        bool,
        typer.Option("--now", help="Remove the objects at once, not by a gc 24 hours later."),
    ] = False,
    yes: Annotated[
        bool, typer.Option("--yes", help="Do it. Without: only print what would be deleted.")
    ] = False,
    even_newest: Annotated[
        bool,
        typer.Option("--even-newest", help="Even if nothing newer is committed beside it."),
    ] = False,
    as_json: _Json = False,
) -> None:
    """Delete a checkpoint; a dry run without --yes.

    It is gone for readers at once. Its objects stay for those who are reading it, until gc removes
    them. A pinned checkpoint is refused. After a crash, the same command goes on.
    """
    with exits():
        from dcp_objstore.cli.upkeep import remove

        remove(url, now=now, yes=yes, even_newest=even_newest, as_json=as_json)


@app.command("gc")
def collect_garbage(
    url: Annotated[str, typer.Argument(help="A checkpoint, or what its steps lie below.")],
    grace: Annotated[
        str,
        typer.Option(
            help="What is younger stays: 90m, 24h, 7d; at least 1h. Longer than any save or load."
        ),
    ] = "24h",
    yes: Annotated[
        bool, typer.Option("--yes", help="Do it. Without: only print what would be removed.")
    ] = False,
    as_json: _Json = False,
) -> None:
    """Remove what no checkpoint needs; a dry run without --yes.

    That is what torn saves, overwritten and deleted checkpoints and unfinished uploads have left.
    Objects whose names are not ours are never touched. Also finishes what a crash left half done.
    """
    with exits():
        from dcp_objstore.cli.upkeep import collect

        collect(url, grace=grace, yes=yes, as_json=as_json)


@app.command("repair")
def repair_checkpoint(
    url: _Checkpoint,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only print what would be done.")
    ] = False,
    as_json: _Json = False,
) -> None:
    """Finish a commit or deletion that a crash cut short.

    A job that died right after its commit leaves a checkpoint that stock torch does not see yet:
    its .metadata is written. A deletion that was begun is finished.
    """
    with exits():
        from dcp_objstore.cli.upkeep import mend

        mend(url, dry_run=dry_run, as_json=as_json)


_PinName = Annotated[str, typer.Argument(help="What for: paper, release-1.", metavar="NAME")]


@app.command("pin")
def pin_checkpoint(url: _Checkpoint, name: _PinName, as_json: _Json = False) -> None:
    """Protect a checkpoint, under a name.

    A pinned checkpoint is neither deleted nor overwritten.
    """
    with exits():
        from dcp_objstore.cli.upkeep import protect

        protect(url, name, wanted=True, as_json=as_json)


@app.command("unpin")
def unpin_checkpoint(url: _Checkpoint, name: _PinName, as_json: _Json = False) -> None:
    """Remove a pin."""
    with exits():
        from dcp_objstore.cli.upkeep import protect

        protect(url, name, wanted=False, as_json=as_json)


@app.command("doctor")
def diagnose_store(
    url: Annotated[str, typer.Argument(help="What checkpoints are to lie below.")],
    as_json: _Json = False,
) -> None:
    """Check a store: credentials, rights, conditional writes.

    Says for each check what was found and what to do about it. A few small objects are written
    under a random name below the URL and removed again, also after Ctrl-C; nothing else is
    touched. Exits with 1 if a check failed; warnings are no failures.
    """
    with exits():
        from dcp_objstore.cli.doctor import diagnose

        diagnose(url, as_json=as_json)
