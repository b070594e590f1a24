"""Who does not pass `local=` notices nothing: no folder, no call, and the same requests."""

from __future__ import annotations

import inspect
import re
import secrets
from collections import Counter
from types import ModuleType
from typing import Any

import pytest

import dcp_objstore as dos
from dcp_objstore.local import copies, folder
from tests.support.node_copies import state_of
from tests.support.wrapped_stores import Request


def forbid(patched: pytest.MonkeyPatch, *modules: ModuleType) -> None:
    """Let every function of these modules raise, and everything that makes an object of theirs."""

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("nobody has asked for copies")

    for module in modules:
        for name, value in vars(module).items():
            if getattr(value, "__module__", None) != module.__name__:
                continue
            if inspect.isfunction(value):
                patched.setattr(module, name, refuse)
            elif inspect.isclass(value):
                patched.setattr(value, "__init__", refuse)


def shapes(requests: list[Request]) -> Counter[tuple[str, str, int]]:
    """Requests without what is drawn at random or says how long something took."""
    return Counter(
        (
            one.verb,
            re.sub(r"[0-9a-f]{8,}", "*", one.key.rpartition("/")[2]),
            one.bytes if one.key.endswith(".distcp") else 0,
        )
        for one in requests
    )


def use(run: str, **options: Any) -> None:
    """In the foreground and in the background, to a new URL and over another checkpoint."""
    for step in (1, 2):
        dos.save(state_of(step), f"{run}/step-{step}", progress=False, **options)
    dos.async_save(state_of(3), f"{run}/step-3", progress=False, **options).result()
    dos.save(state_of(3), f"{run}/step-3", overwrite=True, progress=False, **options)
    dos.load(state_of(3, blank=True), f"{run}/step-3", progress=False, **options)


def manage(run: str) -> None:
    with dos.CheckpointManager(run, save_every=1) as manager:
        assert manager.load(state_of(3, blank=True)) == 3
        manager.step(4, state_of(4))


def test_no_code_of_copies_is_called_and_no_folder_made(tmp_path, monkeypatch):
    for name in ("HOME", "TMPDIR"):
        (tmp_path / name).mkdir()
        monkeypatch.setenv(name, str(tmp_path / name))
    monkeypatch.chdir(tmp_path)
    with monkeypatch.context() as patched:
        forbid(patched, copies, folder)
        run = f"memory://{secrets.token_hex(6)}/run"
        use(run)
        manage(run)
    assert not [path for path in tmp_path.rglob("*dcp-objstore-*") if path.is_dir()]


def test_copies_change_no_request_but_those_that_they_spare(tmp_path, requests):
    run = f"memory://{secrets.token_hex(6)}/run"
    use(f"{run}-1")
    without = shapes(requests)
    requests.clear()
    use(f"{run}-2", local=str(tmp_path))
    with_copies = shapes(requests)
    spared = without - with_copies
    assert with_copies - without == Counter()
    assert {(verb, key.rpartition(".")[2]) for verb, key, _ in spared} == {("open_range", "distcp")}
    assert not [one for one in with_copies if one[0] == "open_range"]
