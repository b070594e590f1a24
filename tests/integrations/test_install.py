"""`install`: torch's storage classes save to and load from a bucket, and stay torch's elsewhere."""

from __future__ import annotations

import inspect
import os
import pathlib
import pickle
import shutil
import sys
import threading
from collections.abc import Iterator
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import (
    FileSystemReader,
    FileSystemWriter,
    _async_process_executor,
    state_dict_saver,
)
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save, torch_save_to_dcp
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

# As frameworks do, before anything is installed.
from torch.distributed.checkpoint.state_dict_saver import (
    AsyncCheckpointerType,
    async_save as async_save_imported_earlier,
)

import dcp_objstore as dos
from dcp_objstore import torch_private
from dcp_objstore.checkpoint.names import MARKER_KEY
from dcp_objstore.integrations import install as module
from tests.support.checkpoints import Options
from tests.support.ranks import run_alone, run_ranks
from tests.support.servers import Bucket

pytestmark = pytest.mark.filterwarnings("ignore:.*deprecated:FutureWarning")


@pytest.fixture(autouse=True)
def no_local_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing is installed after a test, and none leaves a folder `s3:` behind."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    yield
    dos.uninstall()
    assert list(Path().iterdir()) == []


def state(value: float = 0.0) -> dict[str, Any]:
    return {"weight": torch.full((64, 32), value), "step": int(value)}


def is_committed(bucket: Bucket, name: str) -> bool:
    return MARKER_KEY in bucket.keys(name)


def loaded(url: object) -> float:
    found = state()
    dcp.load(found, checkpoint_id=url)
    assert torch.equal(found["weight"], torch.full((64, 32), float(found["step"])))
    return float(found["step"])


def as_path(url: str) -> Path:
    return Path(url)


# What `os.path.abspath` and `pathlib` make of a URL, too.
FORMS = [str, as_path, os.path.abspath]


@pytest.mark.parametrize("form", FORMS)
def test_a_checkpoint_id_alone_is_committed_and_loaded(bucket, form):
    with dos.install(storage_options=bucket.storage_options):
        dcp.save(state(3), checkpoint_id=form(bucket.at("step-3")))
        assert is_committed(bucket, "step-3")
        assert loaded(form(bucket.at("step-3"))) == 3


@pytest.mark.parametrize(
    ("writer", "reader"), [(FileSystemWriter, FileSystemReader), (FsspecWriter, FsspecReader)]
)
@pytest.mark.parametrize("form", FORMS)
def test_torchs_classes_made_for_a_url_are_ours(bucket, writer, reader, form):
    dos.install(storage_options=bucket.storage_options)
    url = form(bucket.at("step-3"))
    made = writer(path=url, single_file_per_rank=False, thread_count=4)
    dcp.save(state(3), storage_writer=made, checkpoint_id=url)
    assert is_committed(bucket, "step-3")
    assert isinstance(made, dos.ObjectStoreWriter)
    found = state()
    dcp.load(found, storage_reader=reader(url), checkpoint_id=url)
    assert found["step"] == 3


def test_a_checkpoint_id_counts_more_than_the_path_that_a_class_was_made_with(bucket):
    """As in torch's tutorial of `async_save`: one writer for the run, a `checkpoint_id` a step."""
    dos.install(storage_options=bucket.storage_options)
    writer, reader = FileSystemWriter(bucket.url), FileSystemReader(bucket.url)
    for step in (1, 2):
        url = bucket.at(f"step-{step}")
        saved: Any = dcp.async_save(state(step), storage_writer=writer, checkpoint_id=url)
        saved.result()
        assert is_committed(bucket, f"step-{step}")
        found = state()
        dcp.load(found, storage_reader=reader, checkpoint_id=url)
        assert found["step"] == step


def test_storage_options_of_an_fsspec_writer_count(bucket):
    dos.install()
    url = bucket.at("step-3")
    dcp.save(state(3), storage_writer=FsspecWriter(url, **bucket.storage_options))
    assert is_committed(bucket, "step-3")
    found = state()
    dcp.load(found, storage_reader=FsspecReader(url, **bucket.storage_options))
    assert found["step"] == 3


