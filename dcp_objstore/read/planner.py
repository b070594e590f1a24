"""DCP's default load planner with clear errors that all ranks agree on."""

from __future__ import annotations

import dataclasses
import io
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.distributed.checkpoint.default_planner import (
    DefaultLoadPlanner,
    create_default_local_load_plan,
)
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem

from dcp_objstore import torch_private
from dcp_objstore.distributed.plugin import same_url
from dcp_objstore.errors import StateMismatchError
from dcp_objstore.observe.report import counted, first_few, logger
from dcp_objstore.read.mismatch import SHOWN_KEYS, OnDtype, mismatch, nearest, refuse_other_dtypes
from dcp_objstore.state.memory import same_memory
from dcp_objstore.state.per_rank import own_name
from dcp_objstore.state.record import Path, Place, Record
from dcp_objstore.state.state_dict import AgreeingPlanner, ConvertedState
from dcp_objstore.state.stored import constant_name
from dcp_objstore.state.tensor_frame import check_kind

# The keys of `optimizer.state_dict()`: torch numbers parameters there, and has no names.
_NUMBERED_STATE = re.compile(r"(?:^|\.)state\.\d+\.")
_EXTRA_STATE = "_extra_state"  # of torch.nn.Module
_NUMBER_HINT = "optimizer.state_dict() numbers the parameters: pass the optimizer itself, as saved"


class _LocalItems(NamedTuple):
    """The coordinator's view of a rank's items.

    Attributes:
        missing_count: number of keys that the rank asks for in vain.
        item_count: number of its items.
        unasked: a bit for each saved key, set if the rank does not ask for it.
    """

    url: str
    missing_count: int
    item_count: int
    unasked: bytes = b""


class _OwnPlan(LoadPlan):
    """A plan whose items stay on their rank when it is sent.

    The reader sends the coordinator which bytes the rank needs; nothing there looks at items. To
    pickle them both ways takes 15 µs each.
    """

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), ([], self.storage_data, self.planner_data)


