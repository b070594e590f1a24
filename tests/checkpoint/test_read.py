"""What a reader is told where there is no checkpoint, and how far it looks around for that."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from dcp_objstore.checkpoint.commit import put_tombstone
from dcp_objstore.checkpoint.delete import delete
from dcp_objstore.checkpoint.names import (
    DOT_METADATA_KEY,
    MARKER_KEY,
    beacon_key,
    data_key,
    new_nonce,
)
from dcp_objstore.checkpoint.read import explain_object, look_around, named_keys, open_committed
from dcp_objstore.errors import (
    CheckpointCorruptError,
    CheckpointNotFoundError,
    PermissionDeniedError,
)
from dcp_objstore.stores import StoreSpec
from dcp_objstore.stores.protocol import ObjectMeta
from tests.support.memory_store import TickingClock

DATA = data_key(0, 0, new_nonce())
TORN = "a save began here but was never committed: it failed before its end or is still running"
WEIGHTS = "there is no checkpoint here, but a folder of safetensors: dos.load"
FOREIGN = "there is a '.metadata' here but no marker"
TORCH = "there is no checkpoint here, but a file of torch.save: pytorch_model.bin"
OTHERS = "there is no checkpoint here, only other objects"
BELOW = "there is no checkpoint here, but there is one below, for example memory://test/run/step-1/"


@pytest.mark.parametrize(
    ("keys", "why"),
    [
        ([], "there is nothing here: no object at all under this URL"),
        ([DATA], f"{TORN}; load another checkpoint"),
        ([beacon_key(new_nonce()), "notes.txt"], f"{TORN}; load another checkpoint"),
        ([DATA, DOT_METADATA_KEY], f"{TORN}; or it was committed, and its marker (_COMMIT) was"),
        (["a.txt", "model.safetensors"], WEIGHTS),
        ([DOT_METADATA_KEY, "model.safetensors"], FOREIGN),
        (["deeper/model.safetensors"], OTHERS),
        (["a.txt"], OTHERS),
        (["x/_COMMIT.old"], OTHERS),
        (["x/pytorch_model.bin"], OTHERS),
        (["config.json", "pytorch_model.bin"], TORCH),
        ([f"{name}/{MARKER_KEY}" for name in ("x/b", "x/c", "x/a")], f"{BELOW}x/c"),
        ([DOT_METADATA_KEY, f"x/{MARKER_KEY}"], f"{BELOW}x"),
        ([DOT_METADATA_KEY, "a.txt"], FOREIGN),
    ],
)
def test_absence_is_explained_by_what_lies_there(store, keys, why):
    for key in keys:
        store.put(key, b"x")
    with pytest.raises(CheckpointNotFoundError) as caught:
        open_committed(store)
    assert caught.value.message.startswith(why)
    assert caught.value.url == store.url


def test_absence_is_told_even_if_nothing_may_be_listed(store):
    def refuse() -> None:
        raise PermissionDeniedError("no listing")

    store.on_list = refuse
    with pytest.raises(CheckpointNotFoundError, match="no listing") as caught:
        open_committed(store)
    assert caught.value.url == store.url


@pytest.mark.parametrize(
    ("ours", "looked_at"), [(None, 10_000), (0, 1000), (999, 1000), (1000, 10_000)]
)
def test_only_where_nothing_is_a_saves_a_second_page_is_looked_at(store, ours, looked_at):
    store.put("x", b"")
    meta = store.head("x")
    given = 0

    def endless(prefix: str = "") -> Iterator[ObjectMeta]:
        nonlocal given
        for given in range(1, 20_000):
            name = DATA if given - 1 == ours else "x"
            yield ObjectMeta(f"{given}/{name}", 0, meta.version, meta.last_modified)

    store.list = endless  # type: ignore[method-assign]
    assert len(look_around(store)) == given == looked_at


def test_a_tombstone_that_a_sweep_put_names_nothing_that_could_be_deleted(store):
    tombstone = put_tombstone(store, TickingClock().tries())
    assert tombstone is not None
    with pytest.raises(CheckpointCorruptError, match="names no index") as caught:
        named_keys(store, tombstone)
    assert caught.value.url == store.url
    with pytest.raises(CheckpointNotFoundError, match="was deleted"):
        delete(store)


def test_the_url_of_an_object_is_told_from_that_of_a_prefix(tmp_path):
    folder = StoreSpec(tmp_path.as_uri())
    folder.open().put("step-1.pt", b"12345")
    folder.open().put("step-1.safetensors", b"12345")

    def explained(name: str) -> str:
        return explain_object(folder.child(name)) or "no object"

    assert "one object of 5 bytes with exactly this key" in explained("step-1.pt")
    assert "a file of safetensors: dos.load" in explained("step-1.safetensors")
    assert explained("step-1") == "no object"
    assert explain_object(StoreSpec("memory://bucket")) is None
