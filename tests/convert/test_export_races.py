"""Exports to one folder at the same time: what an index names is of one of them."""

from __future__ import annotations

import itertools
import random
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import dcp_objstore as dos
from dcp_objstore.config import MIB
from dcp_objstore.convert import export_folder
from dcp_objstore.errors import (
    DcpObjstoreError,
    InputError,
    LostRaceError,
    StoreUnavailableError,
)
from dcp_objstore.stores import ObjectStore, open_store
from dcp_objstore.threads import spawn
from tests.support.campaign import cases
from tests.support.checkpoints import memory_url
from tests.support.ranks import run_ranks
from tests.support.wrapped_stores import Request, Through, WatchedStore

INDEX = "model.safetensors.index.json"
# A shard for each of three tensors; one for two of them and one for the third; one file.
EACH, TWO, ONE = 400, 800, 10**9
SHARDS = [f"model-{number:05d}-of-00003.safetensors" for number in (1, 2, 3)]


def saved(url: str, number: float, **settings: Any) -> str:
    state = {f"w{key}": torch.full((10, 10), number) for key in range(3)}
    dos.save(state, url, progress=False, **settings)
    return url


@pytest.fixture
def mine(tmp_path: Path) -> str:
    return saved((tmp_path / "mine").as_uri(), 1.0)


@pytest.fixture
def other(tmp_path: Path) -> str:
    return saved((tmp_path / "other").as_uri(), 2.0)


def to(url: str, out: str, most: int = EACH, **settings: Any) -> None:
    dos.export_checkpoint(url, out, max_shard_size_bytes=most, progress=False, **settings)


def numbers_in(out: str) -> set[float]:
    """Of which checkpoints the exported weights are."""
    state = dos.read_state_dict(out, progress=False)
    assert len(state) == 3
    return {value for tensor in state.values() for value in tensor.flatten().tolist()}


def names_in(out: str) -> set[str]:
    return {meta.key for meta in open_store(out).list()}


UPLOAD = export_folder.upload_object


def at_file(
    monkeypatch: pytest.MonkeyPatch,
    number: int,
    call: Callable[[], object],
    *,
    is_written: bool = False,
) -> None:
    """Call something once, right before the file of this number, from 1, is put, or after that."""
    numbers = itertools.count(1)

    def upload(*args: Any, **settings: Any) -> Any:
        is_it = next(numbers) == number
        if is_it and not is_written:
            call()
        uploaded = UPLOAD(*args, **settings)
        if is_it and is_written:
            call()
        return uploaded

    monkeypatch.setattr(export_folder, "upload_object", upload)


def interrupt() -> None:
    raise KeyboardInterrupt


def new_folder(where: str, tmp_path: Path) -> str:
    return (tmp_path / "hf").as_uri() if where == "file" else memory_url()


@pytest.mark.parametrize("where", ["file", "memory"])
@pytest.mark.parametrize(
    ("most", "before"),
    cases(
        [(EACH, 1), (EACH, 2), (EACH, 3), (EACH, 4), (TWO, 1), (TWO, 2), (TWO, 3), (ONE, 1)],
        default=[(EACH, 1), (EACH, 4), (ONE, 1)],
    ),
)
@pytest.mark.parametrize("earlier", [False, True])
def test_an_export_that_ends_meanwhile_stays_whole_and_the_slower_one_fails(
    mine, other, tmp_path, monkeypatch, *, where, most, before, earlier
):
    """Whatever the slower one has looked at: the other ends right before a file is put."""
    out = new_folder(where, tmp_path)
    if earlier:
        to(saved(memory_url(), 3.0), out, TWO)
    at_file(monkeypatch, before, lambda: to(other, out, most, overwrite=True))
    with pytest.raises(LostRaceError, match="another export"):
        to(mine, out, most, overwrite=earlier)
    assert numbers_in(out) == {2.0}
    assert len(names_in(out)) == {EACH: 4, TWO: 3, ONE: 1}[most]
    to(mine, out, overwrite=True)
    assert numbers_in(out) == {1.0}


