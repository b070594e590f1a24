"""The common part of writer and reader: which checkpoint a thread is aimed at, and typed errors."""

from __future__ import annotations

import copy
import io
import pickle
import threading
import warnings
from multiprocessing.reduction import ForkingPickler
from typing import Any

import pytest

from dcp_objstore.config import TransferConfig
from dcp_objstore.distributed import plugin
from dcp_objstore.distributed.plugin import (
    Target,
    by_cause,
    plugin_errors,
    reporting_failures,
    same_url,
    typed,
    url_of,
)
from dcp_objstore.errors import (
    CommitLostError,
    ConfigError,
    InvalidUrlError,
    RankFailedError,
    UnsupportedError,
)

SECRET = {"key": "user", "secret": "hush", "endpoint_url": "https://store.example"}
CONFIG = TransferConfig(part_size_bytes=6 << 20)


@pytest.mark.parametrize(
    ("error", "kind", "end"),
    [
        (MemoryError("full"), RankFailedError, "(MemoryError: full)"),
        (OSError("no files"), RankFailedError, "(OSError: no files)"),
        (RuntimeError("of torch"), RankFailedError, "(RuntimeError: of torch)"),
        (ValueError("a=3"), UnsupportedError, "(ValueError: a=3): change it"),
        (RecursionError("deep"), UnsupportedError, "(RecursionError: deep): change it"),
        (NotImplementedError("op"), UnsupportedError, "(NotImplementedError: op): change it"),
    ],
)
def test_an_error_with_a_value_of_the_state_says_whose_fault_it_is(error, kind, end):
    made = by_cause(error, "this cannot be pickled", "n", "change it")
    assert type(made) is kind
    assert (made.message, made.key) == (f"this cannot be pickled {end}", "n")
    assert "save plain data" in by_cause(ValueError(), "this", None).message


def test_an_error_gets_the_rank_and_the_url_that_it_lacks():
    ours = CommitLostError("lost", rank=1)
    assert typed(ours, 3, "s3://b/run") is ours
    assert (ours.rank, ours.url) == (1, "s3://b/run")
    theirs = typed(ZeroDivisionError("by 0"), 3, "s3://b/run")
    assert (type(theirs), theirs.message) == (RankFailedError, "ZeroDivisionError: by 0")
    assert (theirs.rank, theirs.url) == (3, "s3://b/run")
    for error in (CommitLostError("lost"), ZeroDivisionError()):
        with (
            pytest.raises((CommitLostError, RankFailedError)) as caught,
            plugin_errors(2, "s3://b"),
        ):
            raise error
        assert (caught.value.rank, caught.value.url) == (2, "s3://b")
        assert caught.value.__cause__ is (None if error is caught.value else error)
    with pytest.raises(KeyboardInterrupt), plugin_errors(2, None):
        raise KeyboardInterrupt


def test_ranks_with_different_urls_are_told_which():
    same_url(["s3://b/1", "s3://b/1"])
    with pytest.raises(InvalidUrlError, match="rank 0 has s3://b/1 and rank 1 s3://b/2"):
        same_url(["s3://b/1", "s3://b/2", "s3://b/1"])


def test_a_failure_is_reported_and_raised_if_there_is_a_plugin():
    class Fails:
        checkpoint_id = "s3://b/1"
        reported: list[BaseException] = []  # noqa: RUF012

        def _report_failure(self, error: BaseException) -> None:
            self.reported.append(error)

    error = KeyboardInterrupt()
    for fails in (Fails(), None):
        with pytest.raises(KeyboardInterrupt), reporting_failures(fails):
            raise error
    assert Fails.reported == [error]
    assert (url_of(Fails()), url_of(None)) == ("s3://b/1", None)


def in_a_thread(call: Any) -> Any:
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(call()))
    thread.start()
    thread.join()
    return found[0]


def test_a_thread_stays_aimed_and_others_follow_the_latest_aim():
    target = Target(None, SECRET, CONFIG)
    assert target.url is None
    with pytest.raises(ConfigError, match="no checkpoint URL"):
        target.spec  # noqa: B018
    target.aim("s3://b/1")
    assert (target.spec.storage_options["key"], target.spec.config) == ("user", CONFIG)
    in_a_thread(lambda: target.aim("s3://b/2"))
    assert target.url == "s3://b/1"
    assert in_a_thread(lambda: target.url) == "s3://b/2"
    assert target.used_now().storage_options["key"] == "user"


def test_a_url_that_no_save_has_used_is_not_exchanged_for_another():
    target = Target("s3://b/1", SECRET, CONFIG)
    target.aim("s3://b/1")
    with pytest.raises(ConfigError, match="two URLs") as caught:
        target.aim("s3://b/2")
    assert (caught.value.url, caught.value.advice) == ("s3://b/2", "leave one of them out")
    assert target.used_now().url == "s3://b/1"
    target.aim("s3://b/2")
    assert target.url == "s3://b/2"


@pytest.mark.parametrize("url", [None, "s3://b/1"])
def test_a_copy_is_aimed_alike_and_only_a_pickle_for_others_lacks_secrets(url):
    target = Target(url, SECRET, CONFIG)
    sent = io.BytesIO()
    ForkingPickler(sent, pickle.HIGHEST_PROTOCOL).dump(target)
    copies = {
        "deep": (copy.deepcopy(target), "hush"),
        "child": (pickle.loads(sent.getvalue()), "hush"),
        "pickled": (pickle.loads(pickle.dumps(target)), None),
    }
    for name, (made, secret) in copies.items():
        assert (made.url, made.config) == (url, CONFIG), name
        for _ in range(2):  # aimed at another, it keeps its options
            made.used_now() if made.url else made.aim("s3://b/2")
            assert made.spec.storage_options.get("secret") == secret, name
            assert made.spec.storage_options["endpoint_url"] == SECRET["endpoint_url"]
            made.aim("s3://b/3")
    assert b"hush" not in pickle.dumps(Target(None, {"of_another_library": "hush"}, CONFIG))
    unaimed = pickle.loads(pickle.dumps(Target(None, None, CONFIG)))
    assert (unaimed.url, unaimed.config) == (None, CONFIG)


def test_torchs_warning_of_no_group_is_ignored_once_and_no_other():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        plugin.single_process_is_fine()
        warnings.simplefilter("always", ImportWarning)
        before = [*warnings.filters]
        plugin.single_process_is_fine()
        assert [*warnings.filters] == before, "a change would show all warnings again"
        warnings.warn("torch.distributed is disabled, so one process saves", stacklevel=1)
        for others in (("torch.distributed is slow",), (plugin._NO_GROUP_TEXT, FutureWarning)):
            warnings.warn(*others, stacklevel=1)
    assert [one.category for one in caught] == [UserWarning, FutureWarning]
