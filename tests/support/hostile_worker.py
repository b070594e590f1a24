"""Loads hostile checkpoints through the public doors, in a process of its own with little memory.

A case that ends the process, or takes more memory than there is, cannot hurt anything else.
"""

from __future__ import annotations

import collections
import copyreg
import functools
import gc
import http
import logging
import os
import pickle
import resource
import shutil
import sys
import tempfile
import threading
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import filesystem, metadata as stock, planner
from torch.distributed.checkpoint.api import CheckpointException

import dcp_objstore as dos
from dcp_objstore.cli.inspect import _tree_lines
from tests.support import hostile, hostile_cases  # noqa: F401 - registers the cases

# Beyond what the process has when it begins with the first case. A claim of more than this cannot
# be allocated, so an attempt to is seen, whether or not its pages would have been touched.
HEADROOM_BYTES = 2 << 30
ACTIONS = ("os.", "subprocess.", "socket.connect", "shutil.rmtree", "ctypes", "pty.", "exec")
# What loading does by itself: threads, and reading the objects.
HARMLESS = ("os.listdir", "os.scandir", "os.putenv", "os.remove", "os.mkdir", "os.rmdir")

INSTALLED = (sys.prefix, sys.base_prefix, "<frozen")

events: list[str] = []
watching = False
# Before each door, for an input that is large: an error and the frames that it came through are a
# cycle with all that they hold, and are not to be counted several times.
collecting = False


def watch(event: str, args: tuple[object, ...]) -> None:
    if event == "exec" and getattr(args[0], "co_filename", "").startswith(INSTALLED):
        return  # a module of Python's or of a package is imported
    if watching and event.startswith(ACTIONS) and event not in HARMLESS:
        events.append(f"{event} {str(args)[:80]}")


def state_of_process() -> dict[str, Any]:
    """What hostile content could leave behind, by name."""
    classes = [
        *(vars(stock)[name] for name in stock.__all__),
        *(stock._MEM_FORMAT_ENCODING, filesystem._StorageInfo, filesystem._StoragePrefix),
        *(planner.ReadItem, planner.WriteItem, collections.OrderedDict, collections.Counter),
        *(torch.Tensor, torch.nn.Parameter, torch.Size, torch.dtype, torch.device, torch.layout),
        *(torch.storage.UntypedStorage, torch.storage.TypedStorage, type(fire_type), Path),
        *vars(dos.errors).values(),
    ]
    found: dict[str, Any] = {
        f"class {cls.__module__}.{cls.__qualname__}": {k: id(v) for k, v in vars(cls).items()}
        for cls in classes
        if isinstance(cls, type)
    }
    modules = (torch, torch.serialization, torch._utils, torch._tensor, pickle, copyreg, os)
    found |= {f"module {m.__name__}": {k: id(v) for k, v in vars(m).items()} for m in modules}
    for found_in_module in found.values():
        found_in_module.pop("__warningregistry__", None)
    return found | {
        # Text in a codec, and a warning's text, make Python import these.
        "sys.modules": {m for m in sys.modules if not m.startswith(("encodings.", "numpy."))},
        "safe globals": list(torch.serialization.get_safe_globals()),
        "a member of an enum": dict(vars(http.HTTPStatus.OK)),
        "a dtype of NumPy's": str(np.dtype("f4")),
        "copyreg": (dict(copyreg.dispatch_table), dict(copyreg._extension_registry)),  # type: ignore[attr-defined]
        "dtype": torch.get_default_dtype(),
        "device": torch.get_default_device(),
        "grad": torch.is_grad_enabled(),
        "threads of torch": torch.get_num_threads(),
        "environment": dict(os.environ),
        "folder": Path.cwd(),
        "collector": gc.isenabled(),
        "recursion": sys.getrecursionlimit(),
        "hooks": (sys.excepthook, threading.excepthook, sys.path[:], sys.meta_path[:]),
        "log levels": {
            name: logger.level
            for name, logger in logging.root.manager.loggerDict.items()
            if isinstance(logger, logging.Logger)
        },
    }


def fire_type() -> None:
    """For the type of functions."""


def chain(error: BaseException) -> list[BaseException]:
    found: list[BaseException] = []
    todo: list[BaseException | None] = [error]
    while todo:
        one = todo.pop()
        if one is not None and one not in found:
            found.append(one)
            todo += [one.__cause__, None if one.__suppress_context__ else one.__context__]
            if isinstance(one, CheckpointException):
                todo += [failure[0] for failure in one.failures.values()]
    return found


def outcome(act: Callable[[], object]) -> str:
    """`value`, the class of our error, or what is wrong with the one that was raised."""
    if collecting:
        gc.collect()
    try:
        act()
    except CheckpointException as error:
        shown = [failure[0] for failure in error.failures.values()]
        return _named(error, shown[0])
    except BaseException as error:  # noqa: BLE001 - that is the question
        return _named(error, error)
    return "value"


