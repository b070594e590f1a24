"""One rank of `killed`: it saves, and waits to be killed; started again, it loads and steps.

torchrun starts it with a job as JSON. The times of what it does go into a file of its own.
"""

from __future__ import annotations

import time

_STARTED_AT = time.time()  # the imports are part of what is measured

import json  # noqa: E402
import os  # noqa: E402
import sys  # noqa: E402
from pathlib import Path  # noqa: E402

import torch.distributed as dist  # noqa: E402

import dcp_objstore as dos  # noqa: E402
from benchmarks.resume_state import (  # noqa: E402
    blank,
    expected_digests,
    fill,
    local,
    make_state,
    tensors_of,
    wrong_tensors,
)
from benchmarks.settings import Settings  # noqa: E402


def main() -> None:
    """Run the rank."""
    job = json.loads(sys.argv[1])
    times = {"processes start": _STARTED_AT, "imports": time.time()}
    dist.init_process_group("gloo")
    times["process group"] = time.time()
    state = make_state(Settings(**job["settings"]), "shard0")
    access = {"storage_options": job["storage_options"], "local": job["local"], "progress": False}
    folder, rank = Path(job["folder"]), dist.get_rank()
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        fill(state)
        dos.save(state, job["url"], **access)
        (folder / f"saved-{rank}").write_text(str(os.getpid()))
        time.sleep(3600)
    blank(state)
    times["state"] = time.time()
    dos.load(state, job["url"], **access)
    times["load"] = time.time()
    wrong = wrong_tensors(state, expected_digests(state))
    checked_at = time.time()
    for tensor in tensors_of(state):
        local(tensor).mul_(0.5)
    dist.barrier()
    times["step"] = times["load"] + time.time() - checked_at
    (folder / f"times-{rank}").write_text(json.dumps({"times": times, "wrong": wrong}))


if __name__ == "__main__":
    main()
