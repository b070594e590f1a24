"""Each failure that a server answers is one typed error, by its meaning, from every verb."""

from __future__ import annotations

import pickle
from collections.abc import Callable

import pytest

from dcp_objstore.errors import (
    BucketNotFoundError,
    CorruptDataError,
    CredentialsError,
    DcpObjstoreError,
    InputError,
    ObjectNotFoundError,
    PermissionDeniedError,
    PreconditionFailedError,
    StoreUnavailableError,
)
from dcp_objstore.stores import IfAbsent, ObjectStore
from dcp_objstore.stores.admission.limiter import limiter_of
from dcp_objstore.stores.admission.window import Window
from dcp_objstore.stores.ranges import read_range
from tests.contract.common import MIB, PART, Endpoint
from tests.support.guarantees import guarantee
from tests.support.scripted import Fault, ScriptedServer, fault_answer

VERBS: dict[str, Callable[[ObjectStore], object]] = {
    "get": lambda store: store.get("k", max_size_bytes=100),
    "open_range": lambda store: read_range(store, "k", 0, 1),
    "head": lambda store: store.head("k"),
    "list": lambda store: list(store.list()),
    "put": lambda store: store.put("k", b"x"),
    "put_absent": lambda store: store.put("k", b"x", precondition=IfAbsent(), retry=False),
    "put_stream": lambda store: store.put_stream(
        "k", iter([bytes(PART), bytes(MIB)]), part_size_bytes=PART, max_concurrency=2
    ),
    "delete": lambda store: store.delete("k"),
}
EXPECTED: dict[Fault, tuple[type[DcpObjstoreError], tuple[str, ...]]] = {
    "forbidden": (PermissionDeniedError, tuple(VERBS)),
    "no object": (ObjectNotFoundError, ("get", "open_range", "head")),
    "no bucket": (BucketNotFoundError, tuple(VERBS)),
    "conflict": (PreconditionFailedError, ("put_absent",)),
    "precondition": (PreconditionFailedError, ("put_absent",)),
    "bad range": (CorruptDataError, ("open_range",)),
    "too many": (StoreUnavailableError, tuple(VERBS)),
    "internal": (StoreUnavailableError, tuple(VERBS)),
    "busy": (StoreUnavailableError, tuple(VERBS)),
    "expired": (CredentialsError, tuple(VERBS)),
}


class FailuresContract(Endpoint):
    @guarantee("typed errors")
    @pytest.mark.parametrize("fault", EXPECTED)
    def test_what_a_server_answers_is_one_typed_error(self, fault):
        if self.dialect is None:
            pytest.skip("no HTTP")
        answer = fault_answer(self.dialect, fault)
        if answer is None:
            pytest.skip(f"never answered: {fault}")
        expected, verbs = EXPECTED[fault]
        with ScriptedServer() as server:
            server.answer = lambda *_: answer
            store = self.store_at(server.endpoint_url)
            for verb in verbs:
                limiter_of(store).window = Window()  # what the last verb met slows none down
                if verb == "put_absent" and not store.capabilities.conditional_create:
                    continue  # refused before anything is sent: `test_create_only_where_nothing_is`
                with pytest.raises(DcpObjstoreError) as caught:
                    VERBS[verb](store)
                error = caught.value
                # A HEAD has no body, so an adapter that does not ask again knows the status only.
                unclear = verb == "head" and isinstance(error, InputError)
                assert type(error) is expected or (unclear and issubclass(expected, InputError))
                assert error.url == store.url
                assert (error.object_key is None) == (verb == "list")
                back = pickle.loads(pickle.dumps(error))
                assert (type(back), str(back)) == (type(error), str(error))