def _named(raised: BaseException, ours: BaseException) -> str:
    for one in chain(raised):
        if isinstance(ours, dos.errors.UnsupportedError) and "no memory for" in ours.message:
            break
        if isinstance(one, MemoryError) or "can't allocate memory" in str(one):
            return f"! tried to allocate: {type(one).__name__}: {str(one)[:200]}"
    if not isinstance(ours, dos.errors.DcpObjstoreError) or isinstance(
        ours, dos.errors.RankFailedError
    ):
        return f"! {type(ours).__name__}: {str(ours)[:300]}"
    if len(str(ours)) > 5_000:
        return f"! a message of {len(str(ours))} characters"
    try:
        pickle.loads(pickle.dumps(ours))
    except Exception as error:  # noqa: BLE001
        return f"! it does not travel: {error}"
    return type(ours).__name__


def doors(url: str) -> dict[str, str]:
    """What each public way to load the checkpoint ends in."""
    found: dict[str, str] = {}
    opened: list[dos.Checkpoint] = []
    found["open"] = outcome(lambda: opened.append(dos.open(url)))
    if opened:
        checkpoint = opened[0]

        def look() -> None:
            repr(checkpoint)
            for entry in checkpoint.values():
                repr(entry), entry.nbytes

        found["look"] = outcome(look)
        found["read"] = outcome(lambda: checkpoint.nested(checkpoint.read(progress=False)))
        found["verify"] = outcome(lambda: checkpoint.verify(deep=True, progress=False))
    keys = list(opened[0]) if opened else ["w"]
    state = {key: torch.zeros(2, 3) if key == "w" else 0 for key in keys[:3]}
    found["load"] = outcome(lambda: dos.load(dict(state), url, progress=False))
    if opened and found["load"] == "StateMismatchError":
        return found  # the stock planner finds it before our reader does, and has its own error
    reader = dos.ObjectStoreReader(url, progress=False)
    found["dcp.load"] = outcome(lambda: dcp.load(dict(state), storage_reader=reader, no_dist=True))
    return found


def conversions(url: str) -> dict[str, str]:
    """What looking at the whole of an opened checkpoint, and writing it elsewhere, ends in."""
    found: dict[str, str] = {}
    opened: list[dos.Checkpoint] = []
    if outcome(lambda: opened.append(dos.open(url))) != "value":
        return found
    (checkpoint,) = opened
    found["modules"] = outcome(lambda: list(_tree_lines(checkpoint.modules(), "")))
    found["diff"] = outcome(lambda: dos.diff(url, url, progress=False))
    with tempfile.TemporaryDirectory(prefix="hostile-") as out:
        for name in ("m.pt", "m.safetensors"):
            export = partial(dos.export_checkpoint, url, f"{out}/{name}", progress=False)
            found[name] = outcome(export)
    found["import"] = outcome(
        lambda: dos.import_checkpoint(url, IMPORTED, overwrite=True, progress=False)
    )
    return found


IMPORTED = "memory://hostile/imported"


def imported_file(body: bytes) -> str:
    """What the import of a file of `torch.save` ends in."""
    with tempfile.TemporaryDirectory(prefix="hostile-") as folder:
        file = Path(folder) / "state.pt"
        file.write_bytes(body)
        return outcome(
            lambda: dos.import_checkpoint(file, IMPORTED, overwrite=True, progress=False)
        )


def status(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) * 1024
    raise KeyError(name)


def run(case_id: str) -> dict[str, Any]:
    global watching, collecting
    case = hostile.CASES[case_id]
    place = Path(tempfile.mkdtemp(prefix="hostile-"))
    try:
        objects = case.build()
        for key, body in objects.items():
            (place / key).write_bytes(body)
        size_bytes = sum(map(len, objects.values()))
        del objects
        collecting = size_bytes > 50_000
        hostile.fired.clear()
        events.clear()
        before = state_of_process()
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins again
        resident = status("VmRSS")
        watching = True
        try:
            found = doors(f"file://{place}")
        finally:
            watching = False
        found |= conversions(f"file://{place}")
        if case.family.startswith(("our value", "our tensor blob")):
            found["import .pt"] = imported_file((place / hostile.DATA_KEY).read_bytes())
        resident = status("VmHWM") - resident
        after = state_of_process()
        changed = [
            f"{k}: {_difference(before[k], after[k])}" for k in before if before[k] != after[k]
        ]
    finally:
        shutil.rmtree(place)
    return {
        "outcomes": found,
        "fired": len(hostile.fired),
        "events": events,
        "changed": changed,
        "input_bytes": size_bytes,
        "resident_bytes": resident,
    }


def _difference(before: Any, after: Any) -> str:
    if isinstance(before, set):
        return str(sorted(after ^ before)[:20])
    if isinstance(before, dict):
        return str([k for k in {**before, **after} if before.get(k) != after.get(k)][:20])
    return f"{before} -> {after}"[:300]


@functools.cache
def prepare() -> None:
    """Warm up with what is valid, and limit the memory of this process, once."""
    sys.addaudithook(watch)
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    for case_id in hostile.WARM_UP:
        run(case_id)
    gc.collect()
    gc.freeze()
    limit = status("VmSize") + HEADROOM_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def answer(_rank: int, _world_size: int, case_id: str) -> dict[str, Any]:
    """In a worker of `ranks`: what a case ends in and leaves behind."""
    prepare()
    return run(case_id)
