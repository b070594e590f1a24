"""Saves in the background that the program does not wait for."""

from __future__ import annotations

import io
import subprocess
import sys
import threading
from typing import Any

import pytest
import torch

import dcp_objstore as dos
from dcp_objstore.write import program_end

# These start no thread any more: each thread of the save has to exist before.
_STARTS_NONE = (3, 12) <= sys.version_info < (3, 12, 3)

_PROGRAM = """
import atexit, concurrent.futures, sys, threading
import torch, torch.distributed as dist, torch.distributed.checkpoint as dcp
import dcp_objstore as dos

root, starts_none = sys.argv[1], sys.argv[2] == "True"

class Finder:
    def find_spec(self, name, path=None, target=None):
        if threading.current_thread() is not threading.main_thread():
            print("imported in a thread:", name)

sys.meta_path.insert(0, Finder())
for url in (f"{root}/imports", "memory://imports/run"):
    dos.async_save({"x": torch.ones(3), "n": {"a": 1}}, url).result()
del sys.meta_path[0]

from dcp_objstore.write import program_end
state = {"t": torch.ones(1 << 20)}
dist.init_process_group("gloo", init_method=f"{root}/rendezvous", rank=0, world_size=1)
dos.save(state, f"{root}/taken", progress=False)
begin = dos.ObjectStoreWriter.set_up_storage_writer

def begin_late(writer, *args, **kwargs):
    assert program_end._ended.wait(60)
    if not starts_none and writer.checkpoint_id.endswith("/dos"):
        # As asyncio does, and with it s3fs and gcsfs, to look up the name of a host.
        concurrent.futures.ThreadPoolExecutor().submit(int).result()
    return begin(writer, *args, **kwargs)

dos.ObjectStoreWriter.set_up_storage_writer = begin_late
if not starts_none:
    atexit.register(dos.async_save, state, f"{root}/atexit")
for name in ("taken", "dcp"):
    dcp.async_save(state, storage_writer=dos.ObjectStoreWriter(f"{root}/{name}"))
dos.async_save(state, f"{root}/dos")
"""


def test_a_program_that_ends_waits_for_its_saves_and_fails_loudly_if_one_is_lost(tmp_path):
    ended = subprocess.run(
        [sys.executable, "-c", _PROGRAM, tmp_path.as_uri(), str(_STARTS_NONE)],
        check=False,
        timeout=240,
        capture_output=True,
        text=True,
    )
    for name in ("dos", "dcp", *([] if _STARTS_NONE else ["atexit"])):
        loaded = {"t": torch.zeros(1 << 20)}
        dos.load(loaded, f"{tmp_path.as_uri()}/{name}", progress=False)
        assert loaded["t"].sum() == 1 << 20, ended.stderr
    # A child that is forked during an import waits for ever if it imports the same.
    assert "imported" not in ended.stdout
    assert ended.returncode == 120, ended.stderr
    assert ended.stderr.count("NOT saved") == 1
    assert "/taken was NOT saved: the program ended while it was uploading" in ended.stderr
    assert "CheckpointExistsError" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_a_program_has_ended_before_what_it_waits_for_is_called(monkeypatch):
    handlers: list[Any] = []
    seen: list[bool] = []
    monkeypatch.setattr("threading._register_atexit", handlers.append)
    monkeypatch.setattr(program_end, "_ended", threading.Event())
    program_end.at_program_end(lambda: seen.append(program_end.has_ended()))
    assert program_end.has_ended() is False
    (end,) = handlers
    end()
    assert seen == [True]


def test_a_program_without_standard_error_fails_all_the_same(monkeypatch):
    monkeypatch.setattr(sys, "stderr", None)
    monkeypatch.setattr(sys, "excepthook", lambda *_: None)
    program_end.show_lost("s3://bucket/step-1", OSError("lost"), "the store is down")
    stream: Any = sys.stderr
    stream.flush()
    monkeypatch.setattr(sys, "is_finalizing", lambda: True)
    with pytest.raises(RuntimeError, match="last save"):
        stream.flush()


@pytest.mark.parametrize("error", [AttributeError, RuntimeError])
def test_a_python_that_takes_no_more_handlers_can_import_the_library(error, monkeypatch):
    """It may have ended already, and a later Python need not have what is private."""

    def refuse(_: object) -> None:
        raise error

    monkeypatch.setattr("threading._register_atexit", refuse, raising=False)
    program_end.at_program_end(lambda: None)


@pytest.mark.parametrize(
    ("error", "bug"),
    [
        (dos.errors.StoreUnavailableError("lost"), False),
        (dos.errors.RankFailedError("lost"), True),  # of the user's code, perhaps
        (OSError("lost"), True),
    ],
)
def test_a_lost_save_is_shown_with_a_traceback_only_if_it_may_be_a_bug(error, bug, monkeypatch):
    shown = io.StringIO()
    monkeypatch.setattr(sys, "stderr", shown)
    with pytest.raises(type(error)):
        raise error
    program_end.show_lost("s3://bucket/step-1", error, "the store is down")
    assert error.__traceback__ is not None
    assert "s3://bucket/step-1 was NOT saved: the store is down" in shown.getvalue()
    assert "Error: lost" in shown.getvalue()
    assert ("Traceback" in shown.getvalue()) == bug


def test_the_exit_status_tells_of_a_lost_save_even_if_it_cannot_be_printed(monkeypatch):
    def fail(*_: object) -> None:
        raise ZeroDivisionError

    stream, flushed = io.StringIO(), []
    monkeypatch.setattr(stream, "flush", lambda: flushed.append(1))
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setattr(sys, "excepthook", fail)
    with pytest.raises(ZeroDivisionError):
        program_end.show_lost("s3://bucket/step-1", OSError("lost"), "the store is down")
    sys.stderr.flush()
    assert flushed == [1]
    monkeypatch.setattr(sys, "is_finalizing", lambda: True)
    with pytest.raises(RuntimeError, match="last save"):
        sys.stderr.flush()
    stream.close()
    assert not sys.stderr.closed
    with pytest.raises(RuntimeError, match="last save"):
        sys.stderr.flush()
    assert flushed == [1, 1]
