"""The demo: it runs, proves what it says, cleans up behind itself, and fails when a proof fails."""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import psutil
import pytest
import torch

import dcp_objstore as dos
from dcp_objstore.cli import demo_crew
from dcp_objstore.cli.demo import Demo, a_run, digests, report_text, run_demo
from dcp_objstore.cli.demo_crew import Crew, DemoFailedError, Ended
from dcp_objstore.doctor.scratch import Scratch, Unremoved
from dcp_objstore.errors import CheckpointNotFoundError, RankFailedError
from dcp_objstore.stores import StoreSpec, open_store
from tests.support.command_line import environment, run_here
from tests.support.ranks import PRELOAD
from tests.support.servers import BUCKET
from tests.support.shared_servers import warm_up

COMMAND = [sys.executable, "-m", "dcp_objstore", "demo"]
PROMISED = [
    r"step-4 is committed: .* of {ranks} ranks",
    r"step-8 is committed: .* of {ranks} ranks",
    r"typed error \(RankFailedError\) on {left} of {left} surviving ranks?",
    r"the torn save left objects of {left} ranks?, no _COMMIT marker",
    r"so it does not exist: a load raises CheckpointNotFoundError, and the newest step is 8",
    r"step-8: state bit-identical: all \d+ SHA-256 digests agree",
    r"steps 9 to 12 have the losses that they had before the kill",
    r"step-12 is committed: .* of {resume} ranks?",
    r"all ranks ended after step \d+, saved it, and it is the newest committed step",
    r"one process, without a group: state bit-identical",
    r"stock torch, dcp_to_torch_save: state bit-identical",
]


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


def assert_proved(output: str, ranks: int, resume: int) -> None:
    """Each proof was shown, once and in order."""
    shown = [line[5:] for line in output.splitlines() if line.startswith("  ok ")]
    assert len(shown) == len(PROMISED), output
    for line, promised in zip(shown, PROMISED, strict=True):
        pattern = promised.format(ranks=ranks, left=ranks - 1, resume=resume)
        assert re.match(pattern, line), (line, pattern)
    assert "All 11 proofs hold" in output.splitlines()[-1]


def test_the_demo_keeps_its_promises(scratch, monkeypatch):
    """In this process, with ranks from the fork server of all tests: torch is imported already."""
    warm_up(PRELOAD)
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))
    done = run_here("demo", "--ranks", "2", "--resume-ranks", "1")
    assert (done.returncode, done.stderr) == (0, ""), done.stdout + done.stderr
    assert_proved(done.stdout, 2, 1)
    assert list(scratch.iterdir()) == []


@pytest.mark.campaign  # half a minute
def test_the_demo_as_a_process_leaves_nothing(scratch):
    process = subprocess.Popen(
        [*COMMAND, "--ranks", "3", "--resume-ranks", "2"],
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
    assert_proved(output, 3, 2)
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
def test_ctrl_c_ends_everything_and_empties_the_users_prefix(seaweed, scratch):
    root = f"s3://{BUCKET}/demo-ctrl-c"
    store = open_store(root, seaweed.storage_options)
    process = subprocess.Popen(
        [*COMMAND, "--ranks", "2", "--url", root],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **environment(seaweed.storage_options), "TMPDIR": str(scratch)},
        start_new_session=True,
    )
    for line in process.stdout:
        if "step  8" in line:  # so that step-4 is under way, or saved
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
    seaweed, url, change, status, error
):
    done = run_here("demo", "--url", url, **{**environment(seaweed.storage_options), **change})
    assert done.returncode == status
    assert error in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert "Train on" not in done.stdout


def test_a_proof_that_fails_ends_the_demo_with_status_1(monkeypatch, capsys, tmp_path):
    def run(demo: Demo) -> None:
        demo.spec.open().put("left-over", b"x")
        raise DemoFailedError("the state differs")

    monkeypatch.setattr(Demo, "run", run)
    with pytest.raises(SystemExit) as caught:
        run_demo(ranks=2, resume_ranks=1, url=f"file://{tmp_path}")
    assert caught.value.code == 1
    shown = capsys.readouterr()
    assert shown.err == "dcp-objstore: the demo failed: the state differs\n"
    assert list(open_store(f"file://{tmp_path}").list()) == [], "cleaned up all the same"


