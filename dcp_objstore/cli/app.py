"""The commands of `dcp-objstore`: their options and help. Other modules do the work."""

from __future__ import annotations

from typing import Annotated

import typer

from dcp_objstore.cli.access import choose
from dcp_objstore.cli.exits import EXPLAINED, exits

# Plain help: importing rich would take longer than everything else together.
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
            help="The library that sends the requests: native, boto3 (s3:// only) or fsspec. Write"
            " it before the command: dcp-objstore --transport boto3 ls URL."
        ),
    ] = None,
) -> None:
    del version  # the callback has printed it
    choose({} if transport is None else {"transport": transport})


@app.command("demo", epilog="Example: dcp-objstore demo --ranks 4 --resume-ranks 2")
def demo(
    ranks: Annotated[int, typer.Option(min=2, max=16, help="Ranks that train first.")] = 8,
    resume_ranks: Annotated[int, typer.Option(min=1, max=16, help="Ranks that resume.")] = 4,
    url: Annotated[
        str | None,
        typer.Option(
            help="Save below this URL (s3://bucket/prefix), with credentials from the environment."
            " At the end the demo removes what it wrote. Default: a SeaweedFS server on loopback."
        ),
    ] = None,
    keep: Annotated[
        bool,
        typer.Option(
            "--keep",
            help="Keep the checkpoints below --url; without --url, keep the server running until"
            " Ctrl-C, to look around.",
        ),
    ] = False,
) -> None:
    """Train, kill a rank in mid-save, resume; prove that nothing is lost.

    A language model is trained with FSDP2 on 8 ranks and saved on the way. One rank is killed in
    the middle of a save. The torn checkpoint is invisible, training resumes on 4 ranks from the
    last committed checkpoint, bit for bit, and stock torch reads what was written. Takes less than
    a minute on 2 cores.
    """
    with exits():
        from dcp_objstore.cli.demo.story import run_demo

        run_demo(ranks=ranks, resume_ranks=resume_ranks, url=url, keep=keep)


@app.command("ls", epilog="Example: dcp-objstore ls --all file:///tmp/run")
def list_checkpoints(
    url: Annotated[str, typer.Argument(help="URL of a checkpoint or a run.", metavar="URL")],
    everything: Annotated[
        bool,
        typer.Option(
            "--all",
            help="Also list what no commit names: objects and unfinished uploads of dead saves, of"
            " deleted and of overwritten checkpoints.",
        ),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object per line.")] = False,
) -> None:
    """List the checkpoint at a URL, and those below it.

    A save that was never committed is listed, too, with the state "not committed". Nothing is ever
    changed.
    """
    with exits():
        from dcp_objstore.cli.ls import print_checkpoints

        print_checkpoints(url, as_json=as_json, everything=everything)


_Checkpoint = Annotated[str, typer.Argument(help="URL of a checkpoint.", metavar="URL")]
_Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


@app.command("rm", epilog="Example: dcp-objstore rm --now file:///tmp/run/step-20")
def remove_checkpoint(
    url: _Checkpoint,
    now: Annotated[
        bool,
        typer.Option("--now", help="Remove the objects at once, not by a gc 24 hours later."),
    ] = False,
    yes: Annotated[
        bool, typer.Option("--yes", help="Do it. Without --yes, print what would be deleted.")
    ] = False,
    even_newest: Annotated[
        bool,
        typer.Option("--even-newest", help="Delete it even if it is the newest of its run."),
    ] = False,
    as_json: _Json = False,
) -> None:
    """Delete a checkpoint; a dry run without --yes.

    New readers no longer find it. Its objects stay for jobs that are reading it, until gc removes
    them. A pinned checkpoint is refused. After a crash, run the same command again to go on.
    """
    with exits():
        from dcp_objstore.cli.upkeep import remove

        remove(url, now=now, yes=yes, even_newest=even_newest, as_json=as_json)


@app.command("gc", epilog="Example: dcp-objstore gc --grace 7d file:///tmp/run")
def collect_garbage(
    url: Annotated[str, typer.Argument(help="URL of a checkpoint or a run.", metavar="URL")],
    grace: Annotated[
        str,
        typer.Option(
            help="Keep objects that are younger than this: 90m, 24h, 7d. It must be at least 1h,"
            " and longer than any save or load."
        ),
    ] = "24h",
    yes: Annotated[
        bool, typer.Option("--yes", help="Do it. Without --yes, print what would be removed.")
    ] = False,
    as_json: _Json = False,
) -> None:
    """Remove what no checkpoint needs; a dry run without --yes.

    This removes what torn saves, overwritten and deleted checkpoints and unfinished uploads have
    left. It never touches objects with names that dcp-objstore does not write. It also finishes
    what a crash left half done.
    """
    with exits():
        from dcp_objstore.cli.upkeep import collect

        collect(url, grace=grace, yes=yes, as_json=as_json)


@app.command("repair", epilog="Example: dcp-objstore repair --dry-run file:///tmp/run/step-40")
def repair_checkpoint(
    url: _Checkpoint,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print what would be done, and do nothing.")
    ] = False,
    as_json: _Json = False,
) -> None:
    """Finish a commit or deletion that a crash cut short.

    If a job died right after its commit, stock torch does not see the checkpoint yet: this writes
    its .metadata. If a deletion was begun, this finishes it.
    """
    with exits():
        from dcp_objstore.cli.upkeep import mend

        mend(url, dry_run=dry_run, as_json=as_json)


