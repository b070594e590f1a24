"""A listing is whole, exact and below its prefix; what it tells is what `head` tells."""

from __future__ import annotations

from datetime import timedelta

import pytest

from dcp_objstore.errors import InputError, InvalidUrlError, PreconditionFailedError
from tests.contract.common import PART, Endpoint, keys, read
from tests.support.guarantees import guarantee


class ListingContract(Endpoint):
    @guarantee("list is whole")
    def test_list_gives_keys_relative_to_the_root_and_below_the_prefix(self, store, side_door):
        assert keys(store) == keys(store, "a/") == []
        given = ["a/1", "a/2", "a/b/3", "ab/4", "c"]
        for key in given:
            side_door.write(key, key.encode())
        assert keys(store) == given
        assert keys(store, "a/") == ["a/1", "a/2", "a/b/3"]
        assert keys(store, "a/b/") == ["a/b/3"]
        assert keys(store, "none/") == []
        assert keys(store, "c/") == []

    @guarantee("list is whole")
    def test_a_listing_longer_than_a_page_is_whole(self, crowd):
        assert keys(crowd, "many/") == self.crowd_keys
        assert keys(crowd) == self.crowd_keys

    def test_list_refuses_a_prefix_that_is_not_whole_segments(self, store):
        for prefix in ["ab", "/", "a//", "../", "/a/"]:
            with pytest.raises(InvalidUrlError):
                list(store.list(prefix))

    @guarantee("true times")
    def test_an_objects_time_is_that_of_its_write(self, store, capabilities):
        store.put("k", b"12345")
        store.put_stream("s", iter([b"123"]), part_size_bytes=PART, max_concurrency=1)
        first = {meta.key: meta for meta in store.list()}
        assert {key: meta.size_bytes for key, meta in first.items()} == {"k": 5, "s": 3}
        for key, meta in first.items():
            head = store.head(key)
            assert head.size_bytes == meta.size_bytes
            assert meta.last_modified.utcoffset() is not None
            assert head.last_modified.utcoffset() is not None
            if capabilities.modified_times:
                assert abs(head.last_modified - meta.last_modified) < timedelta(seconds=1)
        again = {meta.key: meta.last_modified for meta in store.list()}
        if capabilities.modified_times:
            assert again == {key: meta.last_modified for key, meta in first.items()}
        else:
            assert all(again[key] > meta.last_modified for key, meta in first.items())

    @guarantee("listed versions")
    def test_a_listed_token_serves_a_conditional_write_or_is_refused(self, store, capabilities):
        store.put("k", b"1")
        (meta,) = store.list()
        if not capabilities.conditional_update:
            self.assert_refused(store, "k", capabilities.if_version(meta.version))
            assert read(store, "k") == b"1"
        elif capabilities.listed_versions:
            assert meta.version.e_tag == store.head("k").version.e_tag
            store.put("k", b"2", precondition=capabilities.if_version(meta.version))
            with pytest.raises(PreconditionFailedError):
                store.put("k", b"3", precondition=capabilities.if_version(meta.version))
            assert read(store, "k") == b"2"
        else:
            with pytest.raises((InputError, PreconditionFailedError)):
                store.put("k", b"2", precondition=capabilities.if_version(meta.version))
            assert read(store, "k") == b"1"