def test_a_run_that_cannot_be_removed_is_named(tmp_path, monkeypatch, capsys):
    for unremoved in (Unremoved(["key"], "403", listed=True), Unremoved([], "403", listed=False)):
        monkeypatch.setattr(Scratch, "remove", lambda _, unremoved=unremoved: unremoved)
        with pytest.raises(SystemExit), a_run(StoreSpec(tmp_path.as_uri()), Alone()) as run:
            pass
        assert capsys.readouterr().err == f"dcp-objstore: left behind: {run.url} (403)\n"


STATE = {"a": "1", "b": "2"}


def test_what_the_demo_wrote_is_removed_with_the_usual_retries(tmp_path):
    """The check before it has few of them."""
    spec = StoreSpec(tmp_path.as_uri())
    with a_run(spec, Alone()) as run:
        assert run.config == spec.config
        run.open().put("step-1/object", b"body")
    assert list(spec.open().list()) == []


def fails(prove: Callable[..., None], *args: object) -> bool:
    """Whether a proof does not hold."""
    try:
        prove(*args)
    except DemoFailedError:
        return True
    return False


def ended(outcome: Any, **notes: Any) -> Ended:
    return Ended(outcome, notes, "the end of its output")


class Alone:
    """A crew that runs nothing."""

    ranks, device, launcher, is_first = 4, "cpu", None, True

    def share(self, name: str, value: object) -> list[object]:
        return [value]


@pytest.fixture
def told(tmp_path: Path) -> Demo:
    """A demo of four ranks that has nothing to prove yet."""
    demo = Demo(StoreSpec(f"file://{tmp_path}"), cast(Crew, Alone()), None)
    demo.phases.append(("a phase", []))
    return demo


@pytest.mark.parametrize(
    "loaded", [{"a": "1", "b": "3"}, {"a": "1"}, {"a": "1", "b": "2", "c": "3"}, None]
)
def test_states_that_differ_are_not_called_identical(told, loaded):
    assert not fails(told.prove_identical, "x", STATE, [STATE, STATE])
    assert fails(told.prove_identical, "x", STATE, [STATE, loaded])
    assert fails(told.prove_identical, "x", {}, [{}])


def test_losses_that_do_not_go_on_are_no_resume(told):
    losses = {f"loss-{step}": 2.0 for step in range(9, 13)}
    torn = ended(-9, **{"saved-8": STATE}, **losses)
    right = ended(None, **{"loaded-8": STATE}, **losses)
    off = ended(None, **{"loaded-8": STATE}, **{**losses, "loss-12": 2.1})
    assert not fails(told.prove_resumed, torn, [right, right])
    assert fails(told.prove_resumed, torn, [off])
    assert fails(told.prove_resumed, torn, [right, ended(None, **losses)])


def test_a_rank_that_fails_otherwise_than_by_the_kill_ends_the_demo_with_its_output(told):
    typed, killed = RankFailedError("rank 1 has ended"), -signal.SIGKILL
    crew = cast(Any, told.crew)
    for outcomes, torn, failed in (
        ([typed, killed], True, None),
        ([None, None], False, None),
        ([typed, "ImportError('x')"], True, 1),
        ([None, 1], False, 1),
        ([typed, None], False, 0),
    ):
        crew.run = lambda *_, outcomes=outcomes, **__: [ended(one) for one in outcomes]
        if failed is None:
            assert [one.outcome for one in told.job(2, torn=torn)] == outcomes
            continue
        with pytest.raises(DemoFailedError, match=f"rank {failed} ended with") as caught:
            told.job(2, torn=torn)
        assert caught.value.__notes__ == ["the end of its output"]


def test_only_a_torn_save_counts_as_torn(told):
    keys = [f"__{rank}_0.{'a' * 24}.distcp" for rank in range(4)]
    assert not fails(told.prove_torn, keys[:3])
    for wrong in (keys, keys[:2], [*keys[:3], "_COMMIT"]):
        assert fails(told.prove_torn, wrong)