@pytest.mark.parametrize("most", [EACH, ONE])
@pytest.mark.parametrize("overwrite", [False, True])
def test_while_one_export_runs_no_other_begins_without_overwrite(
    mine, other, monkeypatch, *, most, overwrite
):
    out = memory_url()

    def refused() -> None:
        with pytest.raises(InputError, match="under way"):
            to(other, out)

    at_file(monkeypatch, 1, refused)
    to(mine, out, most, overwrite=overwrite)
    assert numbers_in(out) == {1.0}
    assert len(names_in(out)) == {EACH: 4, ONE: 1}[most]


@pytest.mark.parametrize(("most", "others", "before"), [(EACH, ONE, 4), (ONE, EACH, 1)])
def test_of_an_index_and_one_file_that_are_both_put_one_counts(
    mine, other, monkeypatch, *, most, others, before
):
    """They have other names, so no condition keeps the second from being put."""
    out = memory_url()
    at_file(monkeypatch, before, lambda: to(other, out, others, overwrite=True))
    with pytest.raises(LostRaceError, match="another export"):
        to(mine, out, most)
    assert numbers_in(out) == {2.0}
    assert len(names_in(out)) == {EACH: 4, ONE: 1}[others]


def before_request(
    through: Through, out: str, verb: str, key: str, number: int, call: Callable[[], object]
) -> None:
    """Call something before the request of this number, from 1, of a verb for a key there."""
    numbers = itertools.count(1)

    class Called(WatchedStore):
        @contextmanager
        def _around(self, request: Request) -> Iterator[None]:
            asked = (self.url, request.verb, request.key)
            if asked == (out, verb, key) and next(numbers) == number:
                call()
            yield

    through(Called)


def test_an_export_that_ended_between_two_looks_of_another_is_not_written_over(
    mine, other, through
):
    """The first look decides on the names of shards, the second on what is replaced."""
    out = memory_url()
    # Of mine: the other makes such requests itself, then.
    before_request(through, out, "list", "", 2, lambda: to(other, out))
    with pytest.raises(LostRaceError):
        to(mine, out, overwrite=True)
    assert (numbers_in(out), names_in(out)) == ({2.0}, {*SHARDS, INDEX})


@pytest.mark.parametrize("name", ["", "m.pt"])
def test_a_large_file_of_an_export_that_ended_before_it_was_begun_stays(mine, other, through, name):
    """In parts it is put without a condition."""
    out, config = memory_url(), dos.TransferConfig(part_size_bytes=5 * MIB)
    large, key = memory_url(), name or "model.safetensors"
    dos.save({"w": torch.ones(6 * MIB, dtype=torch.uint8)}, large, progress=False)
    target = f"{out}/{name}" if name else out
    before_request(
        through, out, "put", f"{key}.claim", 1, lambda: to(other, target, ONE, overwrite=True)
    )
    with pytest.raises(LostRaceError, match="another export"):
        to(large, target, 10**9, config=config)
    assert names_in(out) == {key}
    assert open_store(out).head(key).size_bytes < MIB


def test_one_file_of_another_beside_an_index_that_is_whole_goes(mine, other, monkeypatch):
    out, one = memory_url(), memory_url()
    to(other, one, ONE)
    body, _ = open_store(one).get("model.safetensors", max_size_bytes=MIB)
    at_file(monkeypatch, 4, lambda: open_store(out).put("model.safetensors", body))
    to(mine, out)
    assert (names_in(out), numbers_in(out)) == ({*SHARDS, INDEX}, {1.0})


def test_a_claim_that_a_killed_export_has_left_needs_overwrite_and_goes(mine, tmp_path):
    for out, last in ((memory_url(), "model.safetensors"), ((tmp_path / "x").as_uri(), "m.pt")):
        store = open_store(out)
        store.put(f"{last}.claim", b"of a dead one")
        target = out if last == "model.safetensors" else f"{out}/{last}"
        with pytest.raises(InputError, match="has died"):
            to(mine, target)
        to(mine, target, ONE, overwrite=True)
        assert names_in(out) == {last}


