"""The jobs that the launching process gives to ranks, and the events that ranks report back.

All are picklable.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from dcp_objstore.errors import DcpObjstoreError

Digests = Mapping[str, str]


@dataclass(frozen=True, kw_only=True)
class Train:
    """Train to the last step, as one rank of a group.

    Attributes:
        run_url: URL of the run; steps are saved at `{run_url}/step-{n}`.
        storage_options: options of the store.
        resume_url: the checkpoint to load first; None to begin at step 0.
        sequences_per_step: number of sequences of all ranks together; at least one per rank.
        save_steps: the steps to save, ascending; training ends at the last one.
        doomed_step: the step in whose save the last rank's upload is held until it is killed.
    """

    run_url: str
    storage_options: Mapping[str, object] | None
    resume_url: str | None
    sequences_per_step: int
    save_steps: tuple[int, ...]
    doomed_step: int | None = None


@dataclass(frozen=True, kw_only=True)
class LoadAlone:
    """Load a checkpoint in one process without a process group."""

    url: str
    storage_options: Mapping[str, object] | None


@dataclass(frozen=True, kw_only=True)
class LoadWithStock:
    """Load a downloaded checkpoint with torch's own tools only."""

    directory: str


Job = Train | LoadAlone | LoadWithStock


@dataclass(frozen=True, kw_only=True)
class Ready:
    """A rank has made its model. `parameters` is the number of parameters of the whole model."""

    parameters: int
    text_bytes: int


@dataclass(frozen=True, kw_only=True)
class Stepped:
    """A training step is done. `loss` is the mean over all ranks, in nats per byte."""

    step: int
    loss: float


@dataclass(frozen=True, kw_only=True)
class State:
    """The content of a state when it was saved, or after it was loaded.

    Attributes:
        step: number of training steps done.
        recorded_loss: loss on the fixed batch, as recorded in the state.
        fixed_loss: the same loss, computed now from the weights; None if there is no model.
        digests: SHA-256 of every whole tensor and value, by key.
    """

    step: int
    recorded_loss: float
    fixed_loss: float | None
    digests: Digests


@dataclass(frozen=True, kw_only=True)
class StepSaved:
    """A save is committed. `steps_meanwhile` counts the training steps during the save."""

    state: State
    total_bytes: int
    seconds: float
    objects: int
    steps_meanwhile: int


@dataclass(frozen=True, kw_only=True)
class Uploading:
    """The held rank has begun to upload this object."""

    key: str
    size_bytes: int


@dataclass(frozen=True, kw_only=True)
class StepLoaded:
    """A load is done. Bytes and seconds are those of this rank."""

    state: State
    total_bytes: int
    seconds: float
    reader: str = "dcp_objstore"


@dataclass(frozen=True, kw_only=True)
class RankFailed:
    """The job of this rank ended with an error.

    Attributes:
        error: the error, if it is a `DcpObjstoreError`.
        text: its type and message.
    """

    error: DcpObjstoreError | None
    text: str


@dataclass(frozen=True, kw_only=True)
class Ended:
    """The process has ended. The launcher reports this.

    A negative `exit_code` is the signal that ended it.
    """

    exit_code: int


RankEvent = Ready | Stepped | StepSaved | Uploading | StepLoaded | RankFailed | Ended
