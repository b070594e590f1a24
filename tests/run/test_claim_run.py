"""What `dos.claim_run` says of a run that it could not claim."""

from __future__ import annotations

import pytest

import dcp_objstore as dos
from dcp_objstore.errors import InvalidUrlError, PermissionDeniedError
from tests.support.checkpoints import memory_url
from tests.support.wrapped_stores import Fault, FaultStore


@pytest.mark.parametrize("url", ["s3://key:hunter2@bucket/run", "run", 3])
def test_a_wrong_url_is_refused_and_no_password_in_it_repeated(url):
    with pytest.raises(InvalidUrlError) as caught:
        dos.claim_run(url)
    assert "hunter2" not in f"{caught.value} {caught.value.url}"


def test_an_error_of_the_store_names_the_run(through):
    through(lambda store: FaultStore(store, lambda *_: Fault("before", PermissionDeniedError(""))))
    url = memory_url()
    with pytest.raises(PermissionDeniedError) as caught:
        dos.claim_run(f"{url}/")
    assert caught.value.url == url
