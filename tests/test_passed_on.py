"""What a function of the front door is called with reaches what carries it out."""

from __future__ import annotations

import inspect

import pytest

import dcp_objstore as dos
from dcp_objstore.errors import ConfigError


@pytest.mark.parametrize(
    ("function", "target", "own"),
    [
        (dos.save, "write.api.ObjectStoreWriter", {"process_group"}),
        (dos.async_save, "write.async_save.begin_save", set()),
        (dos.load, "read.api.ObjectStoreReader", {"process_group", "strict"}),
        (dos.read_state_dict, "inspect.checkpoint.open", {"keys", "nested", "device", "progress"}),
    ],
)
def test_every_option_is_passed_on_under_its_name(function, target, own, monkeypatch):
    options = [
        name
        for name, parameter in inspect.signature(function).parameters.items()
        if parameter.kind == parameter.KEYWORD_ONLY and name not in own
    ]
    given = {name: object() for name in options}
    passed: dict[str, object] = {}

    def record(*_: object, **settings: object) -> None:
        passed.update(settings)
        raise ConfigError("recorded")

    monkeypatch.setattr(f"dcp_objstore.{target}", record)
    state = () if function is dos.read_state_dict else ({},)
    with pytest.raises(ConfigError, match="recorded"):
        function(*state, "memory://passed-on/step-1", **given)
    assert passed == given
