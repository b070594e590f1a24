"""Conditional writes: one winner of any race, or an honest refusal."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from dcp_objstore.errors import PreconditionFailedError
from dcp_objstore.stores import IfAbsent, IfVersion, ObjectStore, Version
from tests.contract.common import Endpoint, keys, race, read
from tests.support.guarantees import guarantee
from tests.support.side_doors import SideDoor

CREATORS = 64
UPDATERS = 16
CAMPAIGN_ROUNDS = 200


class PreconditionsContract(Endpoint):
    @guarantee("one creator of 64")
    def test_create_only_where_nothing_is(self, store, capabilities, side_door):
        if not capabilities.conditional_create:
            side_door.write("k", b"as it was")
            self.assert_refused(store, "k", IfAbsent())
            self.assert_refused(store, "new", IfAbsent())
            assert side_door.sizes() == {"k": len(b"as it was")}
            return
        side_door.write("theirs", b"as it was")
        with pytest.raises(PreconditionFailedError):
            store.put("theirs", b"ours", precondition=IfAbsent(), retry=False)
        assert side_door.read("theirs") == b"as it was"
        version = store.put("k", b"first", precondition=IfAbsent())
        for retry in (True, False):
            with pytest.raises(PreconditionFailedError):
                store.put("k", b"second", precondition=IfAbsent(), retry=retry)
        assert read(store, "k") == side_door.read("k") == b"first"
        if capabilities.conditional_update:
            assert store.head("k").version == version
        store.delete("k")
        store.put("k", b"third", precondition=IfAbsent(), retry=False)
        assert read(store, "k") == b"third"

    @guarantee("one creator of 64")
    def test_of_64_creators_exactly_one_wins(self, store, capabilities, side_door):
        if not capabilities.conditional_create:
            self.assert_refused(store, "k", IfAbsent())
            return
        if not self.race_rounds:
            pytest.skip("the same server is raced over another adapter")
        for number in range(self.race_rounds):
            create_race(store, side_door, f"race-{number}")

    @pytest.mark.campaign
    @pytest.mark.timeout(3600)
    def test_of_64_creators_exactly_one_wins_200_times(self, store, capabilities, side_door):
        if not capabilities.conditional_create:
            self.assert_refused(store, "k", IfAbsent())
            return
        names = [f"race-{number}" for number in range(CAMPAIGN_ROUNDS)]
        with ThreadPoolExecutor(self.races_at_once) as pool:
            list(pool.map(lambda name: create_race(store, side_door, name), names))
        assert keys(store) == sorted(names)

    @guarantee("compare and swap")
    def test_update_only_from_the_known_version(self, store, capabilities, side_door):
        if not capabilities.conditional_update:
            version = store.put("k", b"as it was")
            for token in (version, Version(e_tag='"0123"', version="7")):
                self.assert_refused(store, "k", capabilities.if_version(token))
            assert side_door.read("k") == b"as it was"
            return
        first = store.put("k", b"1")
        second = store.put("k", b"22", precondition=capabilities.if_version(first), retry=False)
        assert first != second
        for retry in (True, False):
            with pytest.raises(PreconditionFailedError):
                store.put("k", b"333", precondition=capabilities.if_version(first), retry=retry)
        assert read(store, "k") == side_door.read("k") == b"22"
        store.put("k", b"4444", precondition=capabilities.if_version(store.head("k").version))
        assert read(store, "k") == b"4444"
        side_door.write("k", b"theirs")
        with pytest.raises(PreconditionFailedError):
            store.put("k", b"5", precondition=capabilities.if_version(store.put("other", b"4444")))
        assert side_door.read("k") == b"theirs"

    @guarantee("quoted ETags")
    def test_an_update_takes_an_etag_as_it_was_given(self, store, capabilities):
        if not capabilities.conditional_update:
            return
        given = IfVersion(store.put("k", b"1"))
        if capabilities.quoted_e_tags:
            store.put("k", b"2", precondition=given)
            return
        with pytest.raises(PreconditionFailedError):
            store.put("k", b"2", precondition=given)

    @guarantee("compare and swap")
    def test_update_of_an_absent_object_fails_its_precondition(
        self, store, capabilities, side_door
    ):
        version = store.put("k", b"1")
        store.delete("k")
        if not capabilities.conditional_update:
            self.assert_refused(store, "k", capabilities.if_version(version))
        else:
            with pytest.raises(PreconditionFailedError):
                store.put("k", b"2", precondition=capabilities.if_version(version))
        assert keys(store) == []
        assert side_door.sizes() == {}

    @guarantee("compare and swap")
    def test_of_16_updaters_exactly_one_wins(self, store, capabilities):
        version = store.put("k", b"start")
        if not capabilities.conditional_update:
            self.assert_refused(store, "k", capabilities.if_version(version))
            return
        if not self.race_rounds:
            pytest.skip("the same server is raced over another adapter")
        for round_number in range(self.race_rounds):

            def attempt(number: int, old: Version = version, nth: int = round_number) -> Version:
                data = b"round %d writer %d" % (nth, number)
                return store.put("k", data, precondition=capabilities.if_version(old), retry=False)

            winners = race(UPDATERS, attempt)
            assert len(winners) == 1
            assert read(store, "k") == b"round %d writer %d" % (round_number, winners[0])
            version = store.head("k").version


def create_race(store: ObjectStore, side_door: SideDoor, key: str) -> None:
    def attempt(number: int) -> Version:
        return store.put(key, b"writer %d" % number, precondition=IfAbsent(), retry=False)

    winners = race(CREATORS, attempt)
    assert len(winners) == 1
    assert read(store, key) == side_door.read(key) == b"writer %d" % winners[0]