def test_local_paths_and_subclasses_stay_torchs(tmp_path, bucket):
    class Own(FileSystemWriter):
        pass

    dos.install(storage_options=bucket.storage_options)
    assert type(FileSystemWriter(tmp_path / "a")) is FileSystemWriter
    assert type(FileSystemReader(str(tmp_path / "a"))) is FileSystemReader
    assert type(FsspecWriter(f"file://{tmp_path}/b")) is FsspecWriter
    for kind in (Own, type("FsspecWriter", (FileSystemWriter,), {})):
        assert type(kind("s3://bucket/key")) is kind
    assert type(HuggingFaceStorageWriter("memory://bucket/key")) is HuggingFaceStorageWriter
    assert not Own.validate_checkpoint_id("s3://bucket/key")
    for kind in (FileSystemWriter, FileSystemReader, FsspecWriter, Own):
        assert "path" in inspect.signature(kind).parameters
    dcp.save(state(3), checkpoint_id=tmp_path / "a")
    assert (tmp_path / "a" / ".metadata").exists()
    assert loaded(tmp_path / "a") == 3
    # Where a subclass writes is its own matter, whatever the path looks like.
    path = tmp_path / "s3:" / "b"
    writer = Own(path)
    dcp.async_save(state(3), checkpoint_id=path, storage_writer=writer).result()
    assert (path / ".metadata").exists()


def test_only_the_schemes_that_are_named_are_taken(tmp_path):
    dos.install(schemes=["memory", "file"])
    assert not FileSystemWriter.validate_checkpoint_id("s3://bucket/key")
    for url in (f"memory://{tmp_path.name}/a", f"file://{tmp_path}/a"):
        dcp.save(state(3), checkpoint_id=url)
        assert loaded(url) == 3
    assert (tmp_path / "a" / MARKER_KEY).exists()


def test_a_url_is_replaced_as_torch_does_unless_someone_says_no(bucket):
    url = bucket.at("step-3")
    with dos.install(storage_options=bucket.storage_options):
        dcp.save(state(3), checkpoint_id=url)
        dcp.save(state(4), checkpoint_id=url)
        with pytest.raises(dcp.api.CheckpointException, match="CheckpointExistsError"):
            dcp.save(state(5), storage_writer=FileSystemWriter(url, overwrite=False))
        with (
            dos.install(storage_options=bucket.storage_options, overwrite=False),
            pytest.raises(dcp.api.CheckpointException, match="CheckpointExistsError"),
        ):
            dcp.save(state(5), checkpoint_id=url)
        dcp.save(state(6), checkpoint_id=url)
        assert loaded(url) == 6


def test_afterwards_torchs_classes_do_what_they_did(tmp_path):
    with dos.install(), dos.install(schemes=["gs"]):
        assert not FileSystemWriter.validate_checkpoint_id("s3://bucket/key")
    assert not FileSystemWriter.validate_checkpoint_id("gs://bucket/key")
    dos.uninstall()
    assert type(FileSystemWriter(str(tmp_path / "s3:" / "b"))) is FileSystemWriter
    dcp.save(state(3), checkpoint_id=tmp_path / "s3:" / "b")
    assert loaded(tmp_path / "s3:" / "b") == 3


def test_torchs_tools_for_torch_save_read_and_write_buckets(bucket, tmp_path):
    torch.save(state(3), tmp_path / "in.pt")
    with dos.install(storage_options=bucket.storage_options):
        torch_save_to_dcp(tmp_path / "in.pt", bucket.at("step-3"))
        assert is_committed(bucket, "step-3")
        dcp_to_torch_save(bucket.at("step-3"), tmp_path / "out.pt")
    found = torch.load(tmp_path / "out.pt", weights_only=True)
    assert torch.equal(found["weight"], state(3)["weight"])


class Child:
    """Saves as torch's child does: by what was pickled, and with nothing installed."""

    def save(self, staged_state_dict: Any, **settings: Any) -> Any:
        sent = ForkingPickler.dumps((settings["checkpoint_id"], settings["storage_writer"]))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(module._Installed, "settings", None)
            url, writer = pickle.loads(sent)
            return dcp.save(staged_state_dict, checkpoint_id=url, storage_writer=writer)


def test_background_saves_are_committed_in_thread_and_process_mode(bucket, monkeypatch):
    monkeypatch.setattr(_async_process_executor, "_CHECKPOINT_PROCESS", Child())
    with dos.install(storage_options=bucket.storage_options):
        for number, save in enumerate((dcp.async_save, async_save_imported_earlier)):
            for mode in AsyncCheckpointerType:
                name = f"{mode.value}-{number}"
                saved: Any = save(
                    state(3), checkpoint_id=Path(bucket.at(name)), async_checkpointer_type=mode
                )
                saved.result()
                assert is_committed(bucket, name)
                assert loaded(Path(bucket.at(name))) == 3


def save_in_the_background(rank: int, world: int, url: str, options: Options) -> None:
    with dos.install(storage_options=options):
        for number, save in enumerate((dcp.async_save, async_save_imported_earlier)):
            step, mode = Path(f"{url}/{number}"), AsyncCheckpointerType.PROCESS
            saved: Any = save(state(3), checkpoint_id=step, async_checkpointer_type=mode)
            saved.result()
            assert loaded(step) == 3


