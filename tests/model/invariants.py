"""What must hold in every state of the store. What actors are told is checked by `Actor.wrong`."""

from __future__ import annotations

from tests.model.world import Store, save_name


def what_is_wrong(store: Store) -> str | None:
    """The broken promise, or None."""
    marker = store.marker
    if marker is not None and marker.is_committed:
        bit = 1 << marker.commit
        data = 1 if store.borrowed & bit else 1 << store.data_of(marker.commit)
        if not store.data & data:
            return f"live object deleted: {save_name(marker.commit)} is committed, its data is gone"
        if not store.index & bit:
            return f"live object deleted: {save_name(marker.commit)} is committed without its index"
        if marker.commit and store.strange & bit:
            return f"false digests: {save_name(marker.commit)} is committed with other bytes"
    if marker is not None:
        for save in range(store.committed.bit_length()):
            if store.committed >> save & 1 and not marker.knows(save):
                return f"lost commit: {save_name(save)} took effect and was replaced unseen"
    return None


def what_is_wrong_at_rest(store: Store) -> str | None:
    """The same where every actor has come to its end, and none has given up.

    A process that dies after its commit leaves `.metadata` as it was, and so does one whose PUT of
    `.metadata` is held up by the network until a deletion has removed what it was conditioned on
    (`absent` comes back; `arrivals` counts that as giving up). The next sweep mends both.

    It does not hold of three writers and a deleter: a save that was deleted may take back the
    `.metadata` of the last one, and the one in between then put its own. A sweep mends that, too,
    when it finds what the one in between has left.
    """
    marker = store.marker
    if marker is not None and marker.state == "deleting":
        return None  # who comes next finishes it
    current = marker.commit if marker is not None and marker.is_committed else None
    if store.dot not in (None, current):
        return (
            f"stale .metadata: stock readers see {save_name(store.dot)}, what is committed is"
            f" {save_name(current)}"
        )
    return None
