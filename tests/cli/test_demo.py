"""The demo: it runs, proves what it says, cleans up behind itself, and fails when a proof fails."""

from __future__ import annotations

import dataclasses
import io
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

import dcp_objstore as dos
from dcp_objstore.cli.demo import (
    CONTEXT,
    ByteTransformer,
    Demo,
    DemoFailedError,
    Ranks,
    State,
    choose_batch,
    describe,
    failure_told,
    in_bucket,
    next_byte_loss,
    read_text,
    run_demo,
    tell,
)
from dcp_objstore.cli.seaweedfs import SeaweedServer
from dcp_objstore.errors import CheckpointNotFoundError, RankFailedError
from dcp_objstore.reports import LoadReport
from dcp_objstore.stores import StoreSpec, open_store
from tests.support import launcher
from tests.support.command_line import environment, examples, run_here
from tests.support.proxy import Asked, NetworkProxy, Refuse
from tests.support.ranks import PRELOAD
from tests.support.servers import BUCKET

COMMAND = [sys.executable, "-m", "dcp_objstore", "demo"]
PROMISED = [
    r"step-4 committed: .* 4 objects",
    r"step-8 committed: .* 4 objects",
    r"typed error \(RankFailedError\) on 3 of 3 surviving ranks in ",
    r"the torn save left 3 data objects and no _COMMIT marker",
    r"so it does not exist: dos.load raises CheckpointNotFoundError",
    r"step-8, saved by 4 ranks: state bit-identical: all \d+ SHA-256 digests agree",
    r"loss on the same batch: (\d\.\d+) when it was saved, \1 after the load",
    r"the job that starts again reads its bytes from this node: \d.* MiB from its copies, 0 B from",
    r"step-12 committed: .* 2 objects",
    r"loss goes on falling: .* at step 8, .* at step 12",
    r"steps 9 to 12 have the losses that they had before the kill",
    r"step-12, saved by 2 ranks: state bit-identical",
    r"loss on the same batch: (\d\.\d+) when it was saved, \1 after the load",
    r"FileSystemReader: state bit-identical",
    r"dcp_to_torch_save: state bit-identical",
]


def environment_of(server: SeaweedServer) -> dict[str, str]:
    return {
        **os.environ,
        "AWS_ENDPOINT_URL": server.endpoint_url,
        "AWS_ACCESS_KEY_ID": server.access_key,
        "AWS_SECRET_ACCESS_KEY": server.secret_key,
    }


def is_gone(session: int) -> bool:
    """No process of that session is left but zombies, which wait for their parent."""
    for process in psutil.process_iter():
        try:
            if os.getsid(process.pid) == session and process.status() != psutil.STATUS_ZOMBIE:
                return False
        except (psutil.NoSuchProcess, ProcessLookupError):
            continue
    return True


@pytest.fixture
def scratch() -> Iterator[Path]:
    """A temporary directory for the demo, with a short name: it is for sockets too."""
    with tempfile.TemporaryDirectory(prefix="d-") as name:
        yield Path(name)


def left_in(scratch: Path) -> list[str]:
    """What is not torch's own cache."""
    return [one.name for one in scratch.iterdir() if not one.name.startswith("torchinductor")]


def test_the_demo_keeps_its_promises_and_leaves_nothing(scratch: Path) -> None:
    process = subprocess.Popen(
        [*COMMAND, *examples()["demo"][2:]],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(scratch)},
        start_new_session=True,
    )
    output, complaints = process.communicate(timeout=280)
    assert process.returncode == 0, output + complaints
    assert complaints == ""
    assert "\x1b" not in output, "control characters where there is no terminal"
    shown = [line[4:] for line in output.splitlines() if line.startswith("  ✓ ")]
    assert len(shown) == len(PROMISED), output
    for line, promised in zip(shown, PROMISED, strict=True):
        assert re.match(promised, line), (line, promised)
    assert "All 15 proofs hold" in output.splitlines()[-1]
    assert_gone(process.pid)
    assert left_in(scratch) == []


