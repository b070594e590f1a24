"""What is written on a command line reaches the function that carries it out, and nothing else."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

import dcp_objstore as dos
from dcp_objstore.cli.options import chosen, seconds, size_bytes
from dcp_objstore.config import Local
from dcp_objstore.errors import ConfigError
from dcp_objstore.observe.dispatch import EventSettings
from dcp_objstore.stores import StoreSpec
from tests.support.command_line import run_here

# What stands before each command here.
CHOSEN = {"transport": "fsspec"}
URL, OTHER = "file:///u", "file:///o"
DAY_SECONDS = 86400.0


def on_store(**settings: object) -> dict[str, object]:
    return {**settings, "storage_options": CHOSEN}


FOLLOWED = {"after": None, "until": None, "skip_to_newest": False, "timeout_seconds": None}
FOLLOWED |= {"poll_seconds": 30.0, "pin": None, "on_dropped": None}
WRITTEN = {"rename": [], "overwrite": False, "trust_pickle": False}
REWRITTEN = {"rename": [("x", "y"), ("a=b", "")], "overwrite": True, "trust_pickle": True}
REWRITE = "--keys a.* --keys b --rename x=y --rename a=b= --overwrite --trust-pickle"
EXPORTED = {"dtype": None, "max_shard_size_bytes": 5 * 1000**3, "copied_files": ()}
CONVERTED = {"dtype": torch.float16, "max_shard_size_bytes": 2048, "copied_files": ["f", "g"]}
AVERAGED = {"overwrite": False, "trust_pickle": False}
SHOWN = {"ranks": None, "resume_ranks": None, "url": None, "device": "cpu", "report": None}
SHOWN_ON_GPUS = {"ranks": 3, "resume_ranks": 2, "url": URL, "device": "cuda", "report": "r.md"}
# The words, the function that is called, and its arguments.
CALLS = [
    (f"ls {URL}", "list_checkpoints", (URL,), on_store()),
    (f"follow {URL}", "follow", (URL,), on_store(**FOLLOWED)),
    (
        f"follow {URL} --after 3 --until step-9 --skip-to-newest --timeout 2m --poll 5s --pin me"
        " --exec true",
        "follow",
        (URL,),
        on_store(
            after=3,
            until="step-9",
            skip_to_newest=True,
            timeout_seconds=120.0,
            poll_seconds=5.0,
            pin="me",
            on_dropped=None,
        ),
    ),
    *(
        (f"rm {URL} {words}", "delete", (URL,), on_store(**settings))
        for words, settings in (
            ("", {"grace_seconds": 0.0, "allow_newest": False, "dry_run": True}),
            ("--yes", {"grace_seconds": 0.0, "allow_newest": False, "dry_run": False}),
            (
                "--grace 2d --allow-newest",
                {"grace_seconds": 2 * DAY_SECONDS, "allow_newest": True, "dry_run": True},
            ),
        )
    ),
    (f"sweep {URL}", "sweep", (URL,), on_store(grace_seconds=DAY_SECONDS, dry_run=True)),
    (
        f"sweep {URL} --yes --grace 1h",
        "sweep",
        (URL,),
        on_store(grace_seconds=3600.0, dry_run=False),
    ),
    (f"repair {URL}", "repair", (URL,), on_store(dry_run=False)),
    (f"repair {URL} --dry-run", "repair", (URL,), on_store(dry_run=True)),
    (f"pin {URL} paper", "pin", (URL, "paper"), on_store()),
    (f"unpin {URL} paper", "unpin", (URL, "paper"), on_store()),
    (f"doctor {URL}", "doctor.check_up", (URL, CHOSEN), {}),
    (f"bench {URL}", "measure.bench", (URL,), on_store(size_bytes=None, seconds=45.0)),
    (
        f"bench {URL} --size 4KiB --seconds 2",
        "measure.bench",
        (URL,),
        on_store(size_bytes=4096, seconds=2.0),
    ),
    (
        f"export {URL} out",
        "export_checkpoint",
        (URL, "out", None),
        on_store(**WRITTEN, **EXPORTED),
    ),
    (
        f"export {URL} out {REWRITE} --dtype float16 --max-shard-size 2KiB --files f --files g",
        "export_checkpoint",
        (URL, "out", ["a.*", "b"]),
        on_store(**REWRITTEN, **CONVERTED),
    ),
    (f"import in {URL}", "import_checkpoint", ("in", URL, None), on_store(**WRITTEN)),
    (
        f"import in {URL} {REWRITE}",
        "import_checkpoint",
        ("in", URL, ["a.*", "b"]),
        on_store(**REWRITTEN),
    ),
    (
        f"diff {URL} {OTHER}",
        "diff",
        (URL, OTHER, None),
        on_store(trust_pickle=False, other_storage_options=CHOSEN),
    ),
    (
        f"diff {URL} {OTHER} --keys a.* --trust-pickle",
        "diff",
        (URL, OTHER, ["a.*"]),
        on_store(trust_pickle=True, other_storage_options=CHOSEN),
    ),
    (f"inspect {URL}", "open", (URL,), on_store()),
    (f"average {URL} {OTHER}", "steps", (URL,), on_store(newest=8)),
    (
        f"average {URL} {OTHER} --last 2",
        "average",
        (["one", "two"], OTHER, "uniform", "model.*"),
        on_store(**AVERAGED),
    ),
    (
        f"average {URL} {OTHER} --last 2 --weights linear --keys a.* --overwrite --trust-pickle",
        "average",
        (["one", "two"], OTHER, "linear", ["a.*"]),
        on_store(overwrite=True, trust_pickle=True),
    ),
    (
        f"cp {URL} {OTHER}",
        "copy_checkpoint",
        (URL, OTHER),
        on_store(overwrite=False, streamed=False),
    ),
    *(
        (
            f"cp {URL} {OTHER} --{option}",
            "copy_checkpoint",
            (URL, OTHER),
            on_store(**{"overwrite": False, "streamed": False, option: True}),
        )
        for option in ("overwrite", "streamed")
    ),
    *(
        (f"verify {URL} {words}", "inspect.verify.verify_at", ((URL, "fsspec"),), settings)
        for words, settings in (
            ("", {"quick": False, "deep": False, "progress": True}),
            ("--quick", {"quick": True, "deep": False, "progress": True}),
            ("--deep", {"quick": False, "deep": True, "progress": True}),
        )
    ),
    *(
        (f"verify --run {URL} {words}", "verify_run", (URL,), on_store(**settings))
        for words, settings in (
            ("", {"quick": False, "deep": False}),
            ("--quick", {"quick": True, "deep": False}),
            ("--deep", {"quick": False, "deep": True}),
        )
    ),
    ("local ls /f", "local.folder.local_runs", (Local("/f"),), {}),
    ("local rm /f", "local.folder.remove_local_runs", (Local("/f"),), {}),
    ("serve", "cli.seaweedfs.SeaweedServer", (), {"port": None}),
    ("serve --port 9000", "cli.seaweedfs.SeaweedServer", (), {"port": 9000}),
    ("demo", "cli.demo.run_demo", (), SHOWN),
    (
        f"demo --ranks 3 --resume-ranks 2 --url {URL} --device cuda --report r.md",
        "cli.demo.run_demo",
        (),
        SHOWN_ON_GPUS,
    ),
]


@pytest.mark.parametrize(("words", "target", "arguments", "settings"), CALLS)
def test_each_option_and_its_default_is_passed_on(words, target, arguments, settings, monkeypatch):
    calls: list[tuple[object, object]] = []

    def record(*args: object, **named: object) -> None:
        plain = (
            (arg.url, arg.config.transport) if isinstance(arg, StoreSpec) else arg
            for arg in args
            if not isinstance(arg, EventSettings)
        )
        calls.append((tuple(plain), named))
        raise ConfigError("recorded")

    if target == "average":
        steps = [SimpleNamespace(url=name) for name in ("one", "two")]
        monkeypatch.setattr(dos, "steps", lambda *_, **__: steps)
    monkeypatch.setattr(f"dcp_objstore.{target}", record)
    done = run_here("--transport", "fsspec", *words.split())
    assert (done.returncode, "recorded" in done.stderr) == (2, True), done.stderr
    assert calls == [(arguments, settings)]


def test_the_transport_stands_before_the_command_and_holds_for_it_alone():
    wrong = run_here("--transport", "boto", "ls", URL)
    assert (wrong.returncode, "native, boto3, fsspec" in wrong.stderr) == (2, True)
    late = run_here("ls", "--transport", "boto3", URL)
    assert (late.returncode, "stands before the command" in late.stderr) == (2, True)
    unknown = run_here("ls", "--transports", "boto3", URL)
    assert (unknown.returncode, "stands before" in unknown.stderr) == (2, False)
    assert chosen() == {}


@pytest.mark.parametrize(("letter", "power"), [("K", 1), ("M", 2), ("G", 3), ("T", 4)])
def test_a_size_counts_in_thousands_or_with_an_i_in_1024(letter, power):
    for unit, base in ((f"{letter}B", 1000), (f"{letter}iB", 1024)):
        for written in (unit, unit.lower(), f" {unit}"):
            assert size_bytes("--size", f"1.5{written}") == 3 * base**power // 2


def test_durations_and_plain_sizes_are_read_and_anything_else_is_refused():
    read = {text: seconds(text) for text in ("7s", "90m", "1.5h", " 2d ")}
    assert read == {"7s": 7, "90m": 5400, "1.5h": 5400, " 2d ": 2 * DAY_SECONDS}
    for text in ("1", "", "h", "1w", "-1h", "1e3h", "1hh", "h1h"):
        with pytest.raises(ConfigError, match="not a duration"):
            seconds(text)
    assert size_bytes("--size", "12") == 12
    for text in ("0", "0KB", "", "KB", "1XB", "-1KB", "1KBB"):
        with pytest.raises(ConfigError, match=f"--size {text}: "):
            size_bytes("--size", text)
