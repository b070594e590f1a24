"""The marker: what is written comes back, damage is always seen, and how markers follow."""

from __future__ import annotations

import enum
import hashlib
import json
import re
import types
from contextlib import nullcontext
from datetime import UTC, datetime
from itertools import pairwise
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from dcp_objstore.checkpoint import index as ix, names
from dcp_objstore.checkpoint.marker import (
    Counts,
    IndexRef,
    Marker,
    check_user_metadata,
    decode_marker,
    encode_marker,
    left_out_of,
    new_id,
    next_marker,
    with_checksum,
)
from dcp_objstore.errors import CheckpointCorruptError, ConfigError, UnsupportedError

# A busy machine is no failure.
untimed = settings(deadline=None, max_examples=30, suppress_health_check=[HealthCheck.too_slow])
INDEX = IndexRef(key=names.index_key("0" * 24), size_bytes=5, sha256="ab" * 32)


def follow(old: Marker | None, *, claim: int = 0, **user_metadata: Any) -> Marker:
    return next_marker(
        old,
        commit_id=new_id(),
        index=INDEX,
        counts=Counts(tensors=1, blobs=2, objects=3, total_bytes=4),
        world_size=8,
        user_metadata=user_metadata,
        created_at=datetime(2026, 1, 2, tzinfo=UTC),
        claim=claim,
    )


def signed(**changes: Any) -> bytes:
    """A marker with other JSON fields and a right digest."""
    fields = json.loads(encode_marker(follow(None)))
    del fields["digest"]
    fields.update(changes)
    body = json.dumps(fields, separators=(",", ":")).encode()
    return body[:-1] + b',"digest":"%s"}' % hashlib.sha256(body).hexdigest().encode()


GOOD = encode_marker(follow(follow(None), note="ö", nested={"a": [1, 2.5]}))


# --- encoding


def test_marker_comes_back_equal():
    marker = follow(follow(None), note="ö", nested={"b": [1, 2.5, None, True], "a": {}})
    for state in ("committed", "deleting", "deleted"):
        changed = msgspec.structs.replace(marker, state=state, pins=("release",))
        assert decode_marker(encode_marker(changed)) == changed


def test_a_field_that_is_not_known_is_ignored_but_not_a_newer_format():
    body = signed(later="something")
    assert decode_marker(body).is_committed
    with pytest.raises(CheckpointCorruptError, match="digest"):
        decode_marker(body.replace(b"something", b"somethang"))
    for newer in (signed(format=3), b'{"format":3}'):
        with pytest.raises(UnsupportedError, match=r"the marker has format 3, .* up to 2; upgrade"):
            decode_marker(newer)


def test_a_marker_of_64_kib_is_written_and_read_and_a_byte_more_is_not():
    room = 64 * 1024 - len(encode_marker(follow(None, text="")))
    marker = follow(None, text="x" * room)
    assert decode_marker(encode_marker(marker)) == marker
    with pytest.raises(ConfigError, match="user_metadata"):
        encode_marker(follow(None, text="x" * (room + 1)))
    room = 64 * 1024 - len(signed(later=""))
    decode_marker(signed(later="x" * room))
    with pytest.raises(CheckpointCorruptError, match="at most"):
        decode_marker(signed(later="x" * (room + 1)))


NAMED = {"key": INDEX.key, "size_bytes": 2**31, "sha256": INDEX.sha256}


@pytest.mark.parametrize(
    ("field", "good", "bad"),
    [
        ("log", ["0" * 32] * 16, ["0" * 32] * 17),
        ("log", [], ["../x"]),
        ("pins", ["pin"] * 64, ["pin"] * 65),
        ("pins", ["x" * 200], ["x" * 201]),
        ("pins", ["x"], [""]),
        ("claim", 2**53, 2**53 + 1),
        ("base", 0, -1),
        ("world_size", 2**63 - 1, 2**63),
        ("world_size", 0, 1.5),
        ("generation", 2**63 - 1, 2**63),
        ("generation", 1, 0),
        ("format", 2, 0),
        ("put_on", "nothing", "nothing\n"),
        ("put_on", "", "0" * 31),
        ("state", "committed", "maybe"),
        ("commit_id", "0" * 32, "short"),
        ("user_metadata", {}, []),
        ("created_at", "2026-01-02T00:00:00Z", "2026-01-02T00:00:00"),
        ("index", NAMED, NAMED | {"size_bytes": 2**31 + 1}),
        ("index", NAMED, NAMED | {"size_bytes": -1}),
        ("index", NAMED, NAMED | {"sha256": "zz" * 32}),
    ],
)
def test_a_field_has_its_limits_whatever_the_digest_says(field, good, bad):
    read = getattr(decode_marker(signed(**{field: good})), field)
    assert json.loads(msgspec.json.encode(read)) == good
    with pytest.raises(CheckpointCorruptError, match=rf"the marker is damaged: .*{field}"):
        decode_marker(signed(**{field: bad}))


