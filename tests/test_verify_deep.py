"""What the deep verification looks at besides payloads, and what it keeps of it."""

from __future__ import annotations

from pathlib import Path

import msgspec

import dcp_objstore as dos
from dcp_objstore.checkpoint.marker import decode_marker, encode_marker
from dcp_objstore.dcp.verify import _Framing
from tests.support.states import seeded


def test_of_the_framing_only_what_came_before_its_turn_is_kept() -> None:
    framing = _Framing()
    for number in (1, 0, 2, 4, 3):
        framing.add(number, bytes([number]))
        assert len(framing._early) <= 1
    assert framing._early == {}
    in_order = _Framing()
    in_order.add(0, b"\0\1\2\3\4")
    assert framing.digest() == in_order.digest()


def test_a_marker_that_counts_other_things_than_the_index_is_found(tmp_path: Path) -> None:
    dos.save({"w": seeded("w", (4,)), "step": 2}, (tmp_path / "a").as_uri(), progress=False)
    path = tmp_path / "a" / "_COMMIT"
    marker = decode_marker(path.read_bytes())
    counts = msgspec.structs.replace(marker.counts, tensors=2)
    path.write_bytes(encode_marker(msgspec.structs.replace(marker, counts=counts)))
    ckpt = dos.open((tmp_path / "a").as_uri())
    assert ckpt.verify().ok
    (damage,) = ckpt.verify(deep=True).damaged
    assert (damage.what, damage.object_key) == ("counts", "_COMMIT")
