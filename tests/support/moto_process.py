"""A moto S3 server in a process of its own, with a second door that speaks GCS's XML API.

Run as `python -m tests.support.moto_process`: prints the two ports, ends when standard input ends.
moto's backend has no locks, so every request to it is made whole, one at a time: that is what makes
conditional puts atomic here.
"""

from __future__ import annotations

import os
import sys
import threading

from moto.server import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import WSGIRequestHandler, make_server

from tests.support.gcs_door import GcsDoor, OneAtATime


class QuietHandler(WSGIRequestHandler):
    protocol_version = "HTTP/1.1"  # keep connections: two servers' worth of handshakes saved

    def log_request(self, *_: object) -> None:
        pass


def main() -> None:
    os.environ["MOTO_S3_DEFAULT_MAX_KEYS"] = "50"  # 1,000 objects take moto seconds
    app = DomainDispatcherApplication(create_backend_app)
    lock = threading.RLock()
    ports = []
    for door in (OneAtATime(app, lock), GcsDoor(app, lock)):
        server = make_server("127.0.0.1", 0, door, threaded=True, request_handler=QuietHandler)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        ports.append(server.server_port)
    print(*ports, flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()