@pytest.mark.parametrize("state", ["committed", "deleting", "deleted"])
def test_only_a_tombstone_names_no_index_and_none_names_one_elsewhere(state):
    with pytest.raises(CheckpointCorruptError, match="dotted"):
        decode_marker(signed(state=state, index=NAMED | {"key": "../index"}))
    with nullcontext() if state == "deleted" else pytest.raises(CheckpointCorruptError):
        assert decode_marker(signed(state=state, index=None)).index is None


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (b"", "truncated"),
        (b"{}", "format"),
        (b'{"format":1}', "digest"),
        (GOOD[:-1], "truncated"),
        (GOOD + b" ", "digest"),
        (GOOD.replace(b'"digest"', b'"digits"'), "digest"),
        (GOOD.replace(b"1", b"2", 1), "digest"),
        (with_checksum(GOOD.replace(b"committed", b"\xff")), "(?i:utf-8)"),
        (with_checksum(b'{"format":1,"user_metadata":%s' % (b"[" * 20_000)), "truncated|depth"),
        (with_checksum(b'{"format":1,"x":%s}' % (b"[" * 20_000 + b"]" * 20_000)), "recursion"),
    ],
)
def test_what_is_wrong_with_a_marker_is_told(body, why):
    with pytest.raises(CheckpointCorruptError, match=rf"^the marker is damaged: .*({why})"):
        decode_marker(body)


def test_a_marker_that_is_not_told_more_is_the_least_that_can_be():
    marker = Marker(
        state="deleted",
        commit_id="1" * 32,
        write_id="2" * 32,
        generation=1,
        index=None,
        world_size=0,
        created_at=datetime(2026, 1, 2, tzinfo=UTC),
    )
    body = (
        b'{"format":1,"state":"deleted","commit_id":"%s","write_id":"%s","generation":1,"log":[],'
        b'"index":null,"counts":{"tensors":0,"blobs":0,"objects":0,"total_bytes":0},"world_size":0,'
        b'"created_at":"2026-01-02T00:00:00Z","user_metadata":{},"pins":[],"claim":0,"base":0,'
        b'"put_on":""}'
    ) % (b"1" * 32, b"2" * 32)
    digest = hashlib.sha256(body).hexdigest().encode()
    assert encode_marker(marker) == body[:-1] + b',"digest":"%s"}' % digest


@untimed
@given(at=st.integers(0, len(GOOD) - 1), byte=st.integers(0, 255))
def test_any_changed_byte_is_seen(at, byte):
    body = GOOD[:at] + bytes([byte]) + GOOD[at + 1 :]
    if body == GOOD:
        return
    with pytest.raises((CheckpointCorruptError, UnsupportedError)):
        decode_marker(body)


# --- evolution


def test_new_commit_counts_up_and_logs_what_it_replaces():
    markers = [follow(None)]
    assert (markers[0].generation, markers[0].log) == (1, ())
    for _ in range(40):
        markers.append(follow(markers[-1]))
    last = markers[-1]
    assert last.generation == 41
    assert last.log == tuple(marker.commit_id for marker in markers[-17:-1])
    assert [last.knows(marker.commit_id) for marker in markers] == [False] * 24 + [True] * 17
    assert len({marker.write_id for marker in markers}) == len(markers)
    old = msgspec.structs.replace(last, state="deleted", pins=("kept",))
    new = follow(old, claim=7)
    assert (new.is_committed, new.pins, new.log[-1]) == (True, (), old.commit_id)
    assert (markers[0].put_on, new.put_on) == ("nothing", old.write_id)
    assert [(marker.format, marker.claim) for marker in (last, new)] == [(1, 0), (2, 7)]


def test_counts_are_those_of_the_index():
    entries = [ix.ObjectEntry(names.data_key(n, 0, "0" * 24), 100 + n, None, b"") for n in range(3)]
    index = types.SimpleNamespace(tensors={"w": None}, blobs=("a", "b"), objects=entries)
    wanted = Counts(tensors=1, blobs=2, objects=3, total_bytes=303)
    assert Counts.of(index) == wanted  # type: ignore[arg-type]


# --- user metadata


@pytest.mark.parametrize(
    ("value", "why"),
    [
        (float("nan"), "['v'] is nan, which JSON cannot hold"),
        (float("inf"), "['v'] is inf, which JSON cannot hold"),
        (-(2**63) - 1, "['v'] does not fit in 64 bits"),
        (2**63, "['v'] does not fit in 64 bits"),
        (b"bytes", "['v'] is of type bytes, which JSON cannot hold"),
        (1j, "['v'] is of type complex, which"),
        ({1: 2}, "['v'] has a key of type int"),
        ({"a": [0, {2, 3}]}, "['v']['a'][1] is of type set, which"),
        ("\ud800", "['v'] holds \"\\ud800\", which is not Unicode"),
        ({"\ud800": 1}, "['v'] holds \"\\ud800\", which is not Unicode"),
    ],
    ids=repr,
)
def test_user_metadata_that_json_cannot_hold_is_refused_by_name(value, why):
    with pytest.raises(ConfigError, match="^" + re.escape(f"user_metadata{why}")):
        check_user_metadata({"v": value})


class Number(enum.IntEnum):
    ONE = 1


class Text(str):
    __slots__ = ()


class Real(float):
    __slots__ = ()


