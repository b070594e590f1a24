"""Errors travel between ranks by pickle; one that does not come back hangs the job."""

from __future__ import annotations

import copy
import pickle

import pytest

from dcp_objstore import errors
from dcp_objstore.errors import DcpObjstoreError


def family(root: type[DcpObjstoreError]) -> list[type[DcpObjstoreError]]:
    return [root, *(found for child in root.__subclasses__() for found in family(child))]


ALL = sorted(set(family(DcpObjstoreError)), key=lambda kind: kind.__name__)


def test_every_error_of_the_module_is_in_the_family():
    here = {value for value in vars(errors).values() if isinstance(value, type)}
    assert here <= set(ALL)
    assert len(ALL) >= 25


def test_every_error_survives_pickling():
    for kind in ALL:
        try:
            raise kind("what", 3, "model.weight", "__3_0.x.distcp", "s3://b/k") from OSError("why")
        except DcpObjstoreError as caught:
            error = caught
        error.status, error.code, error.advice = 503, "SlowDown", "do that; or this"
        protocols = range(pickle.HIGHEST_PROTOCOL + 1)
        sent = (pickle.loads(pickle.dumps(error, protocol)) for protocol in protocols)
        for back in (*sent, copy.copy(error)):
            assert type(back) is kind
            assert vars(back) == vars(error)
            assert str(back) == str(error)


def test_every_error_says_what_then_where_then_what_to_do():
    for kind in ALL:
        error = kind("what; and more", 1, url="s3://b/k", advice="do that")
        what, where, advice = str(error).splitlines()
        assert (what, where) == ("what; and more", "[rank 1, url 's3://b/k']"), kind
        assert advice in ("do that", "do that; dcp-objstore doctor 's3://b/k' finds out more")
        assert errors.one_line(error) == f"{what} {where}; {advice}"
        assert str(kind("what", advice="do that")).splitlines() == ["what", "do that"]


def test_the_doctor_is_named_where_the_store_does_not_answer_or_refuses():
    refuses = errors.CredentialsError, errors.PermissionDeniedError, errors.BucketNotFoundError
    for kind in ALL:
        is_named = "doctor" in str(kind("what", url="s3://b/k"))
        assert is_named is issubclass(kind, (errors.StoreUnavailableError, *refuses)), kind
    assert "doctor" not in str(errors.CredentialsError("what"))


def test_a_text_is_shown_with_escapes_and_on_one_line_and_an_advice_once():
    assert errors.printable("a\x1b\n\u202e\t", keep="\n\t") == "a\\x1b\n\\u202e\t"
    lines = {"": "", "a:\n  b\nc": "a: b; c", "a\n[b]\nc": "a [b]; c"}
    assert {text: errors.one_line(text) for text in lines} == lines
    error = DcpObjstoreError("what")
    for advice in ("do that", "or this", "that"):
        errors.add_advice(error, advice)
    assert error.advice == "do that; or this"


def test_what_an_error_says_of_its_place_is_added_once():
    for kind in ALL:
        bare = kind("what")
        assert str(bare) == "what"
        bare.at(rank=1).at(rank=2, object_key="k")
        assert (bare.rank, bare.object_key) == (1, "k")
        assert str(bare) == "what\n[rank 1, object k]"


@pytest.mark.parametrize(
    ("ours", "builtin"),
    [
        (errors.BucketNotFoundError, FileNotFoundError),
        (errors.ObjectNotFoundError, FileNotFoundError),
        (errors.CheckpointNotFoundError, FileNotFoundError),
        (errors.CheckpointExistsError, FileExistsError),
        (errors.PermissionDeniedError, PermissionError),
        (errors.TransferStalledError, TimeoutError),
        (errors.ConfigError, ValueError),
        (errors.InvalidUrlError, ValueError),
        (errors.AbsentKeyError, KeyError),
    ],
)
def test_an_error_is_also_the_one_that_python_raises(ours, builtin):
    error = ours("it is not there", 2, "model.w", "a/b", "s3://bucket/run")
    assert isinstance(error, builtin)
    assert str(error).startswith("it is not there\n[rank 2, key model.w, object a/b, url 's3://")
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), str(again), again.args) == (ours, str(error), ("it is not there",))
