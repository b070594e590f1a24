"""What the integration of Lightning does on a store; `tests/frameworks` has Lightning itself."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any

import torch

import dcp_objstore as dos
from dcp_objstore.checkpoint import commit as commits
from dcp_objstore.checkpoint.names import is_index_key
from dcp_objstore.integrations.lightning import _ObjectStore, _url
from dcp_objstore.run.housekeeping import Deletions


def test_last_is_what_was_committed_last_whatever_the_clocks_of_the_hosts(
    tmp_path, monkeypatch, requests
):
    run, first, second = tmp_path.as_uri(), "z-step=100.ckpt", "a-step=200.ckpt"
    dos.save({"w": torch.zeros(1)}, f"{run}/{first}", progress=False)

    class Behind(datetime):
        @classmethod
        def now(cls, tz: Any = None) -> datetime:
            return datetime.now(tz) - timedelta(minutes=10)

    monkeypatch.setattr(commits, "datetime", Behind)
    dos.save({"w": torch.ones(1)}, f"{run}/{second}", progress=False)
    dos.pin(f"{run}/{first}", "paper")  # which writes its marker later than the other's
    store = _ObjectStore(
        background=False,
        deletions=Deletions(0),
        sweep=False,
        trust_pickle=False,
        access={"storage_options": None, "config": None},
        on_event=None,
    )
    requests.clear()
    last = store.newest(run)
    assert [one.verb for one in requests].count("list") == 1
    assert _url(last) == f"{run}/{second}"
    # Lightning compares the times of such objects where several callbacks have a last one.
    assert is_index_key(last.rpartition("/")[2])
    assert store.newest(f"{run}/nothing") is None
