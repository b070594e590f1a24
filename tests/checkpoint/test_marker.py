"""The marker: what is written comes back, damage is always seen, and how markers follow."""

from __future__ import annotations

import enum
import hashlib
import json
import re
import types
from datetime import UTC, datetime
from itertools import pairwise
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from dcp_objstore.checkpoint import index as ix, names
from dcp_objstore.checkpoint.marker import (
    LOG_LENGTH,
    Counts,
    IndexRef,
    Marker,
    check_user_metadata,
    decode_marker,
    encode_marker,
    new_id,
    next_marker,
    with_checksum,
)
from dcp_objstore.errors import CheckpointCorruptError, ConfigError, InputError, UnsupportedError
from tests.support import indexes

# A busy machine is no failure.
untimed = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
INDEX = IndexRef(key=names.index_key("0" * 24), size_bytes=5, sha256="ab" * 32)


def follow(old: Marker | None, commit_id: str | None = None, **user_metadata: Any) -> Marker:
    return next_marker(
        old,
        commit_id=commit_id or new_id(),
        index=INDEX,
        counts=Counts(tensors=1, blobs=2, objects=3, total_bytes=4),
        world_size=8,
        user_metadata=user_metadata,
        created_at=datetime(2026, 1, 2, tzinfo=UTC),
        claim=0,
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


def test_marker_is_one_flat_json_object_with_its_digest():
    fields = json.loads(encode_marker(follow(None)))
    assert fields["state"] == "committed"
    assert set(fields) == {*Marker.__struct_fields__, "digest"}


def test_tombstone_that_never_was_a_commit_needs_no_index():
    marker = msgspec.structs.replace(follow(None), state="deleted", index=None)
    assert decode_marker(encode_marker(marker)) == marker
    with pytest.raises(CheckpointCorruptError, match="index"):
        decode_marker(encode_marker(msgspec.structs.replace(marker, state="committed")))


def test_unknown_field_of_the_same_format_is_ignored_but_covered_by_the_digest():
    body = signed(later="something")
    assert decode_marker(body).is_committed
    with pytest.raises(CheckpointCorruptError, match="digest"):
        decode_marker(body.replace(b"something", b"somethang"))


def test_newer_format_is_unsupported_not_corrupt():
    with pytest.raises(UnsupportedError, match=r"the marker has format 3, .* up to 2; upgrade"):
        decode_marker(signed(format=3))
    with pytest.raises(UnsupportedError, match="upgrade"):
        decode_marker(b'{"format":3}')


@pytest.mark.parametrize(
    "changes",
    [
        {"state": "maybe"},
        {"commit_id": "short"},
        {"generation": 0},
        {"generation": 2**70},
        {"format": 0},
        {"log": [new_id()] * (LOG_LENGTH + 1)},
        {"log": ["../x"]},
        {"created_at": "2026-01-02T00:00:00"},
        {"world_size": -1},
        {"world_size": 1.5},
        {"user_metadata": []},
        {"pins": [""]},
        {"index": {"key": "index", "size_bytes": -1, "sha256": "ab" * 32}},
        {"index": {"key": "index", "size_bytes": 2**40, "sha256": "ab" * 32}},
        {"index": {"key": "index", "size_bytes": 1, "sha256": "zz" * 32}},
        {"index": {"key": "../index", "size_bytes": 1, "sha256": "ab" * 32}},
        {"index": None},
        {"index": None, "state": "deleting"},
    ],
    ids=lambda changes: re.sub("[0-9a-f]{32}", "id", str(changes)),
)
def test_impossible_field_is_corrupt_even_with_a_right_digest(changes):
    with pytest.raises(CheckpointCorruptError):
        decode_marker(signed(**changes))


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


def test_an_index_of_2_gib_is_named_and_a_byte_more_is_not():
    index = {"key": INDEX.key, "size_bytes": 2**31, "sha256": INDEX.sha256}
    assert decode_marker(signed(index=index)).index == IndexRef(**index)
    with pytest.raises(CheckpointCorruptError, match=r"<= 2147483648.*size_bytes"):
        decode_marker(signed(index=index | {"size_bytes": 2**31 + 1}))


@pytest.mark.parametrize(
    ("field", "most", "more"),
    [
        ("log", ["0" * 32] * 16, ["0" * 32] * 17),
        ("pins", ["pin"] * 64, ["pin"] * 65),
        ("pins", ["x" * 200], ["x" * 201]),
        ("claim", 2**53, 2**53 + 1),
        ("world_size", 2**63 - 1, 2**63),
        ("generation", 2**63 - 1, 2**63),
        ("format", 2, 0),
        ("put_on", "nothing", "nothing\n"),
        ("put_on", "", "0" * 31),
    ],
)
def test_a_field_has_its_limit(field, most, more):
    read = getattr(decode_marker(signed(**{field: most})), field)
    assert read == (tuple(most) if isinstance(most, list) else most)
    with pytest.raises(CheckpointCorruptError, match=rf"the marker is damaged: .*{field}"):
        decode_marker(signed(**{field: more}))


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
        (with_checksum(GOOD.replace(b"committed", b"\xff")), "utf-8"),
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


def test_a_pin_that_is_not_unicode_is_refused():
    with pytest.raises(ConfigError, match=r"cannot be written as JSON: .*surrogates"):
        encode_marker(msgspec.structs.replace(follow(None), pins=("\ud800",)))


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


def test_new_commit_on_a_tombstone_is_committed_and_unpinned():
    old = msgspec.structs.replace(follow(None), state="deleted", pins=("kept",))
    new = follow(old)
    assert new.is_committed
    assert new.pins == ()
    assert new.log == (old.commit_id,)


def test_a_new_commit_names_its_claim_and_what_it_was_put_on():
    fields = {"commit_id": "1" * 32, "index": INDEX, "counts": Counts(), "world_size": 1}
    created_at = datetime(2026, 1, 2, tzinfo=UTC)
    first = next_marker(None, claim=0, created_at=created_at, **fields)
    second = next_marker(first, claim=7, created_at=created_at, **fields)
    assert (first.format, first.claim, first.put_on) == (1, 0, "nothing")
    assert (second.format, second.claim, second.put_on) == (2, 7, first.write_id)
    assert decode_marker(encode_marker(second)) == second


def test_counts_are_those_of_the_index():
    keys = [names.data_key(rank, 0, "0" * 24) for rank in range(3)]
    empty = indexes.Tensor((0,), "int8", "strided", False, "contiguous_format", False, ())
    index = indexes.Index(
        objects=tuple(
            ix.ObjectEntry(key, size_bytes, None, b"f" * 16)
            for size_bytes, key in enumerate(keys, 100)
        ),
        tensors={"w": empty},
        blobs={
            name: indexes.Item(0, at, 10, at, 10, b"d" * 16) for name, at in (("a", 0), ("b", 10))
        },
    )
    assert Counts.of(ix.decode(indexes.encode(index))) == Counts(
        tensors=1, blobs=2, objects=3, total_bytes=303
    )
    nothing = ix.decode(indexes.encode(indexes.Index()))
    assert Counts.of(nothing) == Counts()


def test_equal_commits_never_have_equal_bodies():
    one, two = (follow(None, "0" * 32) for _ in range(2))
    assert encode_marker(one) != encode_marker(two)


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
    nonce = names.new_nonce()
    key = names.data_key(3, 12, nonce)
    assert key == f"__3_12.{nonce}.distcp"
    assert names.parse_data_key(key) == names.DataName(3, 12, nonce)
    assert names.parse_index_key(names.index_key(nonce)) == nonce
    for other in ("_COMMIT", ".metadata", "__0_0.distcp", "x/" + key, key + "\n", key.upper()):
        assert names.parse_data_key(other) is None
        assert names.parse_index_key(other) is None


def test_nonces_do_not_repeat_and_have_96_bits():
    nonces = {names.new_nonce() for _ in range(1000)}
    assert len(nonces) == 1000
    assert {len(nonce) * 4 for nonce in nonces} == {96}


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


def test_impossible_names_are_refused():
    for make in (
        lambda: names.data_key(-1, 0, names.new_nonce()),
        lambda: names.data_key(0, 0, "../x"),
        lambda: names.index_key(""),
    ):
        with pytest.raises(InputError):
            make()


BAD_KEYS = ["", "/a", "a/", "a//b", ".", "..", "a/../b", "a/.", "a\0", "a\n", "a\\b", "s3://b/k"]
BAD_KEYS += ["x" * 1025, "ö" * 513, "\ud800"]


@pytest.mark.parametrize("key", BAD_KEYS, ids=ascii)
def test_key_that_leaves_the_checkpoint_is_corrupt(key):
    with pytest.raises(CheckpointCorruptError):
        names.check_object_key(key)


@pytest.mark.parametrize("key", ["a", "a/b", "..a", "a..", ".metadata", "ö", "__0_0.distcp"])
def test_clean_key_passes(key):
    assert names.check_object_key(key) == key


def test_the_key_of_an_object_is_as_long_as_a_store_takes_it_and_no_longer():
    assert names.check_object_key("ä" * 512) == "ä" * 512
    with pytest.raises(CheckpointCorruptError, match="1024 bytes"):
        names.check_object_key("ä" * 512 + "a")
