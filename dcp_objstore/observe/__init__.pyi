"""The public names of `dcp_objstore.observe` and where each is defined."""

from . import events as events
