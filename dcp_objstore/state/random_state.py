"""`RandomState`: the generators that a training loop draws from, as one value to save per rank."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

from dcp_objstore.errors import StateMismatchError


class RandomState:
    """The states of the generators of Python, NumPy (the global one) and torch, CUDA's included.

        state = {"model": model, "random": dos.PerRank(dos.RandomState())}

    What is drawn after a load is what would have been drawn after the save. It holds nothing: it
    reads the generators when it is saved, and sets them when it is loaded. Plain values and
    tensors, so it loads without `trust_pickle`. About 13 KiB, and 16 bytes for each GPU.

    Of CUDA's generators those of the visible devices are saved, by their numbers, where CUDA is in
    use already; on load as many are set as there are on both sides.
    """

    def state_dict(self) -> dict[str, Any]:
        """The states now."""
        version, words, gauss = random.getstate()
        kind, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
        in_use: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        cuda = torch.cuda.get_rng_state_all() if in_use else []
        return {
            "python": (version, torch.tensor(words, dtype=torch.int64), gauss),
            # As int64, because tensors of uint32 cannot do everything yet.
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
        """Set them.

        Raises:
            StateMismatchError: it is not what `state_dict` gave; nothing was set.
        """
        try:
            version, words, gauss = state_dict["python"]
            python = (version, tuple(words.tolist()), gauss)
            kind, keys, position, has_gauss, cached = state_dict["numpy"]
            numpy = (kind, keys.numpy().astype(np.uint32), position, has_gauss, cached)
            cpu, cuda = state_dict["torch"].cpu(), list(state_dict["cuda"])
            # Tried on generators that nobody draws from.
            random.Random().setstate(python)
            np.random.RandomState().set_state(numpy)
            torch.Generator().set_state(cpu)
        except (AttributeError, LookupError, TypeError, ValueError, RuntimeError) as error:
            raise StateMismatchError(
                f"this is no state of a RandomState: {type(error).__name__}: {error}"
            ) from error
        random.setstate(python)
        np.random.set_state(numpy)
        torch.set_rng_state(cpu)
        if torch.cuda.is_available():
            for device, one in enumerate(cuda[: torch.cuda.device_count()]):
                torch.cuda.set_rng_state(one.cpu(), device)
