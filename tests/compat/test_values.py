"""A value that could run code is refused on load and announced on save; plain ones pass."""

from __future__ import annotations

import collections
import copy
import dataclasses
import datetime
import decimal
import errno
import functools
import http
import io
import pathlib
import pickle
import re
import warnings
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import DefaultSavePlanner

import dcp_objstore as dos
from dcp_objstore.compat import values
from dcp_objstore.compat.values import check_safe, check_vetted, warn_unsafe_value
from dcp_objstore.errors import (
    CheckpointCorruptError,
    RankFailedError,
    UnsupportedError,
    UntrustedPickleError,
)
from tests.support import hostile, hostile_cases
from tests.support.checkpoints import memory_url
from tests.support.hostile import saved


@dataclasses.dataclass
class Progress:
    step: int = 0


class Weights:
    """A class whose state is the storage of a tensor."""

    def __init__(self) -> None:
        self.storage = torch.ones(2).untyped_storage()

    def __getstate__(self) -> torch.UntypedStorage:
        return self.storage

    def __setstate__(self, storage: torch.UntypedStorage) -> None:
        self.storage = storage


class HostileState:
    """Sets attributes of a class that torch allows, when it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return setattr, (collections.OrderedDict, "hijacked", True)


# torch warns where a body's pickle protocol is not the one that it writes.
PROTOCOL_WARNING = pytest.mark.filterwarnings("ignore:Detected pickle protocol:UserWarning")

PLAIN: list[object] = [
    0, 2**70, -1.5, True, None, "text", b"bytes", complex(1, 2), [1, [2]], (1, 2), {1, 2},
    {"lr": 1e-3, "betas": (0.9, 0.95), 3: None, 2**64 - 1: 0}, collections.OrderedDict(a=1),
    torch.zeros(3), {"t": torch.ones(2, dtype=torch.bfloat16)}, torch.Size([1, 2]), torch.float32,
    torch.device("cpu"), torch.nn.Parameter(torch.zeros(2)), "x" * 100_000,
    list(torch.zeros(3, 9_000)),  # of one storage
]  # fmt: skip
INERT: list[object] = [
    io.BytesIO(b"ab\xff"), io.BytesIO(), b"", Path("/data"), pathlib.PureWindowsPath("c:/x"),
    datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC), datetime.datetime(2026, 1, 1, fold=1),
    datetime.date(2026, 1, 1), datetime.time(1, 2), datetime.timedelta(1, 2, 3),
    datetime.timezone(datetime.timedelta(hours=1), "CET"), range(3, 9, 2),
    collections.deque([1, [2]], maxlen=3), collections.deque(), np.float32(1.5),
    np.bool_(True), np.complex128(1j), np.arange(6, dtype=">i4").reshape(2, 3), np.zeros((0, 3)),
    np.asfortranarray(np.ones((2, 3))), np.array(2.0), np.ones((1,) * 32),
    np.random.default_rng(1).random(3000),
    {"rng": np.random.RandomState(1).get_state(), "t": torch.ones(2)}, [np.ones(2), np.ones(3)],
    collections.OrderedDict(seen=collections.deque([torch.zeros(2), np.int64(3)])),
    {np.int64(3): {1, 2}, datetime.date(2026, 1, 1): Path("x")},
]  # fmt: skip
UNSAFE: dict[str, object] = {
    "builtins.slice": slice(3),
    "collections.defaultdict": collections.defaultdict(int),
    "numpy.ndarray": np.array([{}], dtype=object),
    "numpy.dtype": np.datetime64("2026-01-01"),
    "http.HTTPStatus": http.HTTPStatus.NOT_FOUND,
    "re.RegexFlag": re.IGNORECASE | re.DOTALL,
    "decimal.Decimal": {decimal.Decimal(1): 2},
    f"{__name__}.Progress": Progress(1),
    "functools.partial": {"deep": [functools.partial(print)]},
    "builtins.setattr": HostileState(),
}


@pytest.mark.parametrize("value", PLAIN, ids=lambda value: type(value).__name__)
def test_plain_values_pass_and_are_saved_without_a_warning(value):
    body = saved(value)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            check_safe(body, "key", trust_pickle=False)
            warn_unsafe_value(body, "key", set())


def equal(found: Any, value: Any) -> bool:
    if isinstance(value, io.BytesIO):
        return found.getvalue() == value.getvalue() and found.tell() == value.tell()
    if isinstance(value, torch.Tensor):
        # A copy that is staged of a parameter is a tensor.
        return isinstance(value, type(found)) and torch.equal(found, value)
    if isinstance(value, np.ndarray):
        return type(found) is type(value) and np.array_equal(found, value)
    if isinstance(value, dict):
        return found.keys() == value.keys() and all(equal(found[k], value[k]) for k in value)
    if isinstance(value, list | tuple | collections.deque):
        return len(found) == len(value) and all(map(equal, found, value))
    return bool(found == value)


@pytest.mark.parametrize("value", INERT, ids=lambda value: type(value).__name__)
def test_values_that_run_nothing_pass_though_torch_refuses_them(value):
    body = saved(value)
    before = list(torch.serialization.get_safe_globals())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            check_safe(body, "key", trust_pickle=False)
            warn_unsafe_value(body, "key", set())
    found = torch.load(io.BytesIO(body), weights_only=False)
    assert type(found) is type(value)
    assert equal(found, value)
    assert list(torch.serialization.get_safe_globals()) == before


def saved_by(how: str, state: dict[str, Any], url: str) -> None:
    if how == "dos.save":
        dos.save(state, url, progress=False)
    elif how == "dos.async_save":
        dos.async_save(state, url).result()
    else:
        dcp.save(state, storage_writer=dos.ObjectStoreWriter(url, progress=False), no_dist=True)


@pytest.mark.parametrize("how", ["dos.save", "dos.async_save", "dcp.save"])
def test_values_pass_in_the_form_in_which_dcp_writes_them(how):
    # On the way it looks for attributes of a value, which may then pickle otherwise than before.
    values = [copy.deepcopy(value) for value in (*PLAIN, *INERT)]
    parts = dict | list | torch.Tensor  # not stored as one pickle
    state = {f"{n}": value for n, value in enumerate(values) if not isinstance(value, parts)}
    state |= {f"in-{n}": (copy.deepcopy(value),) for n, value in enumerate(values)}
    url = memory_url()
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*a load of .* needs")
        saved_by(how, dict(state), url)
    loaded = dos.read_state_dict(url)
    assert loaded.keys() == state.keys()
    for key, value in state.items():
        assert equal(loaded[key], value), value


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")  # by torch itself
@pytest.mark.parametrize("name", hostile_cases.USES)
def test_what_is_abused_below_passes_as_it_should_be(name):
    check_safe(hostile_cases.USES[name](), "key", trust_pickle=False)


@pytest.mark.parametrize("name", hostile_cases.ABUSES)
def test_what_abuses_a_value_that_runs_nothing_is_refused_and_changes_nothing(name):
    status = dict(vars(http.HTTPStatus.OK))
    with pytest.raises((UntrustedPickleError, CheckpointCorruptError, UnsupportedError)):
        check_safe(hostile_cases.ABUSES[name](), "key", trust_pickle=False)
    assert vars(http.HTTPStatus.OK) == status
    assert np.dtype("f4").byteorder == "="


def test_where_torch_may_load_nothing_else_it_decides_alone(monkeypatch):
    body = saved(["not one that is remembered" * 200, datetime.time(23, 59, 58)])
    for forced in ("1", "y", "yes", "TRUE"):
        monkeypatch.setenv("TORCH_FORCE_WEIGHTS_ONLY_LOAD", forced)
        with pytest.raises(UntrustedPickleError, match=r"datetime\.time"):
            check_safe(body, "key", trust_pickle=False)
    monkeypatch.setenv("TORCH_FORCE_WEIGHTS_ONLY_LOAD", "0")
    check_safe(body, "key", trust_pickle=False)


def test_an_error_names_only_what_keeps_a_value_from_being_loaded():
    with pytest.raises(UntrustedPickleError) as caught:
        check_safe(saved([datetime.date(2026, 1, 1), slice(3)]), "key", trust_pickle=False)
    assert "slice" in str(caught.value)
    assert "datetime" not in str(caught.value)


@pytest.mark.parametrize("name", UNSAFE)
def test_other_values_are_refused_with_key_type_and_remedy(name):
    body = saved(UNSAFE[name])
    for _ in range(2):
        with pytest.raises(UntrustedPickleError) as caught:
            check_safe(body, "model.extra", trust_pickle=False)
        assert caught.value.key == "model.extra"
        text = str(caught.value)
        assert name in text
        assert 0 < text.index("torch.serialization.add_safe_globals") < text.index("trust_pickle")
        pickle.loads(pickle.dumps(caught.value))
    check_safe(body, "model.extra", trust_pickle=True)


def test_the_error_names_the_key_that_was_asked_for_not_one_with_an_equal_value():
    body = saved(slice(3))
    for key in ("first", "second"):
        with pytest.raises(UntrustedPickleError) as caught:
            check_safe(body, key, trust_pickle=False)
        assert caught.value.key == key


@PROTOCOL_WARNING
@pytest.mark.filterwarnings("ignore:.*looks like a TorchScript archive")
@pytest.mark.parametrize("name", hostile_cases.RUNS)
def test_nothing_in_a_value_is_run(name):
    with pytest.raises((UntrustedPickleError, CheckpointCorruptError, UnsupportedError)):
        check_safe(hostile_cases.RUNS[name](), "key", trust_pickle=False)
    assert hostile.fired == []
    assert not hasattr(collections.OrderedDict, "x")
    assert not hasattr(torch.Tensor, "x")


@PROTOCOL_WARNING
def test_a_pickle_of_another_protocol_is_refused_and_not_called_damaged():
    with pytest.raises(UntrustedPickleError):
        check_safe(saved([1], pickle_protocol=4), "key", trust_pickle=False)


@pytest.mark.parametrize("value", [Progress(3), Weights()], ids=lambda value: type(value).__name__)
def test_what_the_user_declares_safe_passes_only_as_long_as_it_is_declared(value):
    body = saved(value)
    with torch.serialization.safe_globals([type(value)]):
        check_safe(body, "key", trust_pickle=False)
    with pytest.raises(UntrustedPickleError):
        check_safe(body, "key", trust_pickle=False)
    with torch.serialization.safe_globals([type(value)]):
        check_safe(body, "key", trust_pickle=False)


@PROTOCOL_WARNING
@pytest.mark.parametrize("value", [7, torch.zeros(5000)], ids=["small", "large"])
def test_a_damaged_value_is_corrupt_and_names_its_key(value):
    body = saved(value)
    damaged = [b"", b"garbage", body[: len(body) // 2], body[:-1], bytes(len(body)),
               pickle.dumps(7), pickle.dumps(Path("/a"))]  # fmt: skip
    if isinstance(value, int):
        at = body.index(b"K\x07.")
        damaged += [body[: at + n] + b"\xff" + body[at + n + 1 :] for n in (0, 2)]
    for broken in damaged:
        with pytest.raises(CheckpointCorruptError) as caught:
            check_safe(broken, "the.key", trust_pickle=False)
        assert caught.value.key == "the.key"
        assert caught.value.__cause__ is not None


def test_bytes_with_their_digests_are_not_called_damaged_whatever_they_are():
    too_large = hostile.v2(hostile.called("builtins.bytearray", hostile.long_number(1 << 33)))
    refused = (b"", b"a planner's own format", saved(7)[:-1], too_large)
    for strange in (*refused, hostile.v2(b"cm\nn" * 3), hostile.v2(b"N2")):
        with pytest.raises(UntrustedPickleError, match=r"torch\.save.*trust_pickle") as caught:
            check_safe(strange, "key", trust_pickle=False, is_verified=True)
        assert caught.value.key == "key"
        with pytest.warns(UserWarning, match=r"'key' is not what torch\.save writes"):
            warn_unsafe_value(strange, "key", set())
    for strange in refused:
        with pytest.raises(UntrustedPickleError) as caught:
            check_vetted(strange, "key")
        assert caught.value.key == "key"
    encrypted = hostile_cases.BROKEN["encrypted"]()  # as torch alone finds out
    with pytest.raises(UntrustedPickleError, match="PytorchStreamReader"):
        check_safe(encrypted, "key", trust_pickle=False, is_verified=True)


class OwnFormat(DefaultSavePlanner):
    def transform_object(self, write_item: Any, object: Any) -> Any:  # noqa: A002 - its name there
        return io.BytesIO(b"own format")


@pytest.mark.parametrize("verify", [True, False])
def test_a_format_of_a_planners_own_is_damaged_only_if_nothing_says_that_it_is_whole(verify):
    url = memory_url()
    with pytest.warns(UserWarning, match="not what torch.save writes"):
        writer = dos.ObjectStoreWriter(url, progress=False)
        dcp.save({"v": 1}, storage_writer=writer, planner=OwnFormat(), no_dist=True)
    with pytest.raises(UntrustedPickleError if verify else CheckpointCorruptError) as caught:
        dos.load({"v": 0}, url, verify=verify, progress=False)
    assert caught.value.key == "v"


class Fails:
    """A class that has changed since it was saved, so that it is built with an error."""

    error: BaseException = KeyError("value")

    def __init__(self) -> None:
        self.value = 1

    def __setstate__(self, _: object) -> None:
        raise self.error


CAUSES = [
    (KeyError("value"), UnsupportedError),
    (AttributeError("no such member"), UnsupportedError),
    (ValueError("3 is not a valid Color"), UnsupportedError),
    (ImportError("another library"), UnsupportedError),
    (MemoryError(), RankFailedError),
    (OSError(errno.EMFILE, "Too many open files"), RankFailedError),
    (torch.OutOfMemoryError("no memory on this device"), RankFailedError),
    (RuntimeError("out of bounds for storage"), UnsupportedError),
]


@pytest.mark.parametrize(("cause", "kind"), CAUSES, ids=lambda one: getattr(one, "__name__", ""))
@pytest.mark.parametrize("trust_pickle", [False, True])
def test_a_whole_value_that_cannot_be_built_is_an_error_by_its_cause_with_the_key(
    monkeypatch, cause, kind, trust_pickle
):
    url = memory_url()
    monkeypatch.setattr(Fails, "error", cause)
    with torch.serialization.safe_globals([Fails]):
        with pytest.warns(UserWarning, match="does not load again"):
            dos.save({"best": Fails()}, url, progress=False)
        for load in (dos.load, by_dcp):
            with pytest.raises(kind) as caught:
                load({"best": None}, url, trust_pickle=trust_pickle)
            assert caught.value.key == "best"
            assert type(cause).__name__ in caught.value.message
            pickle.loads(pickle.dumps(caught.value))
        with pytest.raises(kind, match=type(cause).__name__):
            dos.read_state_dict(url, trust_pickle=trust_pickle)


def by_dcp(state: dict[str, Any], url: str, **settings: Any) -> None:
    try:
        dcp.load(state, storage_reader=dos.ObjectStoreReader(url, **settings), no_dist=True)
    except dcp.api.CheckpointException as error:
        raise error.failures[0][0] from None


def test_what_ctrl_c_stops_is_raised_as_it_is(monkeypatch):
    body = saved(Fails())
    monkeypatch.setattr(Fails, "error", KeyboardInterrupt())
    with torch.serialization.safe_globals([Fails]), pytest.raises(KeyboardInterrupt):
        check_safe(body, "key", trust_pickle=False)


@pytest.mark.parametrize("trust_pickle", [False, True])
def test_a_class_that_is_gone_is_not_damage(monkeypatch, trust_pickle):
    url = memory_url()
    with torch.serialization.safe_globals([Progress]):
        dos.save({"best": Progress(1), "w": torch.ones(2)}, url, progress=False)
    monkeypatch.delitem(globals(), "Progress")
    for load in (dos.load, by_dcp):
        with pytest.raises(UnsupportedError if trust_pickle else UntrustedPickleError) as caught:
            load({"best": None}, url, trust_pickle=trust_pickle)
        assert caught.value.key == "best"
        assert "Progress" in caught.value.message


def test_a_program_that_maps_files_loads_values_as_any_other():
    url = memory_url()
    state = {"step": 5, "path": Path("x"), "t": (torch.ones(2),), "sparse": torch.ones(2)}
    dos.save(state, url, progress=False)
    values._cached_refusal.cache_clear()
    loaded: dict[str, Any] = {"step": 0, "path": None, "t": None, "sparse": torch.zeros(2)}
    # Not monkeypatch: when it undoes this, it deletes the setting, for all tests that follow.
    with torch.utils.serialization.config.patch("load.mmap", True):
        dos.load(loaded, url, progress=False)
        assert (loaded["step"], loaded["path"]) == (5, Path("x"))
        assert dos.read_state_dict(url)["step"] == 5
        with pytest.raises(UnsupportedError, match="mmap"):  # a planner of torch's own
            by_dcp({"step": 0}, url, progress=False)


@pytest.mark.parametrize("is_verified", [True, False])
def test_a_tensor_that_torch_cannot_build_is_not_damaged(monkeypatch, is_verified):
    url = memory_url()
    tensor = torch.quantize_per_tensor(torch.ones(3), 0.5, 0, torch.qint8)
    dos.save({"q": tensor}, url, progress=False)

    def no_memory(*_: Any, **__: Any) -> None:
        raise MemoryError

    monkeypatch.setattr(torch, "load", no_memory)
    with pytest.raises(RankFailedError, match="MemoryError") as caught:
        dos.load({"q": torch.empty_like(tensor)}, url, verify=is_verified)
    assert caught.value.key == "q"


def test_saving_an_unsafe_value_warns_once_per_key():
    body = saved(slice(3))
    warned: set[str] = set()
    with pytest.warns(UserWarning, match=r"'a'.*slice.*add_safe_globals.*trust_pickle=True"):
        warn_unsafe_value(body, "a", warned)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_unsafe_value(body, "a", warned)
    with pytest.warns(UserWarning, match="'b'"):
        warn_unsafe_value(body, "b", warned)
    assert warned == {"a", "b"}


def test_a_lack_of_memory_while_globals_are_looked_for_is_raised(monkeypatch):
    look = "get_unsafe_globals_in_checkpoint"
    monkeypatch.setattr(torch.serialization, look, Mock(side_effect=MemoryError))
    with pytest.raises(MemoryError):
        values.refused_globals(saved(slice(3)), pickle.UnpicklingError())


def test_what_is_not_trusted_is_named_in_order():
    unsafe = saved([zip(), slice(3), enumerate([]), reversed([])])
    names = ", ".join(
        f"builtins.{name}" for name in ("enumerate", "iter", "reversed", "slice", "zip")
    )
    with pytest.warns(UserWarning, match=f"needs {names} in"):
        warn_unsafe_value(unsafe, "a", set())


def test_equal_small_values_are_test_loaded_once(monkeypatch):
    loads: list[int] = []
    load = torch.load
    monkeypatch.setattr(torch, "load", lambda *args, **more: loads.append(1) or load(*args, **more))
    values._cached_refusal.cache_clear()
    for number in range(1000):
        warn_unsafe_value(saved({"lr": 1e-3}), f"optimizer.{number}.lr", set())
    assert len(loads) == 1
    assert len(saved({"lr": 1e-3})) <= values._CACHED_SIZE_BYTES