_PinName = Annotated[
    str, typer.Argument(help="Name of the pin, such as paper or release-1.", metavar="NAME")
]


@app.command("pin", epilog="Example: dcp-objstore pin file:///tmp/run/step-40 paper")
def pin_checkpoint(url: _Checkpoint, name: _PinName, as_json: _Json = False) -> None:
    """Protect a checkpoint from deletion and from being overwritten."""
    with exits():
        from dcp_objstore.cli.upkeep import protect

        protect(url, name, wanted=True, as_json=as_json)


@app.command("unpin", epilog="Example: dcp-objstore unpin file:///tmp/run/step-40 paper")
def unpin_checkpoint(url: _Checkpoint, name: _PinName, as_json: _Json = False) -> None:
    """Remove a pin of a checkpoint."""
    with exits():
        from dcp_objstore.cli.upkeep import protect

        protect(url, name, wanted=False, as_json=as_json)


@app.command("doctor", epilog="Example: dcp-objstore doctor file:///tmp/run")
def diagnose_store(
    url: Annotated[
        str, typer.Argument(help="The URL below which you want to save checkpoints.", metavar="URL")
    ],
    as_json: _Json = False,
) -> None:
    """Check a store: credentials, rights, conditional writes.

    Prints for each check what was found and what to do about it. Writes a few small objects under
    a random name below the URL and removes them again, even after Ctrl-C; it touches nothing else.
    Exits with status 1 if a check failed; a warning is not a failure.
    """
    with exits():
        from dcp_objstore.cli.doctor import diagnose

        diagnose(url, as_json=as_json)


@app.command(
    "bench",
    epilog="Example: dcp-objstore bench file:///tmp/run --size 64MiB --seconds 2",
)
def measure_store(
    url: Annotated[
        str, typer.Argument(help="The URL below which you save checkpoints.", metavar="URL")
    ],
    size: Annotated[
        str | None,
        typer.Option(
            help="Size of the tensors of one save, such as 4GiB. Default: what moves in a second"
            " or two, 16MiB to 1GiB."
        ),
    ] = None,
    seconds: Annotated[float, typer.Option(help="About how long to measure.", min=0.1)] = 45,
    as_json: _Json = False,
) -> None:
    """Measure saves and loads, and what other settings would gain.

    Saves and loads tensors from one process, sends plain requests for comparison, and tries other
    settings of TransferConfig. Writes under a random name below the URL and removes it again, even
    after Ctrl-C; it touches nothing else. A bucket may bill the requests and the bytes.
    """
    with exits():
        from dcp_objstore.cli.bench import measure

        measure(url, size=size, seconds=seconds, as_json=as_json)


