"""Over HTTPS large tensors come past the transport, and nothing unverified gets into one."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Iterator

import pytest
import torch

import dcp_objstore as dos
from dcp_objstore.cli.seaweedfs import SeaweedServer
from dcp_objstore.config import MIB
from dcp_objstore.errors import CheckpointCorruptError, DcpObjstoreError, StoreUnavailableError
from tests.support import tampering
from tests.support.campaign import cases
from tests.support.proxy import Asked
from tests.support.scripted import Answer
from tests.support.servers import BUCKET, Bucket
from tests.support.states import same_bits, seeded
from tests.support.tampering import Change, TamperingProxy
from tests.support.tls import Certificate, make_certificate

pytestmark = pytest.mark.backends("seaweed")
SHAPE = (1536, 1024)  # 6 MiB, in two blocks
CONFIG = dos.TransferConfig(max_retries=2, retry_timeout_seconds=20, request_size_bytes=4 * MIB)


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Certificate:
    return make_certificate(tmp_path_factory.mktemp("certificate"))


@pytest.fixture(scope="module")
def bucket(seaweed: SeaweedServer, certificate: Certificate) -> Bucket:
    """A prefix with a checkpoint, which was saved over HTTPS and which no test changes."""
    options, url = seaweed.storage_options, f"s3://{BUCKET}/https-{secrets.token_hex(4)}"
    with TamperingProxy(options, certificate) as proxy:
        state = {"w": seeded("w", SHAPE)}
        dos.save(state, f"{url}/s", storage_options=proxy.storage_options, progress=False)
    return Bucket("seaweed", url, options, options)


@pytest.fixture
def proxy(bucket: Bucket, certificate: Certificate) -> Iterator[TamperingProxy]:
    """HTTPS in front of the store."""
    with TamperingProxy(bucket.storage_options, certificate) as found:
        yield found


def load(bucket: Bucket, proxy: TamperingProxy, into: torch.Tensor, **options: object) -> None:
    dos.load(
        {"w": into},
        bucket.at("s"),
        storage_options=proxy.storage_options,
        config=CONFIG,
        progress=False,
        **options,  # type: ignore[arg-type]
    )


def directly(asked: Asked) -> bool:
    return asked.signed_url


def answered(status: int, kind: str, body: bytes) -> Change:
    def change(_asked: Asked, _answer: Answer, _whole: Callable[[], bytes]) -> Answer:
        return Answer(status, {"Content-Type": kind}, body)

    return change


BUSY = b"<Error><Code>SlowDown</Code><Message>m</Message></Error>"
WRONG: dict[str, Change] = {
    "cut short": tampering.cut,
    "200 with all of it": tampering.whole_object,
    "a page": answered(200, "text/html", b"<html>sign in first</html>"),
    "503": answered(503, "application/xml", BUSY),
}


@pytest.mark.parametrize("how", cases([*WRONG, "damaged"], default=["damaged"]))
def test_what_is_wrong_once_is_not_noticed_and_what_stays_wrong_is_in_no_tensor(bucket, proxy, how):
    def of_data(asked: Asked) -> bool:
        return asked.start is not None and asked.key.endswith(".distcp")

    change, into = WRONG.get(how) or damaged(bucket), torch.zeros(SHAPE)
    proxy.tamper(change, directly, times=1)
    load(bucket, proxy, into)
    assert same_bits(into, seeded("w", SHAPE))
    assert sum(map(directly, proxy.asked)) >= 2
    proxy.tamper(change, of_data)
    kinds = {"503": StoreUnavailableError, "damaged": CheckpointCorruptError}
    with pytest.raises(kinds.get(how, DcpObjstoreError)):
        load(bucket, proxy, into.zero_())
    blocks = zip(into.flatten().split(MIB), seeded("w", SHAPE).flatten().split(MIB), strict=True)
    assert all(not got.any() or same_bits(got, right) for got, right in blocks)


def damaged(bucket: Bucket) -> Change:
    """The last byte of the tensor."""
    (key,) = [key for key in bucket.keys("s") if key.endswith(".distcp")]
    payload = seeded("w", SHAPE).numpy().tobytes()
    at = bucket.get(f"s/{key}").index(payload) + len(payload) - 1
    change = tampering.flipped(at)

    def in_its_block(asked: Asked, answer: Answer, whole: Callable[[], bytes]) -> Answer:
        covered = asked.start is not None and asked.start <= at < asked.start + len(answer.body)
        return change(asked, answer, whole) if covered else answer

    return in_its_block


def test_no_signature_is_told(bucket, proxy, tmp_path, caplog):
    caplog.set_level(logging.DEBUG)
    proxy.tamper(tampering.cut, directly)
    heard: list[object] = []
    load(bucket, proxy, torch.zeros(SHAPE), on_event=heard.append, trace=tmp_path / "trace.json")
    proxy.refuse(directly)
    load(bucket, proxy, torch.zeros(SHAPE), on_event=heard.append)
    assert any(isinstance(event, dos.observe.events.Retried) for event in heard)
    told = (*map(repr, heard), caplog.text, (tmp_path / "trace.json").read_text())
    secret = str(bucket.storage_options["secret"])
    for text in told:
        assert "X-Amz" not in text
        assert secret not in text
