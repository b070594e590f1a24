"""DCP's default save planner with clear errors that all ranks agree on."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, TypeAlias
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import (
    DefaultSavePlanner,
    create_default_local_save_plan,
)
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, WriteItem
from torch.distributed.tensor import DTensor

from dcp_objstore import torch_private
from dcp_objstore.checkpoint.index import Numbers
from dcp_objstore.contexts import contextmanager
from dcp_objstore.distributed.failures import from_all
from dcp_objstore.distributed.groups import gone_error, is_first
from dcp_objstore.distributed.plugin import by_cause, same_url
from dcp_objstore.errors import DcpObjstoreError
from dcp_objstore.observe.report import logger
from dcp_objstore.state.per_rank import is_stateful
from dcp_objstore.state.record import Empty
from dcp_objstore.state.state_dict import AgreeingPlanner
from dcp_objstore.state.tensor_frame import check_kind
from dcp_objstore.write.global_plan import LocalPlan, plan_globally
from dcp_objstore.write.layout import check_item
from dcp_objstore.write.results import PlannedIndex
from dcp_objstore.write.same_values import SeenValues
from dcp_objstore.write.staging.state import StagedState


class _KnownItems(NamedTuple):
    """The write items of a value, and the `_signature` for which they hold."""

    signature: tuple[Any, ...]
    items: list[WriteItem]


class WriteItems:
    """The write items of the latest staged state, kept from one save to the next.

    A write item says what a tensor is and where it belongs, and is the same in each save. DCP makes
    the items in the saving thread, with calls that release the GIL. In a program that is busy in
    Python, each such call waits up to 5 ms to get the GIL back, and interrupts the program.
    """

    def __init__(self) -> None:
        self._known_items: dict[str, _KnownItems] = {}

    def of(self, state_dict: Mapping[str, Any], *, is_coordinator: bool) -> list[WriteItem]:
        """Return the items that `create_default_local_save_plan` makes of a flat, staged state.

        The items of an earlier copy are reused, and may say wrongly whether a tensor is pinned.
        """
        latest: dict[str, _KnownItems] = {}
        items: list[WriteItem] = []
        for key, value in state_dict.items():
            signature = _signature(value)
            if signature is None:
                items += _write_items(key, value, is_coordinator)
                continue
            of_key = self._known_items.get(key)
            if of_key is None or of_key.signature != signature:
                of_key = _KnownItems(signature, _write_items(key, value, is_coordinator))
            latest[key] = of_key
            items += of_key.items
        self._known_items = latest
        return items


def _write_items(key: str, value: Any, is_coordinator: bool) -> list[WriteItem]:
    """Return the items that DCP makes of a value; the error names its key."""
    check_kind(value, key)
    try:
        return create_default_local_save_plan({key: value}, is_coordinator).items
    except DcpObjstoreError as error:  # of a value that could not be staged: it says why here
        raise error.at(key=key) from None
    except Exception as error:
        raise by_cause(error, "torch cannot say how to store this", key) from error


def _signature(value: Any) -> tuple[Any, ...] | None:
    """Return a key that is equal only for values with the same write items.

    It is None if the items of the value must be made for each save.
    """
    if type(value) not in (torch.Tensor, DTensor):
        return None
    local = torch_private.local_tensor(value)
    if type(local) is not torch.Tensor or any(map(torch_private.own_sharding, (value, local))):
        return None  # the tensor itself says which items it has
    spec = torch_private.spec_of(value) if isinstance(value, DTensor) else None
    # By the `id` of the spec, which the key keeps alive: the meshes of two equal specs may give
    # this process different coordinates.
    return id(spec), spec, local.dtype, value.requires_grad, value.size()


# The process has only one of them, because `dcp_objstore.async_save` runs one save at a time.
_staged_items = WriteItems()


class _Offer(NamedTuple):
    """The message of a rank to the coordinator.

    Attributes:
        plan: None if all ranks have agreed that the layout is a known one.
    """

    url: str
    plan: LocalPlan | None


class _Share(NamedTuple):
    """The answer of the coordinator to a rank.

    Attributes:
        number: the number of a new layout.
        own: the positions of the items that this rank writes.
    """

    number: int
    own: Numbers


class _KnownLayout(NamedTuple):
    """The layout of an earlier save of these ranks.

    Attributes:
        number: a number that the coordinator has drawn, the same on all ranks.
        planned: the index that the coordinator has planned; None on other ranks.
        own: the positions of the items that this rank writes.
    """

    number: int
    planned: PlannedIndex | None
    own: Numbers


# The latest layouts of a group's saves, by what this rank wanted to save. There are several,
# because a job may save its model and an average of it in turn.
_Layouts: TypeAlias = dict[LocalPlan, _KnownLayout]
_MOST_LAYOUTS = 4
_layouts: WeakKeyDictionary[dist.ProcessGroup, _Layouts] = WeakKeyDictionary()
_layouts_alone: _Layouts = {}
_seen: WeakKeyDictionary[dist.ProcessGroup, SeenValues] = WeakKeyDictionary()


class AgreeingSavePlanner(AgreeingPlanner, DefaultSavePlanner):
    """A save planner that refuses ranks with different URLs before a byte is uploaded.

    Its plans are those of DCP's default planner. The ranks send their items as columns, and
    nothing at all if no rank's layout has changed since an earlier save: then that save's plan
    holds.

    It saves tensors as they are, and no other code has a reference to a copy that
    `dcp_objstore.async_save` stages. So the digests computed during staging hold for what is
    uploaded. A copy that a writer stages for `dcp.async_save` may be changed by the caller or a
    wrapper of that, so it is hashed as it is uploaded.

    Args:
        state_dict: the state to save. (DCP passes its own dict to the planner.)
        ranks: the number of ranks that save together. DCP itself believes that a rank is alone once
            its process group was destroyed.

    Attributes:
        digests: known digests of staged tensors, by the address and size of their memory; empty if
            the state was not staged.
        is_copied: whether the planner resolves items to copies, which take memory until they are
            uploaded.
        check_stopped: a function that raises once the upload has to stop. A planner that waits for
            data calls it during the upload. None before the upload.
    """

    is_copied = False
    check_stopped: Callable[[], None] | None = None

    def __init__(self, url: str, state_dict: Mapping[str, Any], ranks: int) -> None:
        super().__init__()
        self._url = url
        self._ranks = ranks
        self._is_staged = isinstance(state_dict, StagedState)
        self.digests: Mapping[tuple[int, int], bytes] = (
            state_dict.digests if isinstance(state_dict, StagedState) else {}
        )
        self._local_plan: LocalPlan | None = None
        self._planned: PlannedIndex | None = None
        self._layouts: _Layouts = {}
        self._known_layout: _KnownLayout | None = None  # if all ranks have agreed on it
        # Errors of `take` and `agree`, of which `create_local_plan` raises the latest. In a list,
        # because a local variable would make a reference cycle of the error and its frame.
        self._postponed: list[BaseException] = []

    def take(
        self, state_dict: Mapping[str, Any], group: dist.ProcessGroup | None
    ) -> dict[str, Any]:
        """Find out what of a state this rank wants to save.

        An error is raised by `create_local_plan`, from where DCP tells all ranks.

        Returns:
            The state, with the states of Stateful objects in their place: DCP would ask for these
            where an error does not reach the other ranks. It may be empty after an error.
        """
        plain: dict[str, Any] = {}
        with self._postponed_errors():
            plain = {
                key: value.state_dict() if is_stateful(value) else value
                for key, value in state_dict.items()
            }
            self.set_up_planner(plain, is_coordinator=is_first(group))
            self._make_local_plan()
        return plain

    def agree(self, group: dist.ProcessGroup | None) -> None:
        """Find out whether all ranks save the layout of an earlier save. A collective.

        Call `take` before. Warn of plain values that are not the same on all ranks.
        """
        self._layouts = _layouts_alone if group is None else _layouts.setdefault(group, {})
        seen_values = SeenValues() if group is None else _seen.setdefault(group, SeenValues())
        layout = None if self._local_plan is None else self._layouts.get(self._local_plan)
        values: dict[str, Any] = {}  # plain values of this rank
        digest: bytes | None = None
        if group is not None and self._local_plan is not None:
            with self._postponed_errors():  # even of Ctrl-C: the other ranks wait in `from_all`
                values = seen_values.compared(self.state_dict)
                digest = seen_values.digest(values)
        of_ranks = from_all((None if layout is None else layout.number, digest), self._url, group)
        numbers, digests = ({*column} for column in zip(*of_ranks, strict=True))
        # All ranks know the same layout; or none knows one, and `layout` is None.
        if len(numbers) == 1:
            self._known_layout = layout
        # A rank has no digest (None) after an error, or if a value cannot be pickled.
        if len(digests) > 1 and None not in digests:
            error = seen_values.compare(values, self._url, group)
            self._postponed += [] if error is None else [error]

    @contextmanager
    def _postponed_errors(self) -> Iterator[None]:
        """Keep what the block raises, for `create_local_plan` to raise it."""
        try:
            yield
        except BaseException as error:  # noqa: BLE001 - the other ranks would wait for this one
            self._postponed.append(error)

    def set_up_planner(
        self, state_dict: dict[str, Any], storage_meta: Any = None, is_coordinator: bool = False
    ) -> None:
        """Override `AgreeingPlanner.set_up_planner`; do nothing if `take` has made the plan.

        torch looks for a parameter with the name `storage_meta`.
        """
        if self._local_plan is None:
            super().set_up_planner(state_dict, storage_meta, is_coordinator)
            # The state is flat now, and `Empty` is replaced by the empty dict that it stands for.
            empty = [key for key, value in self.state_dict.items() if value is Empty]
            self.state_dict.update((key, {}) for key in empty)

    def make_items(self) -> list[WriteItem]:
        """Return what this rank has; reuse the items of a staged state."""
        if self._is_staged:
            return _staged_items.of(self.state_dict, is_coordinator=self.is_coordinator)
        for key, value in self.state_dict.items():
            check_kind(value, key)
        try:
            return create_default_local_save_plan(self.state_dict, self.is_coordinator).items
        except Exception:  # noqa: BLE001 - `_write_items` raises it again, and names the key
            items = (_write_items(*pair, self.is_coordinator) for pair in self.state_dict.items())
            return [item for of_value in items for item in of_value]

    def _make_local_plan(self) -> LocalPlan:
        """Return what this rank wants to save; make its items in the first call."""
        if self._local_plan is None:
            items = self.make_items()
            for item in items:
                check_item(item)
            self.plan = SavePlan(items)
            self._local_plan = LocalPlan.of(items, self.mappings)
        return self._local_plan

    def create_local_plan(self) -> SavePlan:
        """Override `DefaultSavePlanner.create_local_plan`: tell the coordinator what this rank has.

        Raises:
            DcpObjstoreError: an error of `take` or `agree`, or of an item that cannot be saved.
        """
        with self._typed_errors():
            if self._postponed:
                raise self._postponed.pop()
            local = self._make_local_plan()
        return SavePlan([], storage_data=_Offer(self._url, None if self._known_layout else local))

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Override `DefaultSavePlanner.create_global_plan`; check that all ranks save together.

        `ObjectStoreWriter.finish` takes the `PlannedIndex` out of the Metadata.

        Raises:
            InvalidUrlError: the ranks save to different URLs.
            InputError: the process group was destroyed during the save.
            StateMismatchError: the ranks' items do not fit together.
        """
        with self._typed_errors():
            # After the process group was destroyed, DCP believes that this rank is alone.
            if len(all_plans) != self._ranks:
                raise gone_error(self._url)
            offers: list[Any] = [plan.storage_data for plan in all_plans]  # an `_Offer` of each
            same_url([offer.url for offer in offers])
            shares: list[_Share | None] = [None] * len(offers)
            # With a known layout, no rank has sent its items, and each knows its share.
            if self._known_layout is None:
                self._planned, of_ranks = plan_globally([offer.plan for offer in offers])
                number = secrets.randbits(62)
                shares = [_Share(number, own) for own in of_ranks]
            else:
                self._planned = self._known_layout.planned
            assert self._planned is not None
        if not self._planned.tensors and not self._planned.blobs:
            logger.warning("%s: the state is empty on every rank; nothing is saved", self._url)
        central = [SavePlan([], storage_data=share) for share in shares]
        return central, Metadata({}, planner_data=self._planned)

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        """Override `DefaultSavePlanner.finish_plan`; return the items that this rank writes."""
        with self._typed_errors():
            share: _Share | None = new_plan.storage_data
            layout = self._known_layout
            if share is not None:  # this save's layout is new
                layout = _KnownLayout(share.number, self._planned, share.own)
            assert layout is not None
            local = self._make_local_plan()
            # The layout is moved to the end of the dict, which is in the order of use.
            self._layouts.pop(local, None)
            self._layouts[local] = layout
            for oldest in list(self._layouts)[:-_MOST_LAYOUTS]:
                self._layouts.pop(oldest, None)  # unless another thread has removed it
            items = [self.plan.items[at] for at in layout.own.tolist()]
            self.plan = SavePlan(items)
            return self.plan