@app.command(
    "verify",
    epilog="Example: dcp-objstore verify --quick file:///tmp/run/step-40",
)
def verify_checkpoint(
    url: Annotated[
        str, typer.Argument(help="URL of a checkpoint; with --run, of a run.", metavar="URL")
    ],
    quick: Annotated[
        bool,
        typer.Option("--quick", help="Read no tensors: only marker, index, objects and sizes."),
    ] = False,
    deep: Annotated[
        bool,
        typer.Option("--deep", help="Compare also what lies around the tensors, and the counts."),
    ] = False,
    run: Annotated[
        bool,
        typer.Option("--run", help="Verify all steps of a run, the newest first."),
    ] = False,
    before: Annotated[
        str | None,
        typer.Option(
            help="With --run: only steps older than this one, to go on after Ctrl-C.",
            metavar="STEP",
        ),
    ] = None,
    from_byte: Annotated[
        int,
        typer.Option(
            help="Leave out what lies before it, to go on where Ctrl-C said.",
            metavar="N",
            min=0,
            show_default=False,
        ),
    ] = 0,
    as_json: Annotated[
        bool, typer.Option("--json", help="One JSON object per checkpoint, one per line.")
    ] = False,
) -> None:
    """Read a checkpoint, compare every block with its digest.

    Names what is damaged, down to the elements of tensors. The bytes are not kept, so it takes
    little memory. With --run it prints each step as it is done, and at the end the newest whole
    one. Exits with status 4 if something is damaged.
    """
    with exits():
        from dcp_objstore.cli.verify import verify

        verify(
            url,
            quick=quick,
            deep=deep,
            run=run,
            before=before,
            from_byte=from_byte,
            as_json=as_json,
        )


_Keys = Annotated[
    list[str] | None,
    typer.Option("--keys", help="Only these keys; shell patterns. Repeatable.", metavar="PATTERN"),
]
_Rename = Annotated[
    list[str] | None,
    typer.Option(
        help="PATTERN=REPLACEMENT: replace a regular expression in each key. Repeatable; the rules"
        " apply in turn.",
        metavar="RULE",
    ),
]
_TrustPickle = Annotated[
    bool, typer.Option("--trust-pickle", help="Unpickle any class. This may run code in it.")
]
_Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace what exists.")]


@app.command(
    "export",
    epilog="Example: dcp-objstore export file:///tmp/run/step-40 /tmp/model --keys 'model.*'"
    " --rename '^model[.]='",
)
def export_checkpoint(
    url: _Checkpoint,
    out: Annotated[
        str,
        typer.Argument(
            help="Path or URL to write: a name in .pt, .pth, .bin or .ckpt for one torch.save file,"
            " in .safetensors for one such file, otherwise a folder for safetensors shards."
        ),
    ],
    keys: _Keys = None,
    rename: _Rename = None,
    dtype: Annotated[
        str | None,
        typer.Option(
            help="Convert floating-point tensors, to bfloat16 for example.", metavar="DTYPE"
        ),
    ] = None,
    max_shard_size: Annotated[
        str, typer.Option(help="Size at which another shard begins, such as 500MB.", metavar="SIZE")
    ] = "5GB",
    config: Annotated[
        list[str] | None,
        typer.Option(
            help="A file to copy into the folder, such as config.json. Repeatable.", metavar="FILE"
        ),
    ] = None,
    overwrite: _Overwrite = False,
    trust_pickle: _TrustPickle = False,
    as_json: _Json = False,
) -> None:
    """Write a checkpoint as a torch.save file or as safetensors.

    Streams through a few hundred MiB of memory, however large the checkpoint is. Files appear
    whole or not at all, and a failed export removes those that it has written.
    """
    with exits():
        from dcp_objstore.cli.convert import export

        export(
            url,
            out,
            keys=keys or [],
            rename=rename or [],
            dtype=dtype,
            max_shard_size=max_shard_size,
            copied=config or [],
            overwrite=overwrite,
            trust_pickle=trust_pickle,
            as_json=as_json,
        )