@pytest.mark.backends("seaweed")
@pytest.mark.parametrize("kept", [b"another's", b"mine"])
def test_a_small_file_of_the_export_that_has_won_stays(
    mine, other, bucket, tmp_path, monkeypatch, kept
):
    """Also if it has the same bytes, and so the same ETag."""
    out, settings = bucket.at("hf"), {"out_storage_options": bucket.storage_options}
    files = {name: tmp_path / f"of-{name}" / "config.json" for name in ("mine", "other")}
    for name, body in (("mine", b"mine"), ("other", kept)):
        files[name].parent.mkdir()
        files[name].write_bytes(body)

    def end() -> None:
        to(other, out, overwrite=True, copied_files=files["other"], **settings)

    at_file(monkeypatch, 5, end)  # mine has put its own, and is about to put its index
    with pytest.raises(LostRaceError):
        to(mine, out, copied_files=files["mine"], **settings)
    assert len(bucket.keys("hf")) == 5
    assert bucket.get("hf/config.json") == kept


@pytest.mark.parametrize(("most", "number"), [(EACH, 5), (ONE, 2)])
def test_an_overwrite_that_lost_puts_small_files_back_but_no_earlier_weights(
    mine, other, tmp_path, monkeypatch, most, number
):
    """What it has replaced may be of the export that has won."""
    out, config = memory_url(), tmp_path / "config.json"
    config.write_bytes(b"theirs")
    to(other, out, ONE, copied_files=config)
    config.write_bytes(b"mine")
    at_file(monkeypatch, number, lambda: open_store(out).put(INDEX, b"of another"))
    with pytest.raises(LostRaceError):
        to(mine, out, most, overwrite=True, copied_files=config)
    assert open_store(out).get("config.json", max_size_bytes=99)[0] == b"theirs"
    assert open_store(out).get(INDEX, max_size_bytes=99)[0] == b"of another"
    assert ("model.safetensors" in names_in(out)) == (most == EACH)


def test_a_file_that_another_has_written_meanwhile_is_not_put_back(
    mine, other, tmp_path, monkeypatch, through
):
    out, config = memory_url(), tmp_path / "config.json"
    config.write_bytes(b"earlier")
    to(other, out, copied_files=config)
    config.write_bytes(b"mine")
    at_file(monkeypatch, 5, interrupt)  # the index; mine has put its own config.json

    def put() -> None:
        open_store(out).put("config.json", b"of another")

    before_request(through, out, "put", "config.json", 2, put)
    with pytest.raises(KeyboardInterrupt):
        to(mine, out, copied_files=config, overwrite=True)
    assert open_store(out).get("config.json", max_size_bytes=99)[0] == b"of another"


def test_a_failed_export_leaves_none_of_its_small_files(mine, tmp_path, monkeypatch):
    (config := tmp_path / "config.json").write_text("{}")
    at_file(monkeypatch, 5, interrupt)  # the index; config.json is there
    with pytest.raises(KeyboardInterrupt):
        to(mine, out := memory_url(), copied_files=config)
    assert names_in(out) == set()


def test_what_a_failed_export_cannot_remove_is_named(mine, monkeypatch, through):
    def refuse() -> None:
        raise StoreUnavailableError("not now")

    before_request(through, out := memory_url(), "delete", SHARDS[0], 1, refuse)
    at_file(monkeypatch, 4, interrupt)
    with pytest.raises(KeyboardInterrupt) as caught:
        to(mine, out)
    assert caught.value.__notes__ == [f"{SHARDS[0]} could not be removed from {out}"]
    assert names_in(out) == {SHARDS[0]}


