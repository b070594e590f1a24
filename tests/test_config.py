"""Settings: each bound, at it and just beside it; what stands for a folder of a node."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dcp_objstore import config
from dcp_objstore.config import MIB, Local, TransferConfig, at_most, local_of, processors
from dcp_objstore.errors import ConfigError

INTEGER, NUMBER, AUTO = "an integer", "a number", '"auto" or an integer'


@pytest.mark.parametrize(
    ("name", "kind", "least"),
    [
        ("part_size_bytes", INTEGER, 5 * MIB),
        ("upload_concurrency", AUTO, 1),
        ("max_object_size_bytes", INTEGER, 5 * MIB),
        ("request_size_bytes", INTEGER, 4 * MIB),
        ("download_concurrency", AUTO, 1),
        ("memory_budget_bytes", INTEGER, 8 * MIB),
        ("hash_threads", INTEGER, 1),
        ("connect_timeout_seconds", NUMBER, 0.001),
        ("request_timeout_seconds", NUMBER, 0.001),
        ("stall_timeout_seconds", NUMBER, 0.001),
        ("max_retries", INTEGER, 0),
        ("retry_timeout_seconds", NUMBER, 0),
        ("peer_timeout_seconds", NUMBER, 0.001),
    ],
)
def test_a_setting_is_taken_from_its_bound_on_and_below_it_refused_by_name(name, kind, least):
    for value in (least, int(least) + 1, *(["auto"] if kind is AUTO else [])):
        assert getattr(TransferConfig(**{name: value}), name) == value
    step = 0.001 if kind is NUMBER else 1
    refused = [least - step, True, float("nan"), "128MiB"]
    refused += [] if kind is AUTO else ["auto"]
    refused += [] if kind is NUMBER else [least + 0.5]
    for value in refused:
        with pytest.raises(ConfigError) as caught:
            TransferConfig(**{name: value})
        said = f"TransferConfig.{name} must be {kind} of at least {least}, got {value!r}"
        assert str(caught.value) == said


@pytest.mark.parametrize(
    ("name", "most", "said"),
    [("part_size_bytes", 5 * 2**30, "5 GiB"), ("max_object_size_bytes", 5 * 2**40, "5 TiB")],
)
def test_a_size_is_taken_up_to_what_every_store_takes(name, most, said):
    assert getattr(TransferConfig(**{name: most}), name) == most
    with pytest.raises(ConfigError, match=f"{name} must be at most {said}"):
        TransferConfig(**{name: most + 1})


def test_auto_stands_for_the_most_that_the_documentation_names():
    assert (at_most("auto"), at_most("auto", config.PINNED_MOST), at_most(3, 2)) == (64, 8, 3)
    assert config.COPIED_MOST_BYTES == 128 * MIB


def test_the_processors_are_those_that_this_process_may_use(monkeypatch):
    asked: Any = SimpleNamespace(sched_getaffinity=[{1, 5}].__getitem__, cpu_count=lambda: 3)
    monkeypatch.setattr(config, "os", asked)
    assert processors() == 2
    del asked.sched_getaffinity
    assert processors() == 3
    asked.cpu_count = lambda: None
    assert processors() == 1


def test_a_folder_of_a_node_is_a_path_of_this_machine_made_absolute(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for given in ("nvme/x", b"nvme/x", Path("nvme/x"), str(tmp_path / "nvme" / "x")):
        assert Local(given, max_bytes=0) == Local(os.fspath(tmp_path / "nvme" / "x"), 0)  # type: ignore[arg-type]
    local = Local("/nvme")
    assert (local_of(None), local_of(local), local_of("/nvme")) == (None, local, local)
    for folder, said in (
        *((given, "must be a folder of this machine") for given in ("", "a\0b", "s3:/b", "s3://b")),
        (3, "must be a path or dos.Local, got 3"),
    ):
        with pytest.raises(ConfigError, match=said):
            Local(folder)  # type: ignore[arg-type]
    for max_bytes in (-1, 0.5, "1"):
        with pytest.raises(ConfigError, match="max_bytes must be None or an integer of at least 0"):
            Local("/nvme", max_bytes)  # type: ignore[arg-type]