@pytest.mark.campaign
@pytest.mark.filterwarnings("ignore")
def test_saves_by_torchs_own_child_are_committed(bucket):
    run_ranks(1, save_in_the_background, bucket.url, bucket.storage_options)
    assert is_committed(bucket, "0")
    assert is_committed(bucket, "1")


def save_while_training(rank: int, world: int, url: str, way: str) -> tuple[list[float], int]:
    """Rank 0 saves first, rank 1 trains first; return the sums, and the number of groups made."""
    begun, trained = threading.Event(), threading.Event()
    meta = dos.ObjectStoreWriter.storage_meta

    def storage_meta(writer: dos.ObjectStoreWriter) -> Any:
        begun.set()
        assert rank == 0 or trained.wait(30)
        return meta(writer)

    before, sums = torch_private.count_groups(), []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dos.ObjectStoreWriter, "storage_meta", storage_meta)
        if way == "writer":
            with dos.install(schemes=["file"]):
                pass  # what was installed has ended, and its hooks stay
            torchs_own = inspect.unwrap(torch_private.ThreadExecutor.execute_save)
            patch.setattr(torch_private.ThreadExecutor, "execute_save", torchs_own)
        else:
            dos.install(schemes=["file"])
        for step in (1, 2):
            begun.clear()
            trained.clear()
            to: dict[str, Any] = {"checkpoint_id": f"{url}/step-{step}"}
            if way == "writer":
                to = {"storage_writer": dos.ObjectStoreWriter(f"{url}/step-{step}")}
            save = async_save_imported_earlier if way == "imported" else dcp.async_save
            stager = DefaultStager(StagingOptions(False, False, False, False))
            future: Any = save({"w": torch.ones(2)}, async_stager=stager, **to)
            assert begun.wait(30)
            for _ in range(20):
                gradient = torch.ones(1)
                dist.all_reduce(gradient)
                sums.append(gradient.item())
            trained.set()
            getattr(future, "upload_completion", future).result(60)
    dos.uninstall()
    return sums, torch_private.count_groups() - before


@pytest.mark.parametrize("way", ["installed", "imported", "writer"])
def test_an_async_save_of_dcp_without_a_group_does_not_mix_with_the_training(tmp_path, way):
    url = (tmp_path / "run").as_uri()
    assert run_ranks(2, save_while_training, url, way) == [([2.0] * 40, 1)] * 2
    assert [step.name for step in dos.steps(url)] == ["step-1", "step-2"]


def test_a_save_that_runs_when_the_installation_ends_goes_where_it_was_sent(bucket, monkeypatch):
    ended = threading.Event()
    set_up = state_dict_saver._storage_setup

    def late(*args: Any, **kwargs: Any) -> Any:
        if threading.current_thread() is not threading.main_thread():  # torch 2.9 calls it twice
            assert ended.wait(60)
        return set_up(*args, **kwargs)

    monkeypatch.setattr(state_dict_saver, "_storage_setup", late)
    with dos.install(storage_options=bucket.storage_options):
        path = Path(bucket.at("step-3"))
        saved: Any = async_save_imported_earlier(state(3), checkpoint_id=path)
    ended.set()
    saved.result()
    assert is_committed(bucket, "step-3")


@pytest.mark.parametrize(
    ("path", "url"),
    [
        ("s3://b/k", "s3://b/k"),
        ("/home/S3:/b/k", "s3://b/k"),
        (Path("s3://b/k"), "s3://b/k"),
        ("s3:", "s3://"),
        ("file:///tmp/x", "file:///tmp/x"),
        ("gs://b/k", None),
        ("b/s3/k", None),
        (3, None),
    ],
)
def test_a_path_stands_for_the_url_that_it_was_made_of(path, url):
    assert module.url_in(path, {"s3", "file"}) == url


def test_a_function_for_urls_gets_the_store_first_and_others_go_to_the_original():
    config = dos.TransferConfig(max_retries=3)
    call = module.for_urls(lambda *args, **named: (args, named), lambda *args, **named: args, 1)
    with dos.install(storage_options={"key": "k", "secret": "s"}, config=config):
        (spec, *args), named = call("s3://b/1", "s3:/b/2", last=True)
        assert (spec.url, spec.storage_options["key"], spec.config) == ("s3://b/2", "k", config)
        assert (args, named) == (["s3://b/1", "s3:/b/2"], {"last": True})
        for others in (("s3://b/1",), ("s3://b/1", "local", 3)):
            assert call(*others, last=True) == others
    assert call("s3://b/1", "s3://b/2") == ("s3://b/1", "s3://b/2")