def test_a_small_file_that_may_be_of_another_export_stays(mine, tmp_path, monkeypatch):
    """Its PUT was refused, and the same bytes are there: perhaps by an earlier try of the PUT."""
    out, config = memory_url(), tmp_path / "config.json"
    config.write_bytes(b"same")

    def upload(store: Any, name: str, *args: Any, **settings: Any) -> Any:
        if name == INDEX:
            interrupt()
        if name == "config.json":
            open_store(out).put(name, b"same")
        return UPLOAD(store, name, *args, **settings)

    monkeypatch.setattr(export_folder, "upload_object", upload)
    with pytest.raises(KeyboardInterrupt):
        to(mine, out, copied_files=config)
    assert names_in(out) == {"config.json"}


def test_of_two_that_begin_in_the_same_instant_one_claims_the_place(mine, through):
    out, claim = memory_url(), "model.safetensors.claim"
    before_request(through, out, "put", claim, 1, lambda: open_store(out).put(claim, b"theirs"))
    with pytest.raises(LostRaceError):
        to(mine, out)
    assert names_in(out) == {claim}
    assert open_store(out).get(claim, max_size_bytes=99)[0] == b"theirs"


class Turns:
    """Lets one of two exports make requests at a time, and changes between them by chance.

    Args:
        draw: what decides; some requests to change something are not answered, or fail.
        fails: the share of those.
    """

    def __init__(self, draw: random.Random, fails: float) -> None:
        self._draw, self._fails = draw, fails
        self._condition = threading.Condition()
        self._running = {"mine", "other"}
        self._turn = draw.choice(["mine", "other"])

    def of(self, store: ObjectStore) -> ObjectStore:
        """Return the store as an export opens it, in its own thread."""
        owner = threading.current_thread().name.removeprefix("dcp_objstore-")
        turns = self

        class Turned(WatchedStore):
            @contextmanager
            def _around(self, request: Request) -> Iterator[None]:
                fault = turns.wait(owner, request)
                if fault == "before":
                    raise StoreUnavailableError("fails")
                yield
                if fault == "after":
                    raise StoreUnavailableError("not answered")

        return Turned(store)

    def wait(self, owner: str, request: Request) -> str | None:
        """Wait for a turn. Nothing comes between a look at a file and its deletion."""
        (other,) = {"mine", "other"} - {owner}
        with self._condition:
            if request.verb != "delete" and self._draw.random() < 0.4:
                self._turn = other
                self._condition.notify_all()
            is_it = partial(self._is_turn_of, owner, other)
            assert self._condition.wait_for(is_it, 60)
            if request.verb.startswith("put") and self._draw.random() < self._fails:
                return self._draw.choice(["before", "after"])
            return None

    def _is_turn_of(self, owner: str, other: str) -> bool:
        return self._turn == owner or other not in self._running

    def end(self, owner: str) -> None:
        with self._condition:
            self._running.remove(owner)
            self._condition.notify_all()


