"""An opened checkpoint as an object: what it requests, from threads, pickled, compared."""

from __future__ import annotations

import pickle
import secrets
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

import dcp_objstore as dos
from dcp_objstore.config import MIB
from dcp_objstore.errors import CheckpointCorruptError, ConfigError, UnsupportedError
from dcp_objstore.inspect.fill import new_tensor, new_tensors
from dcp_objstore.observe.dispatch import EventSettings
from dcp_objstore.stores import StoreSpec
from tests.support.states import same_bits, seeded
from tests.support.wrapped_stores import Request

WIDE = (3000, 2000)  # 24 MB: six blocks of 524 rows and a bit


def saved(state: dict[str, Any]) -> str:
    url = f"memory://opened/{secrets.token_hex(4)}"
    dos.save(state, url, progress=False)
    return url


def ranges(requests: list[Request]) -> list[int]:
    """The sizes of the ranges that were fetched, and that nothing else was."""
    assert {request.verb for request in requests} <= {"open_range"}
    return [request.bytes for request in requests]


def test_opening_takes_two_requests_and_a_row_one_block(requests):
    wide = seeded("wide", WIDE)
    url = saved({"wide": wide, "step": 3})
    requests.clear()
    ckpt = dos.open(url)
    assert [(request.verb, request.key[:6]) for request in requests] == [
        ("get", "_COMMI"),
        ("get", "index."),
    ]
    requests.clear()
    assert len(ckpt) == 2
    assert ckpt["wide"].shape == WIDE
    assert ckpt["wide"].nbytes == wide.nbytes
    assert requests == []
    assert same_bits(ckpt["wide"][10], wide[10])
    assert ranges(requests) == [4 * MIB]
    requests.clear()
    assert same_bits(ckpt["wide"][-1, -5:], wide[-1, -5:])
    assert ranges(requests) == [wide.nbytes - 20 * MIB]
    requests.clear()
    assert ckpt["wide"][5:5].shape == (0, 2000)
    assert requests == []
    assert ckpt.read("step") == {"step": 3}
    assert sum(ranges(requests)) < 4096
    requests.clear()
    assert same_bits(dos.open(url, verify=False)["wide"][7, 3:5], wide[7, 3:5])
    assert requests[-1].bytes == 8


def test_many_small_tensors_are_read_in_few_requests(requests):
    state = {f"w{number:04}": seeded(str(number), (256,)) for number in range(1000)}
    ckpt = dos.open(saved(state))
    requests.clear()
    found = ckpt.read()
    assert len(ranges(requests)) <= 10
    assert all(same_bits(found[key], tensor) for key, tensor in state.items())


def test_threads_share_an_opened_checkpoint():
    wide = seeded("wide", WIDE)
    ckpt = dos.open(saved({"wide": wide, "step": 3}))

    def read(number: int) -> bool:
        row = number * 97 % WIDE[0]
        return ckpt.read("step") == {"step": 3} and same_bits(
            ckpt["wide"][row : row + 3], wide[row : row + 3]
        )

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(read, range(32)))


def test_openings_and_entries_compare_and_hash():
    url = saved({"w": torch.ones(2), "step": 1})
    one, two = dos.open(url), dos.open(url)
    assert one == one  # noqa: PLR0124
    assert one != two
    assert one["w"] == one["w"]
    assert one["w"] != two["w"]
    assert len({one["w"], one["w"], two["w"], one["step"]}) == 3


def test_a_tensor_entry_is_not_iterated_row_by_row(requests):
    ckpt = dos.open(saved({"w": torch.ones(100, 2)}))
    requests.clear()
    with pytest.raises(TypeError):
        list(ckpt["w"])
    with pytest.raises(TypeError):
        1 in ckpt["w"]  # noqa: B015
    assert requests == []


def test_a_pickled_opening_reads_on_and_carries_no_secret():
    ckpt = dos.open(saved({"w": torch.ones(2)}))
    copied = pickle.loads(pickle.dumps(ckpt))
    assert (copied.url, copied.commit_id) == (ckpt.url, ckpt.commit_id)
    assert same_bits(copied["w"].read(), torch.ones(2))
    options = {"key": "AKIAEXAMPLE", "secret": "very-secret-indeed"}
    spec = StoreSpec("s3://bucket/run", options)
    private = dos.Checkpoint(
        spec,
        ckpt._stored,
        verify=True,
        trust_pickle=False,
        event_settings=EventSettings(None, None),
    )
    assert b"very-secret" not in pickle.dumps(private)
    assert b"AKIAEXAMPLE" not in pickle.dumps(private)


def test_tensors_are_made_on_the_device_that_was_asked_for():
    ckpt = dos.open(saved({"w": torch.ones(2)}))
    assert ckpt.read("w", device=torch.device("cpu"))["w"].device.type == "cpu"
    with pytest.raises(UnsupportedError, match="meta"):  # so it was made there, not moved there
        ckpt.read("w", device="meta")
    absent = "mps" if torch.cuda.is_available() else "cuda"
    for device in ("gpu", "cuda:x", absent, object(), None):
        with pytest.raises(ConfigError, match="device"):
            ckpt.read("w", device=device)


def test_memory_that_is_not_there_is_said_with_the_key_and_by_a_gpu_itself(monkeypatch):
    empty = torch.empty
    for error in (MemoryError(), RuntimeError("none")):

        def allocate(shape: Any, error: Exception = error, **settings: Any) -> torch.Tensor:
            if shape != 0:
                raise error
            return empty(0, **settings)

        monkeypatch.setattr(torch, "empty", allocate)
        with pytest.raises(UnsupportedError, match="no memory") as caught:
            new_tensor("w", (3,), torch.int8, "cpu")
        assert caught.value.key == "w"
        with pytest.raises(type(error)):
            new_tensor("w", (3,), torch.int8, "meta")
    with pytest.raises(UnsupportedError, match="no memory for 3 bytes"):
        new_tensors([((3,), torch.int8)])
    for error in (RuntimeError(), TypeError(), ValueError(), AssertionError(), ImportError()):

        def no_device(_: object, error: Exception = error) -> None:
            raise error

        monkeypatch.setattr(torch, "device", no_device)
        with pytest.raises(ConfigError, match="device"):
            new_tensor("w", (3,), torch.int8, "cpu")


def test_tensors_in_one_piece_begin_at_whole_cache_lines():
    wanted = [((3,), torch.int8), ((2, 2), torch.float64), ((5,), torch.bool)]
    made = new_tensors(wanted)
    assert [(tensor.shape, tensor.dtype) for tensor in made] == wanted
    assert [tensor.data_ptr() - made[0].data_ptr() for tensor in made] == [0, 64, 128]


def test_a_tensor_whose_chunks_leave_rows_out_is_refused_not_made_up(tmp_path):
    full = seeded("w", (8, 3))
    dcp.save({"w": full}, checkpoint_id=tmp_path / "stock")
    path = tmp_path / "stock" / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    metadata.state_dict_metadata["w"].size = torch.Size((12, 3))
    assert metadata.state_dict_metadata["w"].chunks == [
        ChunkStorageMetadata(torch.Size((0, 0)), torch.Size((8, 3)))
    ]
    path.write_bytes(pickle.dumps(metadata))
    ckpt = dos.open((tmp_path / "stock").as_uri())
    assert same_bits(ckpt["w"][:8], full)
    for read in (ckpt.read, ckpt["w"].read, lambda: ckpt["w"][7:9]):
        with pytest.raises(CheckpointCorruptError, match="do not make up") as caught:
            read()
        assert caught.value.key == "w"
