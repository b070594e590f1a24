"""`max_failed_saves`: a store that is away for a while does not end the training."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest

import dcp_objstore as dos
from dcp_objstore import errors
from dcp_objstore.cli.seaweedfs import SeaweedServer
from dcp_objstore.write import async_save as async_api
from tests.support.managers import down, names, save_steps, state
from tests.support.ranks import run_ranks
from tests.support.servers import BUCKET
from tests.support.wrapped_stores import Fault, FaultStore

Failing = Callable[[dict[int, BaseException]], None]
AWAY = errors.StoreUnavailableError("the store is away")


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> Failing:
    """Background saves of some steps fail."""
    really = async_api.run_save

    def fail(of: dict[int, BaseException]) -> None:
        def run_save(writer: Any, *args: Any) -> Any:
            error = of.get(int(writer.checkpoint_id.rpartition("-")[2]))
            if error is not None:
                raise error
            return really(writer, *args)

        monkeypatch.setattr(async_api, "run_save", run_save)

    return fail


def train(url: str, last: int, every: int, **settings: Any) -> list[int]:
    """Call `step` with each step; how many saves had failed after each."""
    with dos.CheckpointManager(url, save_every=every, sweep=False, **settings) as run:
        counts = []
        for step in range(1, last + 1):
            run.step(step, state(step))
            counts.append(run.failed_saves)
    assert run.failed_saves == 0
    return counts


def test_training_goes_on_while_saves_fail_and_each_is_an_error_in_the_log(url, failing, caplog):
    stalled = errors.TransferStalledError("no byte moved")
    failing({4: AWAY, 6: stalled, 10: AWAY, 12: errors.CommitUnknownError("no answer")})
    counts = train(url, 14, every=2, max_failed_saves=2)
    assert names(url) == ["step-2", "step-8", "step-14"]
    # A failure is known once the next save begins, and a commit likewise.
    assert counts == [0, 0, 0, 0, 0, 1, 1, 2, 2, 0, 0, 1, 1, 2]
    texts = [one.getMessage() for one in caplog.records if one.levelno == logging.ERROR]
    told = [line for line in texts if "training goes on" in line]
    assert [line.split("step ")[1].split()[0] for line in told] == ["4", "6", "10", "12"]
    assert "has is 2. TransferStalledError: no byte moved" in told[1]
    assert "has is 8. StoreUnavailableError: the store is away" in told[2]
    assert "failure 2 in a row of the 2 that max_failed_saves allows" in told[3]


@pytest.mark.parametrize("allowed", [0, 1, 2])
def test_one_failure_more_than_allowed_is_raised(url, failing, allowed):
    failing(dict.fromkeys(range(1, 9), AWAY))
    reached = 0
    settings = {"max_failed_saves": allowed} if allowed else {}
    with (
        pytest.raises(errors.StoreUnavailableError, match="away"),
        dos.CheckpointManager(url, save_every=1, **settings) as run,  # type: ignore[arg-type]
    ):
        for reached in range(1, 9):
            run.step(reached, state(reached))
    assert reached == allowed + 2
    assert names(url) == []


@pytest.mark.parametrize(
    "error",
    [errors.StoreFullError("full"), errors.RankFailedError("died"), MemoryError("none left")],
    ids=lambda error: type(error).__name__,
)
def test_what_another_try_does_not_mend_is_raised_at_once(url, failing, error):
    failing({1: error})
    with dos.CheckpointManager(url, save_last=False, max_failed_saves=9) as run:
        assert run.async_save(1, state(1))
        with pytest.raises(errors.DcpObjstoreError, match=str(error)):
            run.async_save(2, state(2))


def test_the_save_of_the_last_step_is_raised_however_many_may_fail(url, failing):
    failing({2: AWAY})
    with pytest.raises(errors.StoreUnavailableError):
        train(url, 2, every=1, max_failed_saves=9)
    assert names(url) == ["step-1"]


def test_a_failure_before_a_last_step_that_is_committed_is_not_raised(url, failing):
    failing({2: AWAY})
    train(url, 3, every=2, max_failed_saves=1)
    assert names(url) == ["step-3"]


def test_a_save_that_is_waited_for_is_raised_and_lets_the_one_before_it_go(
    url, failing, monkeypatch
):
    failing({1: AWAY})
    with dos.CheckpointManager(url, max_failed_saves=1) as run:
        run.async_save(1, state(1))
        run.save(2, state(2))
        with monkeypatch.context() as patched:
            patched.setattr("dcp_objstore.write.api.save_planned", down)
            with pytest.raises(errors.StoreUnavailableError):
                run.save(3, state(3))
        run.save(3, state(3))
    assert names(url) == ["step-2", "step-3"]


@pytest.mark.parametrize("every", [1, timedelta(seconds=0.01)])
def test_a_save_that_cannot_begin_is_a_failed_one_and_is_tried_when_the_next_is_due(
    url, through, every
):
    """After it went back, a job looks for later steps before it saves, while training waits."""
    save_steps(url, range(1, 4))
    is_away, asked = False, 0

    def plan(verb: str, _key: str, _nth: int) -> Fault | None:
        nonlocal asked
        asked += is_away and verb == "list"
        return Fault("before", AWAY) if is_away and verb == "list" else None

    through(lambda store: FaultStore(store, plan))
    with dos.CheckpointManager(url, save_every=every, sweep=False, max_failed_saves=3) as run:
        assert run.load(state(0), 1) == 1
        is_away, step = True, 1
        while asked < 3:
            step += 1
            assert run.step(step, state(step)) is False
        assert run.failed_saves == 3
        assert every != 1 or step == 4, "once for each save that is due"
        is_away = False
        run.save(step + 1, state(step + 1))
        assert run.failed_saves == 0
    assert names(url) == ["step-1", f"step-{step + 1}"]


def on_a_rank(rank: int, _ranks: int, url: str, each: dict[str, list[int]]) -> dict[str, Any]:
    """Saves of steps 2 and 3 fail on rank 1; what each number of failures leads to."""
    really, ended = dos.ObjectStoreWriter.write_data, {}

    def write_data(writer: Any, *args: Any) -> Any:
        if rank and str(writer.checkpoint_id).endswith(("-2", "-3")):
            raise AWAY
        return really(writer, *args)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(dos.ObjectStoreWriter, "write_data", write_data)
        for name, allowed in each.items():
            at, allows = f"{url}/{name}", allowed[rank]
            try:
                with dos.CheckpointManager(at, save_every=1, max_failed_saves=allows) as run:
                    begun = [run.step(step, state(step)) for step in range(1, 6)]
                ended[name] = f"{begun}, {run.failed_saves}"
            except errors.DcpObjstoreError as error:
                ended[name] = str(error)
    return ended


def test_all_ranks_count_alike_whichever_of_them_has_failed(tmp_path):
    url = tmp_path.as_uri()
    for ended in run_ranks(2, on_a_rank, url, {"2": [2, 2], "1": [1, 1], "differs": [2, 1]}):
        assert ended["2"] == f"{[True] * 5}, 0"
        assert "the store is away" in ended["1"]
        assert "same max_failed_saves=" in ended["differs"]
    assert names(f"{url}/2") == ["step-1", "step-4", "step-5"]
    assert names(f"{url}/1") == ["step-1"]
    assert names(f"{url}/differs") == []


@pytest.mark.campaign
def test_a_server_that_is_away_for_some_saves_costs_these_and_no_others():
    hasty = dos.TransferConfig(max_retries=1, retry_timeout_seconds=1, stall_timeout_seconds=10)
    with SeaweedServer() as server:
        server.create_bucket(BUCKET)
        access: dict[str, Any] = {"storage_options": server.storage_options, "config": hasty}
        url = f"s3://{BUCKET}/{secrets.token_hex(4)}"
        with dos.CheckpointManager(url, save_every=2, max_failed_saves=3, **access) as run:
            for step in (2, 4, 6):
                run.step(step, state(step))  # 4 is committed
            server.kill()
            for step in (8, 10):
                run.step(step, state(step))
            assert run.failed_saves > 0
            server.restart()
            for step in (12, 14):
                run.step(step, state(step))
        assert run.failed_saves == 0
        kept = [step.name for step in dos.steps(url, storage_options=server.storage_options)]
        assert kept[:2] == ["step-2", "step-4"]
        assert kept[-2:] == ["step-12", "step-14"]
        assert "step-8" not in kept