@pytest.mark.parametrize(
    ("installed", "given", "overwrite"),
    [(None, {}, True), (None, {"overwrite": False}, False), (True, {"overwrite": False}, True)],
)
def test_each_setting_reaches_the_writer_and_the_reader(
    installed, given, overwrite, tmp_path, monkeypatch
):
    made: list[Any] = []

    class Noted:
        def __init__(self, **settings: Any) -> None:
            made.append(settings)
            self.reset = made.append

    for name in ("InstalledWriter", "InstalledReader"):
        monkeypatch.setattr(module, name, Noted)
    settings: dict[str, Any] = {"config": dos.TransferConfig(max_retries=3), "local": tmp_path}
    ours = {**settings, "storage_options": {"key": "k"}, "schemes": ["S3"]}
    dos.install(**ours, overwrite=installed, trust_pickle=True, allow_unfenced=True)
    FsspecWriter("s3:/b/k", secret="s", **given)
    FsspecReader("s3:/b/k", secret="s")
    shared = {"storage_options": {"key": "k", "secret": "s"}, **settings}
    shared["local"] = dos.Local(str(tmp_path))
    writing = {**shared, "overwrite": overwrite, "allow_unfenced": True}
    assert made == [writing, "s3://b/k", {**shared, "trust_pickle": True}, "s3://b/k"]


def test_functions_that_install_replaces_are_still_pickled_by_their_names():
    """As programs do that hand them to a pool of processes."""
    dos.install()
    for function in (dcp.async_save, state_dict_saver.async_save):
        assert pickle.loads(pickle.dumps(function)) is function


def changed_by_install() -> list[str]:
    """The names that an import and `install` change, in a process that has torch."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "dcp_objstore"]:
        del sys.modules[name]
    modules = (os, os.path, pathlib, shutil, torch)
    before = [dict(vars(module)) for module in modules]
    import dcp_objstore as imported_anew

    imported_anew.install()
    assert imported_anew.install is not module.install
    assert FileSystemWriter.validate_checkpoint_id("s3://bucket/key")
    return [
        f"{module.__name__}.{name}"
        for module, names in zip(modules, before, strict=True)
        for name, value in names.items()
        if vars(module).get(name) is not value
    ]


def test_install_changes_nothing_but_distributed_checkpoint():
    assert run_alone(changed_by_install) == []


def test_what_cannot_be_kept_is_refused():
    with pytest.raises(dos.errors.ConfigError, match="at least one scheme"):
        dos.install(schemes="s3")
    with pytest.raises(dos.errors.ConfigError, match="at least one scheme"):
        dos.install(schemes=[])
    with pytest.raises(dos.errors.InvalidUrlError, match="s3a"):
        dos.install(schemes=["s3a"])
    with pytest.raises(dos.errors.ConfigError, match="TransferConfig"):
        dos.install(config=8)
    assert not FileSystemWriter.validate_checkpoint_id("s3://bucket/key")
    dos.install()
    with pytest.raises(dos.errors.UnsupportedError, match="_extensions"):
        FileSystemWriter("s3://bucket/key", _extensions=[object()])
    formats = torch.distributed.checkpoint.filesystem.SerializationFormat
    FileSystemWriter("s3://bucket/key", serialization_format=formats.TORCH_SAVE)
    with pytest.raises(dos.errors.UnsupportedError, match="serialization_format") as caught:
        FileSystemWriter("s3://bucket/key", serialization_format=formats.SAFETENSORS)
    assert caught.value.url == "s3://bucket/key"
    with pytest.raises(TypeError, match="path"):
        FileSystemWriter()


def test_a_torch_without_these_hooks_is_refused(monkeypatch):
    class Other:
        def execute_save(self, state: object) -> None: ...

    monkeypatch.setattr(module, "ProcessExecutor", Other)
    monkeypatch.setattr(module, "_hook", module._hook.__wrapped__)
    with pytest.raises(dos.errors.UnsupportedError, match=r"cannot hook torch 2\."):
        dos.install()
    assert not FileSystemWriter.validate_checkpoint_id("s3://bucket/key")


@pytest.mark.parametrize(
    ("ours", "settings", "own"),
    [
        (True, {}, True),
        (True, {"process_group": None, "no_dist": False}, True),
        (True, {"process_group": "given"}, False),
        (True, {"no_dist": True}, False),
        (False, {}, False),
    ],
)
def test_saves_with_our_writer_in_the_default_group_get_a_group_of_their_own(
    ours, settings, own, monkeypatch
):
    made: list[Any] = []
    monkeypatch.setattr(module, "own_group", lambda *args: made.append(args) or "own")
    writer: Any = (
        dos.ObjectStoreWriter("memory://own-group/run")
        if ours
        else dcp.FileSystemWriter("/tmp/none")
    )
    save = module._in_own_group(lambda *args, **settings: (args, settings))
    args, found = save(1, 2, storage_writer=writer, **settings)
    assert args == (1, 2)
    assert found.pop("storage_writer") is writer
    assert found == ({**settings, "process_group": "own"} if own else settings)
    config = writer._target.config if ours else None
    assert made == [(module.DCP_SAVES, None, config)] * own