def test_survivors_without_a_typed_error_fail_the_proof(told):
    typed, killed = ended(RankFailedError("rank 3 has ended")), ended(-signal.SIGKILL)
    assert not fails(told.prove_ended_cleanly, [typed, typed, killed])
    for other in (ended("RuntimeError('gloo')"), ended(1), ended(None)):
        assert fails(told.prove_ended_cleanly, [typed, other, killed])
        assert fails(told.prove_ended_cleanly, [typed, typed, other])


def test_a_step_that_is_not_there_or_not_the_newest_fails_the_proofs(told):
    for step in (4, 8):
        dos.save({"w": torch.ones(1)}, f"{told.spec.url}/step-{step}", progress=False)
    assert not fails(told.prove_committed, 8, 1)
    assert fails(told.prove_committed, 8, 4)
    assert fails(told.prove_committed, 12, 1)
    torn = told.spec.child("step-12")
    assert not fails(told.prove_invisible, torn)
    assert fails(told.prove_invisible, told.spec.child("step-8"))
    for last in (None, 4, 8, 20):
        assert fails(told.prove_preempted, [ended(None, last=last)])
    dos.save({"w": torch.ones(1)}, f"{told.spec.url}/step-14", progress=False)
    assert fails(told.prove_preempted, [ended(None, last=14), ended(None, last=12)])
    assert fails(told.prove_invisible, torn), "the newest step is not 8"
    dos.save({"w": torch.ones(1)}, torn.url, progress=False)
    assert fails(told.prove_invisible, torn)


def test_digests_see_every_bit_and_every_value():
    def of(value: float = 0.0, lr: float = 0.1, shape: tuple[int, ...] = (4,)) -> Any:
        weights = torch.zeros(4)
        weights[3] = value
        model = {"w": weights.reshape(shape), "b": torch.tensor(1)}
        return digests({"model": model, "groups": [{"lr": lr}]})

    plain = of()
    named = ["groups.0.lr", "model.b", "model.w"]
    assert sorted(plain) == named
    for changed, key in ((of(-0.0), "model.w"), (of(lr=0.2), "groups.0.lr")):
        assert [name for name in named if changed[name] != plain[name]] == [key]
    assert of(shape=(2, 2))["model.w"] != plain["model.w"]


def fail_as(device: torch.device, notes: dict[str, Any], errors: list[BaseException]) -> None:
    import torch.distributed as dist

    rank = dist.get_rank()
    notes["rank"] = rank, str(device)
    if rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    raise errors[rank]


@pytest.mark.campaign  # a fork server of its own
def test_how_a_rank_ended_is_known_whatever_ended_it():
    """It raises an error of Python or of the library, or is killed."""
    warm_up(PRELOAD)  # all ranks of this process are forked from one server
    crew, errors = Crew(3, "cpu"), [TypeError("a"), CheckpointNotFoundError("b")]
    first, second, third = crew.run(3, fail_as, errors)
    assert first.outcome == "TypeError('a')"
    assert "Traceback" in first.log
    assert isinstance(second.outcome, CheckpointNotFoundError)
    assert third.outcome == -signal.SIGKILL
    assert [one.notes["rank"] for one in (first, second)] == [(0, "cpu"), (1, "cpu")]
    assert third.notes == {}


@pytest.mark.parametrize(
    ("env", "launcher_name", "rank"),
    [
        ({"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "h", "MASTER_PORT": "1"}, "torchrun", "1"),
        (
            {
                "SLURM_STEP_NUM_TASKS": "4",
                "SLURM_PROCID": "3",
                "SLURM_LOCALID": "1",
                "SLURM_STEP_TASKS_PER_NODE": "1,2(x3)",
                "SLURM_LAUNCH_NODE_IPADDR": "10.0.0.1",
                "SLURM_JOB_ID": "12345",
            },
            "srun",
            "3",
        ),
        ({"RANK": "0"}, None, None),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "4"}, None, None),  # a batch script, without srun
    ],
)
def test_the_ranks_of_an_allocation_are_found(env, launcher_name, rank, monkeypatch):
    for name in [name for name in os.environ if name.startswith(("SLURM_", "RANK", "WORLD_SIZE"))]:
        monkeypatch.delenv(name)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    found, variables = demo_crew._allocation()
    assert (found, variables.get("RANK")) == (launcher_name, rank)
    if found == "srun":
        assert (variables["MASTER_ADDR"], variables["MASTER_PORT"]) == ("10.0.0.1", "22345")
        assert (variables["LOCAL_WORLD_SIZE"], variables["LOCAL_RANK"]) == ("2", "1")
        assert variables["WORLD_SIZE"] == "4"
        monkeypatch.setenv("MASTER_ADDR", "h")
        monkeypatch.setenv("MASTER_PORT", "1")
        _, variables = demo_crew._allocation()
        assert (variables["MASTER_ADDR"], variables["MASTER_PORT"]) == ("h", "1")