class AgreeingLoadPlanner(AgreeingPlanner, DefaultLoadPlanner):
    """A load planner whose errors list every missing key and wrong shape, with the nearest names.

    It also refuses ranks that load from different URLs.

    Args:
        converted: the state, which asks for what was saved of its optimizers and Stateful objects.
            If `strict`, the ranks together must ask for all that was saved of a `trainable`. A
            load warns of parts of a module, an optimizer, a Stateful object or a list that no rank
            asks for.
        paths: returns the place of each key of the checkpoint.
        strict: refuse a state that has keys which the checkpoint does not have. If False, their
            values stay as they are. Shapes must fit in either case.
        on_dtype: what to do if a tensor of the state has another dtype than the stored one.

    Attributes:
        missing: keys of this rank's state that the checkpoint does not have.
        unexpected: keys of the checkpoint that this rank's state does not ask for.
        reading: whether the ranks have begun to read data into the state.
    """

    def __init__(
        self,
        url: str,
        converted: ConvertedState | None = None,
        paths: Callable[[], Mapping[str, Path]] = dict,
        *,
        strict: bool = True,
        on_dtype: OnDtype = "warn",
    ) -> None:
        super().__init__(allow_partial_load=not strict)
        self._url = url
        self._strict = strict
        self._on_dtype = on_dtype
        self.missing: tuple[str, ...] = ()
        self.unexpected: tuple[str, ...] = ()
        self._converted = converted or ConvertedState({}, loading=True)
        self._paths = paths
        self._record: Record | None = None  # what the checkpoint has, once DCP has read it
        self.reading = False
        self._items: list[ReadItem] = []  # this rank's; `_OwnPlan` does not send them

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Any = None, is_coordinator: bool = False
    ) -> None:
        """Override `AgreeingPlanner.set_up_planner`; first complete the state dict.

        The state dict then asks for what was saved of each optimizer and Stateful object.
        """
        with self._typed_errors():
            if metadata is not None:  # DCP has read the checkpoint's metadata
                self._record = Record(metadata, self._paths())
                self._converted.ask(state_dict, self._record)
        super().set_up_planner(state_dict, metadata, is_coordinator)

    def takes(self, key: str, tensor: torch.Tensor, sizes: tuple[int, ...]) -> bool:
        """Take a stored tensor itself if the state has none yet; return whether it was taken."""
        return self._record is not None and self._record.takes(key, tensor, sizes)

    def create_local_plan(self) -> LoadPlan:
        """Override `DefaultLoadPlanner.create_local_plan`; check keys and shapes first.

        Raises:
            StateMismatchError: the state asks for keys, shapes or, if `on_dtype` is "error", dtypes
                that the checkpoint does not have.
        """
        with self._typed_errors():
            self._items = self._fitting_plan().items
            local = _LocalItems(self._url, len(self.missing), len(self._items), self._unasked())
            return _OwnPlan(self._items, planner_data=local)

    @property
    def _saved(self) -> Metadata:
        """The metadata of the checkpoint, which DCP sets before it asks for a plan."""
        assert self.metadata is not None
        return self.metadata

    def _unasked(self) -> bytes:
        """Return a bit for each saved key, set if this rank does not ask for it."""
        unexpected = set(self.unexpected)
        bits = [key in unexpected for key in self._saved.state_dict_metadata]
        return np.packbits(np.array(bits, bool)).tobytes()

    def _unasked_by_all(
        self, of_ranks: Sequence[_LocalItems], places: Iterable[Place]
    ) -> list[str]:
        """Return the saved keys below these places that no rank asks for.

        That one rank does not ask for a key says little: a stage of a pipeline does not ask for
        what another stage has.
        """
        places = tuple(places)
        # Each rank has sent a bit for each saved key, set if it does not ask for the key.
        masks = [np.frombuffer(local.unasked, np.uint8) for local in of_ranks]
        unasked = np.unpackbits(np.bitwise_and.reduce(masks))
        # The last byte may have bits beyond the last key, so there may be more bits than keys.
        saved = zip(self._saved.state_dict_metadata, unasked, strict=False)
        return [key for key, is_unasked in saved if is_unasked and self._is_below(key, places)]

    def _is_below(self, key: str, places: Iterable[Place]) -> bool:
        """Return whether a saved key stands below one of these places.

        `model.ema.w` may be `state["model"]["ema.w"]` or `state["model.ema"]["w"]`.
        """
        path = tuple(map(str, (self._saved.planner_data or {}).get(key, ())))
        if len(path) < 2:  # it was not saved how the key was nested
            return key.startswith(tuple(".".join((*place, "")) for place in places))
        return any(path[: len(place)] == place for place in places)

    def _fitting_plan(self) -> LoadPlan:
        """Return DCP's plan for a state that fits; set `missing` and `unexpected`."""
        keys_of_other_ranks = self._choose_per_rank(self._saved)
        # If this rank does not ask for some settings of an optimizer, they belong to another rank,
        # and `unexpected` does not list them.
        settings_prefixes = tuple(
            ".".join((*place, kind, ""))
            for place in self._converted.optimizers
            for kind in ("groups", "param_groups")
        )
        self._take_extra_states(self._saved)
        problems = _mismatches(self.state_dict, self._saved)
        if problems:
            raise mismatch("the checkpoint does not fit the state", problems)
        if self._on_dtype == "error":
            refuse_other_dtypes(_dtypes(self.state_dict, self._saved))
        saved = self._saved.state_dict_metadata
        for key in _tied_keys(self.state_dict, saved):  # another key fills their memory
            del self.state_dict[key]
        state_before, keys_before = self.state_dict, dict(self.state_dict)
        plan = self._torch_plan()
        # If DCP has replaced the state, the keys of the new one are those that it asks for.
        keys = keys_before if self.state_dict is state_before else self.state_dict
        self.missing = tuple(key for key in keys if key not in saved)
        self.unexpected = tuple(
            key
            for key in saved
            if key not in keys
            and key not in keys_of_other_ranks
            and not key.startswith(settings_prefixes)
        )
        return plan

    def _torch_plan(self) -> LoadPlan:
        """Return DCP's plan for `state_dict`, which DCP replaces if it has an old torch's format.

        Raises:
            StateMismatchError: the state has keys that were not saved, and the load is strict.
        """
        saved, keys_before = self._saved.state_dict_metadata, dict(self.state_dict)
        # DCP's own method is called only if keys are missing: they may exist in the format of torch
        # before 2.4, which it knows. For that format it replaces `state_dict` by a new dict. It
        # would also do so, by mistake, if this rank has no shard of a ShardedTensor (FSDP1) and so
        # does not ask for its key.
        if self.state_dict.keys() <= saved.keys():
            return create_default_local_load_plan(self.state_dict, self._saved)
        try:
            return super().create_local_plan()
        except Exception:
            missing = _missing_lines(self.state_dict, self._saved)
            if not missing:
                raise
            # They are the cause of DCP's error, and this error lists them.
            by_number = self._asks_by_number(missing)
            advice = _NUMBER_HINT if by_number else _rename_advice(keys_before, saved)
            text = "the checkpoint does not have what the state asks for"
            error = mismatch(text, missing, len(self.state_dict.keys() - saved.keys()))
            error.advice = advice or "strict=False leaves such values as they are"
            raise error from None

    def _take_extra_states(self, metadata: Metadata) -> None:
        """Ask for the extra states of modules as they were saved: `set_extra_state` takes any.

        The entry of the state is replaced by a placeholder of the saved kind if it has another
        kind, shape or dtype.
        """
        for key, value in self.state_dict.items():
            saved = metadata.state_dict_metadata.get(key)
            if saved is None or key.rpartition(".")[2] != _EXTRA_STATE:
                continue
            is_tensor = isinstance(value, torch.Tensor)
            placeholder: Any = ()  # stands for any value
            if isinstance(saved, TensorStorageMetadata):
                size, dtype = saved.size, saved.properties.dtype
                if is_tensor and (value.shape, value.dtype) == (size, dtype):  # it fits
                    continue
                placeholder = torch.empty(size, dtype=dtype, device="cpu")
            elif not is_tensor:  # both are values, so any of them fits
                continue
            self.state_dict[key] = placeholder
            # The nested state dict, from which the modules are restored, must have it as well.
            torch_private.set_element(self.original_state_dict, self.mappings[key], placeholder)

    def _asks_by_number(self, keys: Iterable[str]) -> bool:
        """Return whether some keys are of torch's own state dict of an optimizer."""
        # In an `nn.Sequential`, the names of parameters begin with a number, too.
        named = tuple(".".join((*place, "")) for place in self._converted.optimizers)
        return any(_NUMBERED_STATE.search(key) and not key.startswith(named) for key in keys)

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        """Override `DefaultLoadPlanner.create_global_plan`; check that all ranks load the same.

        Raises:
            InvalidUrlError: the ranks load from different URLs. (The reader checks afterwards
                that they have opened the same commit.)
            StateMismatchError: the checkpoint has none of the keys that the ranks ask for; or it
                has more at the place of a `trainable` than they ask for.
        """
        with self._typed_errors():
            of_ranks: list[_LocalItems] = [plan.planner_data for plan in global_plan]
            same_url([local.url for local in of_ranks])
            missing = sum(local.missing_count for local in of_ranks)
            items = sum(local.item_count for local in of_ranks)
            if missing and not items:
                raise StateMismatchError(
                    f"the checkpoint has none of the {missing} keys that the state asks for",
                    advice="check the URL, and that the state is nested as it was saved",
                )
            trainables = self._converted.left_out if self._strict else ()  # their places
            unasked = self._unasked_by_all(of_ranks, trainables)
            if unasked:
                raise mismatch(
                    "a dos.trainable(...) of the state does not ask for all that was saved there:"
                    " this is frozen now, or not in the module (strict=False leaves it unread),",
                    unasked,
                )
            # Of modules, optimizers and lists, keys that no rank asks for are only worth a warning.
            unasked = self._unasked_by_all(of_ranks, self._converted.whole)
        if unasked:
            logger.warning(
                "%s has %s of values of the state which these do not have, and which stay unread"
                " (%s): is the model smaller than the one that was saved?",
                self._url,
                counted(len(unasked), "key"),
                first_few(unasked, 5),
            )
        if not items:
            logger.warning(
                "%s: nothing is loaded, because the state is empty on every rank; pass the modules,"
                " tensors and values to fill",
                self._url,
            )
        return global_plan

    def finish_plan(self, new_plan: LoadPlan) -> LoadPlan:
        """Override `DefaultLoadPlanner.finish_plan`; note that reading begins."""
        self.reading = True
        return dataclasses.replace(new_plan, items=self._items)

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Override `DefaultLoadPlanner.load_bytes`: a value is not a file that could be mapped."""
        # `check_safe` has passed it. Its tensors come back on their devices.
        loaded = torch.load(value, mmap=False, weights_only=False)
        place = self.mappings[read_item.dest_index.fqn]
        torch_private.set_element(self.original_state_dict, place, loaded)

    def _choose_per_rank(self, metadata: Metadata) -> set[str]:
        """Request the values of each `PerRank` that this rank wants; return the keys of the others.

        A rank that did not exist when the checkpoint was saved requests nothing, unless no rank
        saved a value.
        """
        keys_of_others: set[str] = set()
        for place, wants_all in self._converted.per_rank.items():
            prefix = ".".join(place) + "."
            # The saved values lie below the place, each under the number of its rank.
            names = ((key, key.removeprefix(prefix)) for key in metadata.state_dict_metadata)
            saved = {key: name for key, name in names if name != key and name.isdecimal()}
            own_key = f"{prefix}{own_name()}"
            if not saved:
                continue  # `own_key` is missing, and is treated like any other missing key
            # Replace the key of this rank by those that it wants, each with a placeholder.
            path = self.mappings[own_key][:-1]
            del self.state_dict[own_key]
            for key, name in saved.items():
                if wants_all or key == own_key:
                    self.state_dict[key] = ()
                    self.mappings[key] = (*path, name)
                else:
                    keys_of_others.add(key)
        return keys_of_others


def _mismatches(state_dict: dict[str, Any], metadata: Metadata) -> list[str]:
    """List the keys whose shape differs, or of which only one side is a tensor."""
    problems = []
    for key, value in state_dict.items():
        saved = metadata.state_dict_metadata.get(key)
        if saved is None:  # a missing key is reported elsewhere
            continue
        is_tensor = isinstance(value, torch.Tensor)
        check_kind(value, key)
        if is_tensor and isinstance(saved, TensorStorageMetadata):
            size = torch_private.size_in_checkpoint(value)
            if size != saved.size:
                problems.append(
                    f"{key}: saved with shape {tuple(saved.size)}, the state has {tuple(size)}"
                )
        elif isinstance(saved, TensorStorageMetadata):
            kind = type(value).__name__
            article = "an" if kind[0] in "aeiouAEIOU" else "a"
            problems.append(f"{key}: saved as a tensor, the state has {article} {kind}")
        elif is_tensor:
            problems.append(f"{key}: saved as a plain value, the state has a tensor")
    return problems


def _dtypes(
    state_dict: dict[str, Any], metadata: Metadata
) -> Iterator[tuple[str, str, torch.dtype]]:
    """Yield each tensor's key, torch's name of the saved dtype, and the dtype in the state."""
    for key, value in state_dict.items():
        saved = metadata.state_dict_metadata.get(key)
        if not isinstance(saved, TensorStorageMetadata) or not isinstance(value, torch.Tensor):
            continue
        if saved.properties.dtype is not None:  # a tensor of unknown dtype cannot be read anyway
            yield key, constant_name(saved.properties.dtype), value.dtype


def _tied_keys(state_dict: dict[str, Any], saved: Collection[str]) -> list[str]:
    """Return the keys that were not saved and whose tensor is also that of a saved key.

    Loading the saved key fills them. Files of Hugging Face hold only one of several tied weights.
    """
    missing = [key for key in state_dict if key not in saved]
    if not missing:
        return []
    # `same_memory` is None for what is not a plain tensor; that is equal to nothing.
    filled = {same_memory(value) for key, value in state_dict.items() if key in saved}
    return [key for key in missing if same_memory(state_dict[key]) in filled - {None}]


def _rename_advice(state_keys: Iterable[str], saved: Collection[str]) -> str | None:
    """Return which `rename=` makes the checkpoint fit; None if none does.

    One rule does if the missing keys were saved under another name at the top, or without a name at
    the top, as by `save(model.state_dict(), url)`.
    """
    # `missing` has one missing key for each name at the top. `unasked` are the names at the top of
    # the checkpoint that the state does not have.
    missing = {_top_name(key): key for key in state_keys if key not in saved}
    unasked = dict.fromkeys(map(_top_name, saved)).keys() - set(map(_top_name, state_keys))
    for top, key in missing.items():
        rest = key.removeprefix(f"{top}.")
        if rest != key and rest in saved:
            return f'the checkpoint has such keys without {top!r}: pass rename=[("^", "{top}.")]'
        for name in sorted(unasked):
            if f"{name}.{rest}" in saved:
                rule = f'("^{name}[.]", "{top}.")'
                return f"the checkpoint has such keys below {name!r}: pass rename=[{rule}]"
    return None


def _top_name(key: str) -> str:
    """Return the name at the top of the state: `model` for `model.layers.0.weight`."""
    return key.partition(".")[0]


def _missing_lines(state_dict: dict[str, Any], metadata: Metadata) -> list[str]:
    """List the keys that were not saved, each with the nearest saved names."""
    saved = metadata.state_dict_metadata
    # The number of keys below each name at the top of which nothing was saved; such a name with
    # several keys takes one line.
    counts = Counter(map(_top_name, state_dict))
    for top in map(_top_name, saved):
        counts.pop(top, None)
    grouped = {top: count for top, count in counts.items() if count > 1}
    lines = [f"{top}: none of its {count} keys is there" for top, count in grouped.items()]
    for key in state_dict:
        if key not in saved and _top_name(key) not in grouped:
            near = nearest(key, list(saved)) if len(lines) < SHOWN_KEYS else []
            hint = f" (nearest: {', '.join(near)})" if near else ""
            lines.append(f"{key}: not in the checkpoint{hint}")
    return lines
