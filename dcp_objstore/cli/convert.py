"""`dcp-objstore export`, `import`, `average` and `cp`: call them, print what was written."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Annotated, Literal, TypeAlias

import typer

import dcp_objstore as dos
from dcp_objstore.cli.options import (
    Checkpoint,
    Json,
    Keys,
    Overwrite,
    TrustPickle,
    chosen,
    size_bytes,
)
from dcp_objstore.cli.terminal import print_json, say
from dcp_objstore.errors import ConfigError
from dcp_objstore.observe.report import SaveReport

_Rename: TypeAlias = Annotated[
    list[str] | None,
    typer.Option(
        help="PATTERN=REPLACEMENT: replace a regular expression in each key. Repeatable; the rules"
        " apply in turn.",
        metavar="RULE",
    ),
]


def export(
    url: Checkpoint,
    out: Annotated[
        str,
        typer.Argument(
            help="Path or URL to write: a name in .pt, .pth, .bin or .ckpt for one torch.save file,"
            " in .safetensors for one such file, otherwise a folder for safetensors shards."
        ),
    ],
    keys: Keys = None,
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
    files: Annotated[
        list[str] | None,
        typer.Option(
            help="Files to copy beside the weights: a path or URL of a file such as config.json, a"
            " folder or a shell pattern (without weights). Repeatable.",
            metavar="FILE",
        ),
    ] = None,
    overwrite: Annotated[
        bool,
        typer.Option(
            "--overwrite",
            help="Replace files that exist. In a folder, delete model.safetensors, shards (model-*)"
            " and index of an earlier export.",
        ),
    ] = False,
    trust_pickle: TrustPickle = False,
    as_json: Json = False,
) -> None:
    """Write a checkpoint as a torch.save file or as safetensors.

    Streams through a few hundred MiB of memory, however large the checkpoint is. Files appear
    whole or not at all, and a failed export removes those that it has written.
    """
    most_bytes, rules = size_bytes("--max-shard-size", max_shard_size), _rules(rename)
    import torch

    torch_dtype = None if dtype is None else getattr(torch, dtype, None)
    if dtype is not None and not isinstance(torch_dtype, torch.dtype):
        raise ConfigError(f"--dtype {dtype}: torch has no such dtype; write bfloat16, for example")
    report = dos.export_checkpoint(
        url,
        out,
        keys or None,
        rename=rules,
        dtype=torch_dtype,
        max_shard_size_bytes=most_bytes,
        copied_files=files or (),
        overwrite=overwrite,
        storage_options=chosen(),
        trust_pickle=trust_pickle,
    )
    _print_report(report, as_json=as_json)


def import_(
    source: Annotated[
        str,
        typer.Argument(
            help="Path or URL of a torch.save file (.pt, .pth, .bin, .ckpt), of a safetensors file"
            " or folder, or of a checkpoint by any library that DCP reads.",
            metavar="IN",
        ),
    ],
    url: Annotated[str, typer.Argument(help="URL of the checkpoint to write.", metavar="URL")],
    keys: Keys = None,
    rename: _Rename = None,
    overwrite: Overwrite = False,
    trust_pickle: TrustPickle = False,
    as_json: Json = False,
) -> None:
    """Save what other libraries wrote as a committed checkpoint.

    Streams through a few hundred MiB of memory, in one process.
    """
    report = dos.import_checkpoint(
        source,
        url,
        keys or None,
        rename=_rules(rename),
        overwrite=overwrite,
        storage_options=chosen(),
        trust_pickle=trust_pickle,
    )
    _print_report(report, as_json=as_json)


def average(
    run: Annotated[str, typer.Argument(help="URL of a run.", metavar="RUN")],
    out: Annotated[
        str,
        typer.Argument(
            help="URL of the checkpoint to write. Below the run it would be one of its steps.",
            metavar="OUT",
        ),
    ],
    last: Annotated[int, typer.Option(min=2, help="Average so many steps, the newest ones.")] = 8,
    weights: Annotated[
        Literal["uniform", "linear", "1-sqrt"],
        typer.Option(
            help="What the steps count: all the same, as a linear decay of the learning rate would;"
            " the newest the most (1, 2, 3, ...); or as a decay by 1 - sqrt(t) would."
        ),
    ] = "uniform",
    keys: Keys = None,
    overwrite: Overwrite = False,
    trust_pickle: TrustPickle = False,
    as_json: Json = False,
) -> None:
    """Average the weights of a run's last steps.

    The weights are what lies below model, unless --keys says what they are. The average is a
    checkpoint, committed as a save does it. Streams through some 350 MiB of memory, however large
    the steps are, and checks every byte. Counters (step, epoch) are those of the newest step; other
    tensors, such as the optimizer's, are left out.
    """
    steps = dos.steps(run, newest=last, storage_options=chosen())
    if len(steps) < last:
        raise ConfigError(f"--last {last}: the run has {len(steps)} committed steps", url=run)
    report = dos.average(
        [step.url for step in steps],
        out,
        weights,
        keys or "model.*",
        overwrite=overwrite,
        storage_options=chosen(),
        trust_pickle=trust_pickle,
    )
    if not as_json:
        say(f"averaged {len(steps)} steps, {steps[0].url} to {steps[-1].url}")
    _print_report(report, as_json=as_json)


def copy(
    source: Annotated[str, typer.Argument(help="URL of the checkpoint to copy.", metavar="SRC")],
    url: Annotated[str, typer.Argument(help="URL of the checkpoint to write.", metavar="DST")],
    overwrite: Overwrite = False,
    streamed: Annotated[
        bool,
        typer.Option("--streamed", help="Check every byte, where the store could copy by itself."),
    ] = False,
    as_json: Json = False,
) -> None:
    """Copy a checkpoint to another run, bucket or provider.

    Between two URLs of one store, the store copies by itself. Otherwise it streams through a few
    hundred MiB of memory and checks every byte on the way. Commits as a save does. After a crash or
    Ctrl-C, run the same command again: objects that have arrived are not sent again. Pins are not
    copied.
    """
    report = dos.copy_checkpoint(
        source, url, overwrite=overwrite, storage_options=chosen(), streamed=streamed
    )
    _print_report(report, as_json=as_json)


def _print_report(report: object, *, as_json: bool) -> None:
    """Print what was written, for people or as one JSON object."""
    # On a terminal, the bar of a save has ended with what was written.
    is_on_terminal = sys.stdout.isatty() and sys.stderr.isatty()
    was_printed_by_bar = isinstance(report, SaveReport) and is_on_terminal
    if as_json:
        print_json(report)
    elif not was_printed_by_bar:
        say(*str(report).splitlines())


def _rules(rename: Sequence[str] | None) -> list[tuple[str, str]]:
    """Return the pattern and the replacement of each rule, parted at its last `=`."""
    rules = []
    for rule in rename or ():
        pattern, equals, replacement = rule.rpartition("=")
        if not equals:
            raise ConfigError(f"--rename {rule}: write PATTERN=REPLACEMENT, such as '^model[.]='")
        rules.append((pattern, replacement))
    return rules
