"""Each failure that a server answers is one typed error, by its meaning, from every verb."""

from __future__ import annotations

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
from dcp_objstore.stores import ObjectStore
from dcp_objstore.stores.admission.limiter import limiter_of
from dcp_objstore.stores.admission.window import Window
from tests.contract.common import Endpoint
from tests.support.guarantees import guarantee
from tests.support.scripted import Fault, ScriptedServer, fault_answer
from tests.support.verbs import READS, VERBS, WRITES, check

EXPECTED: dict[Fault, tuple[type[DcpObjstoreError], tuple[str, ...]]] = {
    "forbidden": (PermissionDeniedError, tuple(VERBS)),
    "no object": (ObjectNotFoundError, ("get", "open_range", "head")),
    "no bucket": (BucketNotFoundError, tuple(VERBS)),
    "conflict": (PreconditionFailedError, ("put_absent",)),
    "precondition": (PreconditionFailedError, ("put_absent",)),
    "bad range": (CorruptDataError, ("open_range",)),
    "too many": (StoreUnavailableError, tuple(READS)),
    "internal": (StoreUnavailableError, tuple(VERBS)),
    "busy": (StoreUnavailableError, tuple(WRITES)),
    "expired": (CredentialsError, tuple(VERBS)),
}


class FailuresContract(Endpoint):
    @guarantee("typed errors")
    def test_what_a_server_answers_is_one_typed_error(self):
        if self.dialect is None:
            pytest.skip("no HTTP")
        with ScriptedServer() as server:
            store = self.store_at(server.endpoint_url)
            for fault, (expected, verbs) in EXPECTED.items():
                answer = fault_answer(self.dialect, fault)
                if answer is None or fault in self.untold_faults:
                    continue
                server.answer = lambda *_, answer=answer: answer
                for verb in verbs:
                    # `test_create_only_where_nothing_is` has what is refused before it is sent.
                    if verb != "put_absent" or store.capabilities.conditional_create:
                        assert_typed(store, verb, expected)


def assert_typed(store: ObjectStore, verb: str, expected: type[DcpObjstoreError]) -> None:
    limiter_of(store).window = Window()  # what the last verb met slows none down
    with pytest.raises(DcpObjstoreError) as caught:
        VERBS[verb](store)
    error = caught.value
    # A HEAD has no body, so an adapter that does not ask again knows the status only.
    unclear = verb == "head" and isinstance(error, InputError)
    assert type(error) is expected or (unclear and issubclass(expected, InputError))
    check(error, store, verb)