@app.command(
    "import",
    epilog="Example: dcp-objstore import /tmp/model file:///tmp/run/step-0 --rename '^=model.'",
)
def import_checkpoint(
    source: Annotated[
        str,
        typer.Argument(
            help="Path or URL of a torch.save file (.pt, .pth, .bin, .ckpt), of a safetensors file"
            " or folder, or of a checkpoint by any library that DCP reads.",
            metavar="IN",
        ),
    ],
    url: Annotated[str, typer.Argument(help="URL of the checkpoint to write.", metavar="URL")],
    keys: _Keys = None,
    rename: _Rename = None,
    overwrite: _Overwrite = False,
    trust_pickle: _TrustPickle = False,
    as_json: _Json = False,
) -> None:
    """Save what other libraries wrote as a committed checkpoint.

    Streams through a few hundred MiB of memory, in one process.
    """
    with exits():
        from dcp_objstore.cli.convert import import_

        import_(
            source,
            url,
            keys=keys or [],
            rename=rename or [],
            overwrite=overwrite,
            trust_pickle=trust_pickle,
            as_json=as_json,
        )


@app.command(
    "diff",
    epilog="Example: dcp-objstore diff file:///tmp/run/step-20 file:///tmp/run/step-40 --stats",
)
def diff_checkpoints(
    url: _Checkpoint,
    other_url: Annotated[
        str, typer.Argument(help="URL of the checkpoint to compare it with.", metavar="URL2")
    ],
    keys: _Keys = None,
    stats: Annotated[
        bool,
        typer.Option("--stats", help="Read the tensors that changed, and say by how much."),
    ] = False,
    trust_pickle: _TrustPickle = False,
    as_json: _Json = False,
) -> None:
    """Compare two checkpoints: keys, shapes, dtypes, contents.

    Compares digests, and reads tensors only where these cannot tell: in checkpoints by other
    libraries, or if the two are cut into different chunks. Exits with status 1 if they differ.
    """
    with exits():
        from dcp_objstore.cli.diff import print_diff

        print_diff(
            url,
            other_url,
            keys=keys or [],
            stats=stats,
            trust_pickle=trust_pickle,
            as_json=as_json,
        )


@app.command(
    "inspect",
    epilog="Example: dcp-objstore inspect file:///tmp/run/step-40 'model.*'",
)
def inspect_checkpoint(
    url: _Checkpoint,
    patterns: Annotated[
        list[str] | None,
        typer.Argument(help="Only these keys; shell patterns.", metavar="PATTERN"),
    ] = None,
    tensor: Annotated[
        str | None,
        typer.Option(
            "--tensor",
            help="Read this tensor: extremes, mean, standard deviation, NaN, Inf, histogram.",
            metavar="NAME",
        ),
    ] = None,
    plan: Annotated[
        int | None,
        typer.Option(
            "--plan",
            min=1,
            max=65536,
            help="Show what each of N ranks of an FSDP2 job would read. Reads nothing.",
            metavar="N",
        ),
    ] = None,
    as_json: _Json = False,
) -> None:
    """Show what is in a checkpoint: modules, tensors, shapes, sizes.

    Reads only the index, also of checkpoints by other libraries. Numbered modules that are alike
    are shown once.
    """
    with exits():
        from dcp_objstore.cli.inspect import inspect

        inspect(url, patterns or [], tensor=tensor, plan=plan, as_json=as_json)


@app.command(
    "cp",
    epilog="Example: dcp-objstore cp file:///tmp/run/step-40 file:///tmp/kept/step-40",
)
def copy_checkpoint(
    source: Annotated[str, typer.Argument(help="URL of the checkpoint to copy.", metavar="SRC")],
    url: Annotated[str, typer.Argument(help="URL of the checkpoint to write.", metavar="DST")],
    overwrite: _Overwrite = False,
    streamed: Annotated[
        bool,
        typer.Option("--streamed", help="Check every byte, where the store could copy by itself."),
    ] = False,
    as_json: _Json = False,
) -> None:
    """Copy a checkpoint to another run, bucket or provider.

    Between two URLs of one store, the store copies by itself. Otherwise it streams through a few
    hundred MiB of memory and checks every byte on the way. Commits as a save does. After a crash or
    Ctrl-C, run the same command again: objects that have arrived are not sent again. Pins are not
    copied.
    """
    with exits():
        from dcp_objstore.cli.convert import copy

        copy(source, url, overwrite=overwrite, streamed=streamed, as_json=as_json)