def test_what_the_demo_cannot_do_is_said_before_any_rank_starts(tmp_path):
    url = ["--url", tmp_path.as_uri()]
    if not torch.cuda.is_available():
        done = run_here("demo", "--device", "cuda", *url)
        assert done.returncode == 2
        assert "torch sees 0 GPUs here" in done.stderr
    done = run_here("demo", "--ranks", "2", "--resume-ranks", "3", *url)
    assert done.returncode == 2
    assert "at most --ranks 2" in done.stderr
    under_torchrun = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    done = run_here("demo", *url, **under_torchrun)
    assert done.returncode == 2
    assert "torchrun has started 1 rank" in done.stderr
    under_torchrun["WORLD_SIZE"] = "2"
    for words, says in (((), "needs a store: --url"), ((*url, "--ranks", "3"), "without --ranks")):
        done = run_here("demo", *words, **under_torchrun)
        assert (done.returncode, says in done.stderr) == (2, True), done.stderr
    assert list(open_store(tmp_path.as_uri()).list()) == []


@pytest.mark.campaign  # a minute
@pytest.mark.parametrize("ranks", [2, 3])
def test_under_torchrun_the_demo_uses_the_ranks_that_are_there(ranks, seaweed, tmp_path):
    url, report = f"s3://{BUCKET}/demo-torchrun", tmp_path / "report.md"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={ranks}", "-m", "dcp_objstore", "demo"]
    done = subprocess.run(
        [*command, "--url", url, "--report", str(report)],
        env={**os.environ, **environment(seaweed.storage_options)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("All 11 proofs hold") == 1
    assert f"on {ranks - 1} of {ranks - 1} surviving ranks" in done.stdout
    assert f"{ranks} ranks started by torchrun" in report.read_text()
    assert list(open_store(url, seaweed.storage_options).list()) == []


def test_the_report_has_the_fields_of_the_issue_form_and_names_no_bucket(told, monkeypatch):
    form = (Path(__file__).parents[2] / ".github/ISSUE_TEMPLATE/benchmark-results.yml").read_text()
    url = "s3://secret-bucket/prefix"
    monkeypatch.setattr(sys, "argv", ["dcp-objstore", "demo", "--url", url, "--report", "x.md"])
    told.prove(True, "it was shown")
    speeds = dos.measure.bench(told.spec.url, size_bytes=1 << 20, seconds=0.1, progress=False)
    text = report_text(told, [speeds, speeds], 12.0, "a folder")
    fields = re.findall(r"^### (.*)$", text, re.M)
    labels = re.findall(r"^      label: (.*)$", form, re.M)
    assert fields == [label for label in labels if label in fields]
    assert {"Machine", "Store", "Command", "results.json"} <= set(fields)
    results = json.loads(re.findall(r"^```json\n(.*?)^```", text, re.M | re.S)[0])
    assert "**a phase**\n\n- it was shown\n" in text
    assert "\ndcp-objstore demo --url s3://... --report x.md\n" in text
    speed = results.pop("gib_per_second")
    for way in ("save", "plain_puts", "load", "plain_gets"):
        median = getattr(speeds, way).gib_per_second.median
        assert speed[way] == pytest.approx(2 * median, abs=1e-3)
    assert {name: results[name] for name in results if name != "versions"} == {
        "ranks": 4,
        "resume_ranks": 2,
        "launcher": None,
        "device": "cpu",
        "seconds": 12.0,
        "processes": 2,
    }
    # By its package, which may leave out the "+cpu" of its own name.
    assert results["versions"]["torch"] == importlib.metadata.version("torch")
    assert "secret-bucket" not in text