def assert_gone(session: int) -> None:
    """The fork server needs a moment to see that its owner has ended."""
    pause = threading.Event()
    for _ in range(200):
        if is_gone(session):
            return
        pause.wait(0.05)
    pytest.fail("processes of the demo are left behind")


@pytest.mark.campaign  # half a minute
def test_ctrl_c_ends_everything_and_empties_the_users_prefix(
    seaweed: SeaweedServer, scratch: Path
) -> None:
    root = f"s3://{BUCKET}/demo-ctrl-c"
    store = open_store(root, seaweed.storage_options)
    process = subprocess.Popen(
        [*COMMAND, "--ranks", "2", "--url", root],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**environment_of(seaweed), "TMPDIR": str(scratch)},
        start_new_session=True,
    )
    assert process.stdout is not None
    for line in process.stdout:
        if "step-4 committed" in line:
            assert list(store.list()), "something was written"
            os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to all of them
            break
    _, complaints = process.communicate(timeout=60)
    assert process.returncode == 130
    assert complaints == "dcp-objstore: ended by Ctrl-C\n"
    assert list(store.list()) == []
    assert_gone(process.pid)
    assert left_in(scratch) == []


@pytest.mark.parametrize(
    ("url", "change", "status", "error"),
    [
        ("s4://bucket/x", {}, 2, "InvalidUrlError"),
        ("memory://store/x", {}, 2, "InputError"),
        ("s3://no-such-bucket/x", {}, 2, "BucketNotFoundError"),
        (f"s3://{BUCKET}/x", {"AWS_SECRET_ACCESS_KEY": "wrong"}, 2, "CredentialsError"),
        (f"s3://{BUCKET}/x", {"AWS_ENDPOINT_URL": "http://127.0.0.1:9"}, 3, "StoreUnavailable"),
    ],
)
def test_a_place_that_cannot_be_used_is_one_line_before_any_rank_starts(
    seaweed: SeaweedServer, url: str, change: dict[str, str], status: int, error: str
) -> None:
    done = run_here("demo", "--url", url, **{**environment(seaweed.storage_options), **change})
    assert done.returncode == status
    assert error in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert "Train on" not in done.stdout


def test_a_proof_that_fails_ends_the_demo_with_status_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def run(demo: Demo) -> None:
        demo.spec.open().put("left-over", b"x")
        raise DemoFailedError("the state differs")

    monkeypatch.setattr(Demo, "run", run)
    with pytest.raises(SystemExit) as caught:
        run_demo(ranks=2, resume_ranks=1, url=f"file://{tmp_path}", keep=False)
    assert caught.value.code == 1
    shown = capsys.readouterr()
    assert "✗ the state differs" in shown.out
    assert shown.err == "dcp-objstore: the demo failed: the state differs\n"
    assert list(open_store(f"file://{tmp_path}").list()) == [], "cleaned up all the same"


def test_keep_leaves_the_users_objects(tmp_path: Path) -> None:
    for keep in (True, False):
        with in_bucket(f"file://{tmp_path}/{keep}", keep=keep) as run:
            run.child("step-8").open().put("object", b"x")
        left = [meta.key for meta in open_store(f"file://{tmp_path}/{keep}").list()]
        assert [key.endswith("/step-8/object") for key in left] == ([True] if keep else [])


STATE = State(step=8, recorded_loss=3.0, fixed_loss=3.0, digests={"a": "1", "b": "2"})


