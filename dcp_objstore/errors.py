"""Every error that this project raises, grouped by what the caller does next.

    DcpObjstoreError
    ├── RetryableError        try again, now or later: nothing was lost
    │   ├── StoreUnavailableError     5xx, throttling, connection or time-out, after all retries
    │   │   └── UploadLostError       the store has lost a multipart upload before its end
    │   ├── TransferStalledError      no byte moved within `stall_timeout_seconds`
    │   ├── CommitUnknownError        the store never said whether the commit took effect
    │   └── SaveInProgressError       this writer is busy with another save
    ├── InputError            fix the call, the settings or the credentials
    │   ├── InvalidUrlError, ConfigError, UnsupportedError, ForkedProcessError
    │   ├── CredentialsError, PermissionDeniedError
    │   ├── StoreFullError            the disk, the bucket or a quota is full: make room
    │   ├── BucketNotFoundError, ObjectNotFoundError
    │   ├── CheckpointExistsError, CheckpointNotFoundError, CheckpointPinnedError
    │   ├── StateMismatchError        the state asks for keys or shapes the checkpoint lacks
    │   └── UntrustedPickleError      reading this value could run code: `add_safe_globals`
    ├── CorruptDataError      the bytes are not what was saved: use another checkpoint
    │   └── CheckpointCorruptError
    ├── LostRaceError         another writer was first; what it wrote is whole
    │   ├── PreconditionFailedError   the object is not in the state the write was conditioned on
    │   ├── CommitLostError           another writer committed this checkpoint
    │   ├── SupersededError           a newer job claimed the run: stop this job
    │   └── CheckpointGoneError       the checkpoint was deleted or replaced while it was read
    └── RankFailedError       a rank failed with an error of another library; its text is kept

Some are also the error that Python and fsspec raise for the same thing: `FileNotFoundError` (a
bucket, object or checkpoint that is not there), `FileExistsError` (CheckpointExistsError),
`PermissionError` (PermissionDeniedError), `TimeoutError` (TransferStalledError), `ValueError`
(InvalidUrlError, ConfigError), `KeyError` (AbsentKeyError).

Errors travel between ranks by pickle. An exception that does not unpickle leaves the ranks at
different collectives and hangs the job, so every class here is rebuilt from plain values.
"""

from __future__ import annotations


def printable(text: str, *, keep: str = "") -> str:
    r"""Return a text with an escape such as `\x1b` in place of each character that is not printed.

    Names and messages from a store are shown like this. On a terminal, control characters could
    overwrite other text, line feeds could begin a line that looks like a result, and
    characters that change the direction of text could reorder it.

    Args:
        text: the text.
        keep: characters that stay, although they are not printed.
    """
    return "".join(
        char if char.isprintable() or char in keep else char.encode("unicode_escape").decode()
        for char in text
    )


def one_line(error: object) -> str:
    """Return the text of an error on one line: for a log, or inside another text.

    Its lines become "what went wrong [where]; what to do".
    """
    text, *lines = (line.strip() for line in str(error).splitlines() or [""])
    for line in lines:
        text += f"{' ' if line.startswith('[') or text.endswith(':') else '; '}{line}"
    return text


def add_advice(error: DcpObjstoreError, advice: str) -> None:
    """Say one more thing to do about an error, unless it says so already."""
    if advice not in (error.advice or ""):
        error.advice = f"{error.advice}; {advice}" if error.advice else advice


