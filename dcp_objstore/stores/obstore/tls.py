"""`TlsSocket`: TLS that receives many records by one system call; threads take turns to decrypt."""

from __future__ import annotations

import socket
import ssl
import threading

from typing_extensions import Buffer

from dcp_objstore.config import processors
from dcp_objstore.forking import PerProcess

# The bytes that one call receives. Less means more calls; more has left the cache before it is
# decrypted.
_RECEIVED_BYTES = 256 * 1024
# RFC 5246, section 6.2.3: 16 KiB, 2 KiB of expansion, and the head. TLS 1.3 has less.
_MOST_RECORD_BYTES = 16384 + 2048 + 5


def new_turns() -> threading.Semaphore:
    """Return the turns of threads that decrypt: one at a time for each two processors.

    Python's `ssl` gives the GIL away and takes it back for each record. Threads that decrypt at the
    same time wait for one another each time, which costs as much as decrypting. So they take turns,
    and a thread that waits for the server lets the next one go on.
    """
    return threading.Semaphore(max(1, processors() // 2))


_turns = PerProcess(new_turns)


class TlsSocket(socket.socket):
    """A connected socket that speaks TLS.

    `ssl.SSLSocket` makes two calls of the kernel for each record of at most 16 KiB. This one lets
    `ssl` decrypt from memory. It has only a socket's `sendall`, `recv_into` and `makefile` for
    reading are for use.

    Args:
        below: a blocking socket, connected, whose time-outs are the kernel's. It is detached.
        context: the TLS settings of a client.
        host: the name that the certificate must have.
        session: the session to resume.

    Raises:
        OSError: the connection was lost, or there is no agreement with the server.
    """

    def __init__(
        self,
        below: socket.socket,
        context: ssl.SSLContext,
        host: str,
        session: ssl.SSLSession | None = None,
    ) -> None:
        super().__init__(below.family, below.type, below.proto, below.detach())
        # The kernel keeps the time-out; a new socket has that of `socket.setdefaulttimeout`.
        self.settimeout(None)
        self._arrived, self._to_send = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(
            self._arrived, self._to_send, server_hostname=host, session=session
        )
        try:
            self._shake_hands()
        except BaseException:
            self.close()
            raise

    @property
    def session(self) -> ssl.SSLSession | None:
        """The TLS session that the next connection can resume."""
        return self._tls.session

    def sendall(self, data: Buffer, flags: int = 0) -> None:  # noqa: ARG002
        """Encrypt and send, without flags."""
        self._tls.write(data)
        self._send()

    def recv_into(self, buffer: Buffer, nbytes: int = 0, flags: int = 0) -> int:  # noqa: ARG002
        """Receive and decrypt.

        Args:
            buffer: writable bytes, to be filled.
            nbytes: 0. Only as many bytes as `buffer` has room for can be asked for.
            flags: `MSG_WAITALL`, to receive all of them.

        Returns:
            How many bytes were received. With `MSG_WAITALL`, fewer mean that the connection was
            closed or lost, or was silent for the time-out.
        """
        into, done, read = memoryview(buffer), 0, self._tls.read
        with _turns.here:
            try:
                while True:
                    try:
                        # Each call of `read` returns at most one TLS record, and 0 at the end.
                        while done < len(into) and (count := read(len(into) - done, into[done:])):
                            done += count  # type: ignore[operator]  # typeshed says bytes
                    except ssl.SSLWantReadError:  # all that arrived is decrypted
                        if done and not flags:
                            return done
                        if not self._receive(len(into) - done if flags else 0):
                            return done  # the server closed the connection
                    else:
                        return done  # `into` is full, or TLS has ended
            except OSError:  # bytes that came before the error are returned all the same
                if not done:
                    raise
                return done

    def _shake_hands(self) -> None:
        """Make the TLS handshake. Only some threads do so at the same time; see `new_turns`."""
        with _turns.here:
            while True:
                try:
                    self._tls.do_handshake()
                except ssl.SSLWantReadError:
                    if not self._receive():
                        raise ConnectionError("the server closed during the handshake") from None
                else:
                    return  # the client's last records are sent with the first request

    def _send(self) -> None:
        """Send the records that TLS has made, if any."""
        if self._to_send.pending:
            super().sendall(self._to_send.read())

    def _receive(self, least_bytes: int = 0) -> int:
        """Receive records. Send first the records that TLS itself has made, such as a handshake's.

        The thread has a turn (see `new_turns`), and gives it up while it waits.

        Args:
            least_bytes: the decrypted bytes that are still to come. Default 0: wait for any byte.

        Returns:
            How many bytes of records were received; 0 if the connection was closed.
        """
        self._send()
        try:
            some = self.recv(_RECEIVED_BYTES, socket.MSG_DONTWAIT)
        except BlockingIOError:  # nothing has arrived yet
            _turns.here.release()
            try:
                some = self._wait(least_bytes)
            finally:
                _turns.here.acquire()
        return self._arrived.write(some)

    def _wait(self, least_bytes: int) -> bytes:
        """Wait for records; see `_receive`. Raise `TimeoutError` if none came in time."""
        # So many bytes of records are still to come: no record is shorter than what it decrypts to,
        # and of one record at most OpenSSL holds a part already.
        least_bytes = min(least_bytes - _MOST_RECORD_BYTES, _RECEIVED_BYTES)
        try:
            if least_bytes > 0:
                return self.recv(least_bytes, socket.MSG_WAITALL)
            return self.recv(_RECEIVED_BYTES)
        except BlockingIOError as error:  # this is how the kernel's time-out shows
            raise TimeoutError("the server is silent") from error
