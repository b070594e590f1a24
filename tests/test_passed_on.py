"""What a function of the front door is called with reaches what carries it out."""

from __future__ import annotations

import inspect

import pytest

import dcp_objstore as dos
from dcp_objstore.errors import ConfigError

URL = "memory://passed-on/step-1"


@pytest.mark.parametrize(
    ("function", "arguments", "target", "own"),
    [
        (dos.save, ({}, URL), "write.api.ObjectStoreWriter", {"process_group"}),
        (dos.async_save, ({}, URL), "write.async_save.begin_save", set()),
        (dos.load, ({}, URL), "read.api.ObjectStoreReader", {"process_group", "strict"}),
        (
            dos.read_state_dict,
            (URL,),
            "inspect.checkpoint.open",
            {"keys", "nested", "device", "progress"},
        ),
        (
            dos.import_checkpoint,
            ("memory://passed-on/other", URL),
            "convert.import_checkpoint.ObjectStoreWriter",
            {"rename", "source_storage_options", "trust_pickle"},
        ),
        (
            dos.average,
            (["memory://passed-on/1", "memory://passed-on/2"], URL),
            "convert.average.ObjectStoreWriter",
            {"source_storage_options", "trust_pickle", "process_group"},
        ),
        (
            dos.copy_checkpoint,
            ("memory://passed-on/saved", URL),
            "convert.copy.Save.start",
            {
                *("source_storage_options", "progress", "on_event", "trace", "streamed"),
                *("storage_options", "config"),
            },
        ),
    ],
)
def test_every_option_is_passed_on_under_its_name(function, arguments, target, own, monkeypatch):
    options = [
        name
        for name, parameter in inspect.signature(function).parameters.items()
        if parameter.kind == parameter.KEYWORD_ONLY and name not in own
    ]
    given: dict[str, object] = {name: object() for name in options}
    if function is dos.average:  # which opens its inputs first
        given |= {"config": dos.TransferConfig(), "storage_options": {}}
    dos.save({"step": 1}, "memory://passed-on/saved", overwrite=True)
    passed: dict[str, object] = {}

    def record(*_: object, **settings: object) -> None:
        passed.update(settings)
        passed.pop("clock", None)
        raise ConfigError("recorded")

    monkeypatch.setattr(f"dcp_objstore.{target}", record)
    with pytest.raises(ConfigError, match="recorded"):
        function(*arguments, **given)
    assert passed == given
