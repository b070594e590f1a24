"""`RandomState`: the states of a training loop's random generators, as one value per rank."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

from dcp_objstore.errors import StateMismatchError
from dcp_objstore.observe.report import logger


class RandomState:
    """The states of the generators of Python, NumPy (the global one) and torch, CUDA's included.

        state = {"model": model, "random": dos.PerRank(dos.RandomState())}

    After a load, the generators yield the numbers that they would have yielded after the save. The
    object itself holds no state: it reads the generators when it is saved, and sets them when it is
    loaded. It is stored as plain values and tensors, so it loads without `trust_pickle`. It takes
    about 13 KiB, and 16 bytes for each GPU.

    If CUDA is already in use, the generators of the visible devices are saved in the order of their
    numbers. A load sets as many as both sides have.
    """

    def state_dict(self) -> dict[str, Any]:
        """Return the current states."""
        version, words, gauss = random.getstate()
        kind, keys, position, has_gauss, cached = np.random.get_state()
        in_use: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        cuda = torch.cuda.get_rng_state_all() if in_use else []
        return {
            "python": (version, torch.tensor(words, device="cpu"), gauss),
            # As int64, because torch does not fully support uint32 yet.
            "numpy": (
                str(kind),
                torch.from_numpy(np.asarray(keys).astype(np.int64)),
                int(position),
                int(has_gauss),
                float(cached),
            ),
            "torch": torch.get_rng_state(),
            "cuda": cuda,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Set the generators to saved states.

        Raises:
            StateMismatchError: `state_dict` is not a result of `RandomState.state_dict`; nothing
                was set.
        """
        try:
            version, words, gauss = state_dict["python"]
            python = (version, tuple(words.tolist()), gauss)
            kind, keys, position, has_gauss, cached = state_dict["numpy"]
            numpy = (kind, keys.numpy().astype(np.uint32), position, has_gauss, cached)
            cpu, cuda = state_dict["torch"].cpu(), list(state_dict["cuda"])
            # Try the states on unused generators first.
            random.Random().setstate(python)
            np.random.RandomState().set_state(numpy)
            torch.Generator().set_state(cpu)
        except (AttributeError, LookupError, TypeError, ValueError, RuntimeError) as error:
            raise StateMismatchError(
                f"this is not the state of a RandomState: {type(error).__name__}: {error}"
            ) from error
        random.setstate(python)
        np.random.set_state(numpy)
        torch.set_rng_state(cpu)
        if len(cuda) > torch.cuda.device_count():
            logger.warning(
                "of the random states of %d GPUs, this process with %d cannot set the others",
                len(cuda),
                torch.cuda.device_count(),
            )
        for device, state in enumerate(cuda[: torch.cuda.device_count()]):
            torch.cuda.set_rng_state(state.cpu(), device)
