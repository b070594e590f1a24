"""The small language model that the demo trains (a transformer over bytes), and its text."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

VOCABULARY = 256
CONTEXT = 64
WIDTH = 256
HEADS = 4
LAYERS = 3
FIXED_SEQUENCES = 32


class Block(nn.Module):
    """Pre-norm attention and a perceptron four times as wide, each added to its input."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width, bias=False)
        self.projection = nn.Linear(width, width, bias=False)
        self.perceptron_norm = nn.LayerNorm(width)
        self.perceptron = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, time, width) to the same shape."""
        batch, time, width = x.shape
        heads = self.query_key_value(self.attention_norm(x)).view(batch, time, 3, self.heads, -1)
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.projection(mixed.transpose(1, 2).reshape(batch, time, width))
        return x + self.perceptron(self.perceptron_norm(x))  # type: ignore[no-any-return]


class ByteTransformer(nn.Module):
    """Predicts the next byte."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.ModuleList(Block(WIDTH, HEADS) for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        nn.init.normal_(self.positions.weight, std=0.1)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits (batch, time, 256) for tokens (batch, time)."""
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.bytes(tokens) + self.positions(places)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))  # type: ignore[no-any-return]


def next_byte_loss(model: nn.Module, sequences: Tensor) -> Tensor:
    """Return the mean cross-entropy in nats per byte over sequences (batch, CONTEXT + 1)."""
    logits = model(sequences[:, :-1])
    return functional.cross_entropy(logits.flatten(0, 1), sequences[:, 1:].flatten())


def read_text() -> Tensor:
    """Return Python's language reference, part of every installation, as a tensor of bytes."""
    from pydoc_data.topics import topics

    text = "\n".join(topics[name] for name in sorted(topics))
    return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8).long()


def training_batch(text: Tensor, step: int, sequences: int) -> Tensor:
    """Return the sequences of a step, the same for any number of ranks."""
    return _sequences(text, step, sequences)


def fixed_batch(text: Tensor) -> Tensor:
    """Return the batch on which the loss is compared before and after a resume."""
    return _sequences(text, -1, FIXED_SEQUENCES)


def _sequences(text: Tensor, number: int, count: int) -> Tensor:
    generator = torch.Generator().manual_seed(1_000_003 + number)
    starts = torch.randint(len(text) - CONTEXT - 1, (count,), generator=generator)
    return torch.stack([text[start : start + CONTEXT + 1] for start in starts])
