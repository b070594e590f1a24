"""`SlowSink`: the benchmarks' S3-shaped sink in this process, behind a plan that refuses requests.

Bodies of parts are dropped by the kernel, so hundreds of them take seconds on a busy machine.
"""

from __future__ import annotations

import socket
import threading
from typing import Any
from urllib.parse import urlencode

from benchmarks.sink_objects import Objects, RefusedError
from benchmarks.sink_server import Connection
from benchmarks.wire import Throttle, Wire
from tests.support.proxy import Asked, Plan, Refuse


class SlowSink:
    """On loopback, until the `with` block ends.

    Args:
        keep: large bodies too, in memory.
        bytes_per_second: that it takes of large bodies, all connections together.

    Attributes:
        storage_options: what reaches it.
        asked: every request so far, refused ones included.
        plan: asked for each of them; it may answer None or `Refuse`.
        objects: what it holds.
    """

    def __init__(self, *, keep: bool = False, bytes_per_second: float | None = None) -> None:
        self.asked: list[Asked] = []
        self.plan: Plan = lambda asked: None
        self.objects = Objects()
        self._keep = keep
        self._throttle = None if bytes_per_second is None else Throttle(bytes_per_second)
        self._lock = threading.Lock()
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=128)
        endpoint_url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self.storage_options = {"key": "sink", "secret": "sink", "endpoint_url": endpoint_url}

    def check(self, request: Any) -> None:
        """Refuse what the plan refuses."""
        with self._lock:
            query, key = urlencode(request.query), f"/{request.place}"
            asked = Asked(request.method, key, query, request.headers, len(self.asked))
            self.asked.append(asked)
            fault = self.plan(asked)
        if fault is not None:
            assert isinstance(fault, Refuse)
            raise RefusedError(f"{fault.status} Refused", fault.code)

    def _accept(self) -> None:
        while True:
            try:
                accepted, _ = self._listener.accept()
            except OSError:  # closed at the end
                return
            wire = Wire(accepted, shared=self._throttle)
            connection = _Checked(wire, self.objects, keep=self._keep)
            connection.sink = self
            threading.Thread(target=connection.serve, daemon=True).start()

    def __enter__(self) -> SlowSink:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()


class _Checked(Connection):
    sink: SlowSink

    def _answer(self, request: Any, body: Any) -> None:
        self.sink.check(request)
        super()._answer(request, body)
