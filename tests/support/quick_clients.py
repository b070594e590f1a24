"""Clients of libraries that are made quickly: what each would read again is read once a process.

A client of boto3 takes 60 ms of a processor otherwise, one of s3fs 180, and tests make thousands.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest

# The only authority that tests trust by default; the usual ones are 150, parsed for each client.
AUTHORITY = Path(__file__).parents[1] / "fixtures" / "authority.pem"


def share_what_is_read(patched: pytest.MonkeyPatch) -> None:
    """Let all sessions of botocore share the services' descriptions, and all clients the rules."""
    from botocore import hooks, httpsession, regions, session

    patched.setattr(session, "create_loader", functools.cache(session.create_loader))
    patched.setattr(hooks, "accepts_kwargs", functools.cache(hooks.accepts_kwargs))
    aliased = hooks.EventAliaser._alias_event_name
    shared: dict[str, str] = {}

    def alias(emitter: Any, name: str) -> str:
        if name not in shared:
            shared[name] = aliased(emitter, name)
        return shared[name]

    patched.setattr(hooks.EventAliaser, "_alias_event_name", alias)
    patched.setattr(regions, "EndpointProvider", _shared_rules(regions.EndpointProvider))
    patched.setattr(httpsession, "where", lambda: str(AUTHORITY))


def _shared_rules(make: Any) -> Any:
    made: dict[object, Any] = {}

    def provider(ruleset_data: Any, partition_data: Any, **others: Any) -> Any:
        # The loader, which lives as long as the process, has both; so their ids are theirs alone.
        key = id(ruleset_data), id(partition_data), repr(others)
        if key not in made:
            made[key] = make(ruleset_data, partition_data, **others)
        return made[key]

    return provider