class DcpObjstoreError(Exception):
    """The base class of every error that this package raises.

    Its text has up to three lines: what went wrong, where, and what to do. In logs it is one line.

    Attributes:
        message: what went wrong.
        advice: what to do about it, or None.
        rank: the rank on which it happened, or None outside a process group.
        key: the state-dict key (DCP's fqn) concerned, or None.
        object_key: the key of the object on the store, or None.
        url: the URL of the store or checkpoint, without credentials, or None.
        status: the HTTP status of the store's answer, or None if no answer led to this.
        code: the store's own code for what is wrong, such as `AccessDenied`, or None.
    """

    # Whether the text names `dcp-objstore doctor`, which looks into errors of this kind.
    _doctor_helps = False

    def __init__(
        self,
        message: str,
        rank: int | None = None,
        key: str | None = None,
        object_key: str | None = None,
        url: str | None = None,
        *,
        advice: str | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.advice = advice
        self.rank = rank
        self.key = key
        self.object_key = object_key
        self.url = url
        self.status: int | None = None
        self.code: str | None = None

    def __str__(self) -> str:
        """Return the message; the rank, key, object and URL that are known; the advice.

        Each is a line. Nothing in it acts on a terminal: see `printable`.
        """
        url = None if self.url is None else f"'{self.url}'"  # spaces at its end count, too
        where = [
            f"{label} {printable(str(value))}"
            for label, value in (
                ("rank", self.rank),
                ("key", self.key),
                ("object", self.object_key),
                ("url", url),
            )
            if value is not None
        ]
        advice = [self.advice] if self.advice else []
        if self._doctor_helps and url is not None:
            advice.append(f"dcp-objstore doctor {printable(url)} finds out more")
        lines = [self.message, f"[{', '.join(where)}]" if where else "", "; ".join(advice)]
        return "\n".join(printable(line, keep="\n\t") for line in lines if line)

    def __reduce__(self) -> tuple[object, ...]:
        """Rebuild from plain values; `__cause__` does not survive pickling anyway."""
        more = {"advice": self.advice, "status": self.status, "code": self.code}
        return type(self), (self.message, self.rank, self.key, self.object_key, self.url), more

    def at(
        self,
        rank: int | None = None,
        key: str | None = None,
        object_key: str | None = None,
        url: str | None = None,
    ) -> DcpObjstoreError:
        """Fill in where it happened, keep what is already known, and return self."""
        self.rank = rank if self.rank is None else self.rank
        self.key = key if self.key is None else self.key
        self.object_key = object_key if self.object_key is None else self.object_key
        self.url = url if self.url is None else self.url
        return self


class RetryableError(DcpObjstoreError):
    """The operation may succeed if it is tried again; nothing was lost."""


class StoreUnavailableError(RetryableError):
    """The store answered 5xx or 429, refused the connection or timed out, after all retries."""

    _doctor_helps = True


class UploadLostError(StoreUnavailableError):
    """A multipart upload ended without its object, although the store answers.

    The store says that there is no such upload, because something else aborted it, such as a
    lifecycle rule. Or a part came too slowly for the store, and the transport does not send it
    again. The object is sent again from its start, twice at most, before this is raised.
    """


class TransferStalledError(RetryableError, TimeoutError):
    """A transfer made no progress within `TransferConfig.stall_timeout_seconds`."""


class CommitUnknownError(RetryableError):
    """The store did not say in time whether a commit or a deletion took effect; it still may.

    Look at the checkpoint (`dcp-objstore ls`) before you save it again.
    """


class SaveInProgressError(RetryableError):
    """The writer is busy with another save; wait for it, or use a second writer."""


class InputError(DcpObjstoreError):
    """The call, the settings or the credentials need a change."""


class InvalidUrlError(InputError, ValueError):
    """The URL has no known scheme, no bucket, or a form that this package cannot use."""


class ConfigError(InputError, ValueError):
    """A setting has a wrong name, type or value."""


class UnsupportedError(InputError):
    """The store, torch or this version of the format cannot do what was asked."""


class ForkedProcessError(InputError):
    """A client that was made before a fork was used after it; open the store in the child."""


class CredentialsError(InputError):
    """There are no credentials, or they are wrong or expired."""

    _doctor_helps = True


class PermissionDeniedError(InputError, PermissionError):
    """The credentials are known but do not allow this."""

    _doctor_helps = True


class StoreFullError(InputError):
    """The disk or the bucket is full, or a quota is reached: make room, then save again."""


class BucketNotFoundError(InputError, FileNotFoundError):
    """The bucket does not exist."""

    _doctor_helps = True


class ObjectNotFoundError(InputError, FileNotFoundError):
    """There is no object under this key."""


class CheckpointExistsError(InputError, FileExistsError):
    """The checkpoint is committed already; pass `overwrite=True` to replace it."""


class CheckpointNotFoundError(InputError, FileNotFoundError):
    """There is no committed checkpoint at this URL."""


class CheckpointPinnedError(InputError):
    """The checkpoint is protected by pins and was not deleted; `unpin` removes a pin."""


class StateMismatchError(InputError):
    """The state asks for keys or shapes that the checkpoint does not have."""


class AbsentKeyError(StateMismatchError, KeyError):
    """An opened checkpoint does not have the requested key. Also a `KeyError`."""


class UntrustedPickleError(InputError):
    """A value is pickled in a way that could run code when it is read.

    Declare its class with `torch.serialization.add_safe_globals`, or pass `trust_pickle=True`.
    """


class CorruptDataError(DcpObjstoreError):
    """The bytes on the store are not what was saved."""


class CheckpointCorruptError(CorruptDataError):
    """A committed checkpoint lacks an object, or an object differs from what was saved."""


class LostRaceError(DcpObjstoreError):
    """Another writer was first; what it wrote is whole."""


class PreconditionFailedError(LostRaceError):
    """The object is not in the state that the request was conditioned on."""


class CommitLostError(LostRaceError):
    """Another writer committed this checkpoint while this save was under way."""


class SupersededError(LostRaceError):
    """A newer job claimed the run: what this job saves does not count. Stop this job."""


class CheckpointGoneError(LostRaceError):
    """The checkpoint was deleted or replaced while it was being read."""


class RankFailedError(DcpObjstoreError):
    """A rank failed with an error of another library; the message keeps its text."""