def test_user_metadata_becomes_plain_values():
    mapping = types.MappingProxyType
    fancy = mapping({Text("a"): (Number.ONE, Real(2.5), Text("x"), True, None), "b": mapping({})})
    plain = check_user_metadata(fancy)
    assert plain == {"a": [1, 2.5, "x", True, None], "b": {}}
    assert type(plain) is type(plain["b"]) is dict
    assert [type(value) for value in plain["a"]] == [int, float, str, bool, type(None)]
    assert [type(name) for name in plain] == [str, str]
    integers = {"least": -(2**63), "most": 2**63 - 1}
    assert check_user_metadata(integers) == integers


def test_user_metadata_is_bounded():
    deep: object = 1
    for number in range(31):
        deep = {"in": deep} if number % 2 else [deep]
    assert check_user_metadata({"value": deep}) == {"value": deep}
    # With the quotes, the name and the braces: 32 KiB.
    assert check_user_metadata({"value": "x" * (32 * 1024 - 12)})
    for value, why in (("x" * (32 * 1024 - 11), "has 32769 bytes"), ([deep], "deep")):
        with pytest.raises(ConfigError, match=why):
            check_user_metadata({"value": value})
    with pytest.raises(ConfigError, match="deep"):
        check_user_metadata({"value": {"in": deep}})
    looped: list[object] = []
    looped.append(looped)
    with pytest.raises(ConfigError, match="deep"):
        check_user_metadata({"value": looped})
    for wrong, why in (([1], "must be a mapping, got list"), ({1: 2}, "a key of type int")):
        with pytest.raises(ConfigError, match=f"^user_metadata .*{why}"):
            check_user_metadata(wrong)  # type: ignore[arg-type]


@untimed
@given(
    st.dictionaries(
        st.text(max_size=10),
        st.recursive(
            st.none()
            | st.booleans()
            | st.integers(-(2**63), 2**63 - 1)
            | st.floats(allow_nan=False, allow_infinity=False)
            | st.text(max_size=10),
            lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner),
            max_leaves=5,
        ),
        max_size=3,
    )
)
def test_user_metadata_comes_back_equal(values):
    marker = follow(None, values=check_user_metadata(values))
    assert decode_marker(encode_marker(marker)).user_metadata["values"] == values
    assert check_user_metadata(None) == {}


# --- names


def test_names_are_parsed_back():
    nonce, other = names.new_nonce(), names.new_nonce()
    assert nonce != other
    assert len(nonce) * 4 == 96, "bits"
    key = names.data_key(3, 12, nonce)
    assert key == f"__3_12.{nonce}.distcp"
    assert names.parse_data_key(key) == names.DataName(3, 12, nonce)
    assert names.is_index_key(names.index_key(nonce))
    for other in ("_COMMIT", ".metadata", "__0_0.distcp", "x/" + key, key + "\n", key.upper()):
        assert names.parse_data_key(other) is None
        assert not names.is_index_key(other)


def test_a_sweep_aborts_uploads_to_the_keys_that_are_written_here_and_to_no_others():
    nonce = names.new_nonce()
    written = [
        *("_COMMIT", ".metadata", "_CLAIM", names.data_key(0, 0, nonce), names.index_key(nonce)),
        *(names.beacon_key(nonce), f".probe-{nonce}", f".probe-{nonce}-race"),
    ]
    others = ["", "a", "_COMMIT2", "index.msgpack", "__0_0.distcp", ".save-", f".probe-{nonce}-2"]
    assert [key for key in (*written, *others) if names.is_upload_key(key)] == written


def test_the_numbers_in_names_are_ordered_as_numbers():
    """Digits come before all else; other scripts' digits are letters here."""
    order = ["", "1", "2a", "10", "10-1", "a", "a1", "a1-9", "a1-10", "a2", "a10", "a10b", "b", "٣"]
    assert all(a < b for a, b in pairwise(map(names.natural_order, order)))


BAD_KEYS = ["", "/a", "a/", "a//b", ".", "..", "a/../b", "a/.", "a\0", "a\n", "a\\b", "s3://b/k"]
BAD_KEYS += ["x" * 1025, "ä" * 512 + "a", "\ud800"]


@pytest.mark.parametrize("key", BAD_KEYS, ids=ascii)
def test_a_key_stays_inside_the_checkpoint_and_is_one_that_a_store_takes(key):
    with pytest.raises(CheckpointCorruptError):
        names.check_object_key(key)
    for good in ("a", "a/b", "..a", "a..", ".metadata", "ä" * 512, "__0_0.distcp"):
        assert names.check_object_key(good) == good


# --- what was left out

COUNT = {"tensors": 1, "elements": 6}


@pytest.mark.parametrize(
    "other", [3, [1, 6], {"tensors": 1}, {**COUNT, "more": 1}, {"tensors": "1", "elements": 6}, {}]
)
def test_counts_of_a_save_are_told_from_values_of_the_user(other):
    assert left_out_of({"left_out": {"model": COUNT, "mine": other}}) == {"model": COUNT}
    assert left_out_of({"left_out": other}) == left_out_of({"step": 1}) == {}