def test_what_the_demo_wrote_is_removed_from_a_slow_bucket_with_as_many_retries_as_elsewhere(
    seaweed: SeaweedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked_to_wait = iter(range(4))

    def slow_down(asked: Asked) -> Refuse | None:
        is_told = asked.method == "DELETE" and next(asked_to_wait, None) is not None
        return Refuse(503, "SlowDown") if is_told else None

    with NetworkProxy(seaweed.storage_options) as proxy:
        for name, value in environment(proxy.storage_options).items():
            monkeypatch.setenv(name, value)
        with in_bucket(f"s3://{BUCKET}/demo-slow", keep=False) as run:
            run.open().put("step-1/object", b"body")
            proxy.plan = slow_down
    assert next(asked_to_wait, None) is None
    assert list(open_store(f"s3://{BUCKET}/demo-slow", seaweed.storage_options).list()) == []


def fails(prove: Callable[..., None], *args: object) -> bool:
    """Whether a proof does not hold."""
    try:
        prove(*args)
    except DemoFailedError:
        return True
    return False


@pytest.fixture
def told() -> Demo:
    """A demo that has nothing to prove yet."""
    return Demo(StoreSpec("memory://demo"), 4, 2, "/tmp")


@pytest.mark.parametrize(
    "digests", [{"a": "1", "b": "3"}, {"a": "1"}, {"a": "1", "b": "2", "c": "3"}]
)
def test_states_that_differ_are_not_called_identical(told: Demo, digests: dict[str, str]) -> None:
    loaded = dataclasses.replace(STATE, digests=digests)
    empty = dataclasses.replace(STATE, digests={})
    assert not fails(told.prove_identical, "x", STATE, [STATE, STATE])
    assert fails(told.prove_identical, "x", STATE, [STATE, loaded])
    assert fails(told.prove_identical, "x", empty, [empty])


def test_bytes_from_the_bucket_fail_the_proof_of_a_restart(told: Demo) -> None:
    def loaded(total_bytes: int, local_bytes: int) -> LoadReport:
        given: Any = dict.fromkeys(("needed_bytes", "seconds", "objects", "requests"), 1)
        return LoadReport(url="x", total_bytes=total_bytes, local_bytes=local_bytes, **given)

    prove, none = told.prove_from_the_node, loaded(0, 0)
    assert not fails(prove, [loaded(10, 10), none])
    assert fails(prove, [loaded(10, 9)])
    assert fails(prove, [none])


def test_losses_that_do_not_go_on_fail_the_proof(told: Demo) -> None:
    off, none = (dataclasses.replace(STATE, fixed_loss=loss) for loss in (3.001, None))
    assert not fails(told.prove_same_loss, STATE, [STATE])
    assert all(fails(told.prove_same_loss, STATE, [STATE, other]) for other in (off, none))
    assert fails(told.prove_falling, STATE, STATE)
    assert not fails(told.prove_falling, STATE, dataclasses.replace(STATE, recorded_loss=2.9))
    assert not fails(told.prove_same_path, {1: 9.0, 2: 2.0}, {2: 2.0001})
    assert all(fails(told.prove_same_path, {1: 9.0, 2: 2.0}, other) for other in ({2: 2.1}, {}))


def test_only_a_torn_save_counts_as_torn(told: Demo) -> None:
    keys = [f"__{rank}_0.{'a' * 24}.distcp" for rank in range(4)]
    assert not fails(told.prove_torn, keys[:3], keys[3])
    for wrong in (keys, keys[:2], [*keys[:3], "_COMMIT"]):
        assert fails(told.prove_torn, wrong, keys[3])


def test_survivors_without_a_typed_error_fail_the_proof(told: Demo) -> None:
    typed, killed = RankFailedError("rank 3 has ended"), -signal.SIGKILL
    assert not fails(told.prove_ended_cleanly, [typed, typed, killed], 1.0)
    for other in ("RuntimeError('gloo')", 1, 0):
        assert fails(told.prove_ended_cleanly, [typed, other, killed], 1.0)
        assert fails(told.prove_ended_cleanly, [typed, typed, other], 1.0)


def test_a_torn_checkpoint_that_loads_or_fails_otherwise_fails_the_proof(told: Demo) -> None:
    assert not fails(told.prove_invisible, CheckpointNotFoundError("none"))
    for other in (None, RankFailedError("of a rank")):
        assert fails(told.prove_invisible, other)


def test_digests_see_every_bit_and_every_value() -> None:
    progress = {"progress": {"step": 8, "loss": 3.0}}

    def digests(value: float = 0.0, lr: float = 0.1, shape: tuple[int, ...] = (4,)) -> Any:
        weights = torch.zeros(4)
        weights[3] = value
        model = {"w": weights.reshape(shape), "b": torch.tensor(1)}
        return describe({"model": model, "groups": [{"lr": lr}], **progress}).digests

    plain = digests()
    named = ["groups.0.lr", "model.b", "model.w", "progress.loss", "progress.step"]
    assert sorted(plain) == named
    for changed, key in (
        (digests(-0.0), "model.w"),
        (digests(lr=0.2), "groups.0.lr"),
        (digests(shape=(2, 2)), "model.w"),
    ):
        assert [name for name in named if changed[name] != plain[name]] == [key]


def test_how_a_rank_ended_is_known_whatever_ended_it(tmp_path: Path) -> None:
    """It raises an error of Python or of the library, or ends without a word."""
    launcher.warm_up(PRELOAD)  # all ranks of this process are forked from one server
    with Ranks(1) as job, pytest.raises(DemoFailedError, match="TypeError") as caught:
        list(job.successful())
    assert "Traceback" in caught.value.__notes__[0]
    nowhere = (f"file://{tmp_path}", {}), dos.Local(str(tmp_path)), 4, (8,), None
    with Ranks(1, *nowhere) as job, pytest.raises(CheckpointNotFoundError):
        list(job.successful())
    with Ranks(2, *nowhere) as job:
        assert job.kill(1)[1] == -signal.SIGKILL


def test_the_model_reads_real_text_and_learns_from_it() -> None:
    text = read_text()
    assert b"Python" in bytes(text.to(torch.uint8).tolist())
    torch.manual_seed(0)
    model = ByteTransformer()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    batch = choose_batch(text, 0, 2)
    assert batch.shape == (2, CONTEXT + 1)
    losses = []
    for _ in range(4):
        loss = next_byte_loss(model, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    assert model(batch[:1, :5]).shape == (1, 5, 256)


def test_no_position_of_the_model_sees_the_bytes_after_it() -> None:
    model = ByteTransformer().eval()
    tokens = choose_batch(read_text(), 0, 1)[:, :16]
    changed = tokens.clone()
    changed[0, 10] = (changed[0, 10] + 1) % 256
    with torch.no_grad():
        before, after = model(tokens), model(changed)
    torch.testing.assert_close(before[:, :10], after[:, :10])
    assert not torch.allclose(before[:, 10:], after[:, 10:])


class Terminal(io.StringIO):
    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("columns", [40, 60, 100])
def test_no_line_is_wider_than_the_terminal(
    columns: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setattr(sys, "stdout", terminal := Terminal())
    demo = Demo(StoreSpec("memory://demo"), 8, 4, str(tmp_path))
    tell("A headline that says what happens in this phase of the whole demo", "")
    demo.prove(True, "something was shown that needs more than forty columns to be told")
    demo.add_row("save, killed", 8, 24, 2**25, 0.5)
    demo.print_table()
    lines = re.sub(r"\x1b\[\d+m", "", terminal.getvalue()).splitlines()
    assert max(map(len, lines)) <= columns
    table = " ".join(" ".join(lines).split())
    for cell in ("save, killed", "32.0", "0.50"):
        assert cell in table


def test_a_stream_without_unicode_gets_plain_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="ascii"))
    with pytest.raises(SystemExit), failure_told():
        Demo(StoreSpec("memory://demo"), 8, 4, str(tmp_path)).prove(True, "shown")
        raise DemoFailedError("not shown …")
    assert raw.getvalue().decode() == "  ok shown\n  FAILED not shown ?\n"