def race(seed: int, urls: Mapping[str, str], tmp_path: Path, through: Through) -> None:
    """Two exports to one place, of which those that report success are whole, or the last is."""
    draw = random.Random(seed)
    out = memory_url()
    config = {name: tmp_path / name / "config.json" for name in urls}
    earlier = draw.choice([None, EACH, TWO, ONE])
    if earlier is not None:
        to(urls["earlier"], out, earlier, copied_files=config["earlier"])
    turns = Turns(draw, fails=draw.choice([0, 0, 0.1]))
    is_out = [False]
    through(lambda store: turns.of(store) if is_out[0] and store.url == out else store)
    ended: dict[str, BaseException | dos.reports.ExportReport] = {}

    def run(name: str, most: int, *, overwrite: bool, copied: list[Path]) -> None:
        try:
            ended[name] = dos.export_checkpoint(
                urls[name],
                out,
                max_shard_size_bytes=most,
                copied_files=copied,
                overwrite=overwrite,
                progress=False,
            )
        except DcpObjstoreError as error:
            ended[name] = error
        finally:
            turns.end(name)

    is_out[0] = True
    threads = [
        threading.Thread(
            target=run,
            name=name,
            args=(name, draw.choice([EACH, TWO, ONE])),
            kwargs={
                "overwrite": draw.random() < 0.7,
                "copied": draw.choice([[], [config[name]]]),
            },
        )
        for name in ("mine", "other")
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    is_out[0] = False
    assert len(ended) == 2
    whole = {name: one for name, one in ended.items() if not isinstance(one, BaseException)}
    if not whole:
        assert earlier is None or numbers_in(out) == {3.0}, ended
        if earlier is None and all(type(error) is LostRaceError for error in ended.values()):
            assert names_in(out) <= {"config.json"}, ended
        return
    (number,) = numbers_in(out)
    winner = {1.0: "mine", 2.0: "other"}[number]
    names = {file.rpartition("/")[2] for file in whole[winner].files}
    assert names_in(out) >= names
    assert {name for name in names_in(out) if "safetensors" in name} <= names, ended
    if "config.json" in names:
        body, _ = open_store(out).get("config.json", max_size_bytes=99)
        assert body == config[winner].read_bytes()


@pytest.mark.parametrize("first", cases(range(0, 2000, 50), default=[0]))
def test_of_two_exports_by_chance_each_that_reports_success_is_whole_or_replaced(
    tmp_path, through, first
):
    """`race(seed, ...)` repeats one."""
    urls = {"mine": saved(memory_url(), 1.0), "other": saved(memory_url(), 2.0)}
    urls["earlier"] = saved(memory_url(), 3.0)
    for name in urls:
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(name)
    for seed in range(first, first + 50):
        try:
            race(seed, urls, tmp_path, through)
        except BaseException as error:
            error.add_note(f"seed {seed}")
            raise


def test_an_export_that_began_among_the_shards_of_another_spoils_none_of_them(
    mine, other, monkeypatch
):
    out = memory_url()
    reached, go_on, ended = threading.Event(), threading.Event(), threading.Event()

    def export_slowly() -> None:
        with pytest.raises(LostRaceError, match="another export"):
            to(other, out, overwrite=True)
        ended.set()

    def wait_at_the_last(store: Any, name: str, *args: Any, **settings: Any) -> Any:
        if threading.current_thread() is not main and name == INDEX:
            reached.set()
            assert go_on.wait(120)
        elif threading.current_thread() is main and name == SHARDS[2]:
            spawn(export_slowly, "slow")
            assert reached.wait(120)
        return UPLOAD(store, name, *args, **settings)

    main = threading.current_thread()
    monkeypatch.setattr(export_folder, "upload_object", wait_at_the_last)
    to(mine, out)
    assert numbers_in(out) == {1.0}
    go_on.set()
    assert ended.wait(120)
    assert numbers_in(out) == {1.0}
    assert names_in(out) == {*SHARDS, INDEX}


def test_shards_without_an_index_are_of_an_export_that_runs_or_died(mine):
    out = memory_url()
    open_store(out).put("model-00001-of-00002.safetensors", b"")
    with pytest.raises(InputError, match="overwrite"):
        to(mine, out)
    to(mine, out, overwrite=True)
    assert (len(names_in(out)), numbers_in(out)) == (4, {1.0})


@pytest.mark.backends("seaweed", "moto", "gcs", "azure")
def test_files_of_several_parts_are_known_to_be_the_exports_own(bucket):
    options = bucket.storage_options
    state = {"large": torch.ones(12 * MIB, dtype=torch.uint8), "small": torch.ones(1)}
    dos.save(state, bucket.at("step-1"), storage_options=options, progress=False)
    settings = {"config": dos.TransferConfig(part_size_bytes=5 * MIB), "storage_options": options}
    to(bucket.at("step-1"), bucket.at("hf"), 12 * MIB, **settings)
    assert len(bucket.keys("hf")) == 3


def lose_a_race(rank: int, world: int, url: str, out: str, options: Mapping[str, Any]) -> str:
    def then_another(*args: Any, **settings: Any) -> Any:
        uploaded = UPLOAD(*args, **settings)
        if rank == 1:
            open_store(out, options).put(SHARDS[1], b"of another export")
        return uploaded

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(export_folder, "upload_object", then_another)
        with pytest.raises(LostRaceError, match="another export") as caught:
            to(url, out, storage_options=options, process_group=dist.group.WORLD)
    return str(caught.value)


@pytest.mark.backends("seaweed", "moto", "gcs", "azure")
def test_all_ranks_lose_a_race_together(bucket):
    options = bucket.storage_options
    url = saved(bucket.at("step-1"), 1.0, storage_options=options)
    first, second = run_ranks(2, lose_a_race, url, bucket.at("hf"), options)
    assert first == second
    assert SHARDS[1] in first
    assert bucket.keys("hf") == [SHARDS[1]]
    assert bucket.get(f"hf/{SHARDS[1]}") == b"of another export"


@pytest.mark.parametrize("most", [EACH, ONE])
@pytest.mark.parametrize("where", ["file", "memory"])
def test_what_makes_an_export_count_is_written_last_and_what_was_there_goes_after_it(
    mine, tmp_path, requests, where, most
):
    out, last = new_folder(where, tmp_path), INDEX if most == EACH else "model.safetensors"
    (tmp_path / "zz.json").write_text("{}")
    for earlier in (EACH, ONE):
        to(mine, out, earlier, overwrite=True)
        requests.clear()
        to(mine, out, most, copied_files=tmp_path / "zz.json", overwrite=True)
        changed = [one for one in requests if one.verb in ("put", "put_stream", "delete")]
        keys = [one.key for one in changed if one.verb != "delete"]
        assert keys[-2:] == ["zz.json", last]
        removed = [one.key for one in changed[len(keys) :] if one.verb == "delete"]
        assert len(keys) + len(removed) == len(changed)
        assert INDEX not in removed[1:], "the earlier index goes first"
        assert names_in(out) == set(keys)


@pytest.mark.parametrize("most", [EACH, ONE])
@pytest.mark.parametrize("where", ["file", "memory"])
def test_an_overwrite_that_fails_leaves_the_earlier_export_as_it_was(
    mine, other, tmp_path, monkeypatch, *, where, most
):
    """Whichever file it fails at, before it is written and after."""
    out, config = new_folder(where, tmp_path), tmp_path / "config.json"
    config.write_text("earlier")
    to(other, out, TWO, copied_files=config)
    before = {name: open_store(out).get(name, max_size_bytes=MIB)[0] for name in names_in(out)}
    config.write_text("new")
    for number in range(1, 6 if most == EACH else 3):
        for is_written in (False, True):
            at_file(monkeypatch, number, interrupt, is_written=is_written)
            with pytest.raises(KeyboardInterrupt):
                to(mine, out, most, copied_files=config, overwrite=True)
            assert names_in(out) == set(before), (number, is_written)
            for name, body in before.items():
                assert open_store(out).get(name, max_size_bytes=MIB)[0] == body, (name, number)
    monkeypatch.setattr(export_folder, "upload_object", UPLOAD)
    to(mine, out, most, copied_files=config, overwrite=True)
    assert numbers_in(out) == {1.0}


def test_a_large_file_that_was_replaced_stays_if_the_export_fails(mine, other, monkeypatch):
    """It is too large to be kept in memory and put back, but the folder has one of the two."""
    monkeypatch.setattr(export_folder, "_PUT_BACK_MOST_BYTES", 0)
    out = memory_url()
    to(other, out, ONE)
    at_file(monkeypatch, 1, interrupt, is_written=True)
    with pytest.raises(KeyboardInterrupt):
        to(mine, out, ONE, overwrite=True)
    assert names_in(out) == {"model.safetensors"}
    assert numbers_in(out) == {1.0}
