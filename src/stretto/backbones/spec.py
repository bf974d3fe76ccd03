"""What a layer is made of, as data. Both engines and `stretto.engine.cost` read this and nothing else.

A backbone hands out one `LayerSpec` per layer; layers may differ. The modules are Hugging Face's own: nothing is
copied. With x the rows a layer reads:

    post-norm   h = norm(x + attention(x)),   norm(h + FFN(h))
    pre-norm    h = x + attention(norm(x)),   h + FFN(norm(h))
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, Protocol

from torch import Tensor, nn

from stretto.backbones.positions import BiasTable, RelativeTerms, Rotary

#: Used where a layer has no norm or dropout.
ABSENT = nn.Identity()


class Affine(Protocol):
    """x Wᵀ + b: an `nn.Linear`, or a `LinearPart` of one that computes several things at once."""

    @property
    def weight(self) -> Tensor:
        """[out, in]"""

    @property
    def bias(self) -> Tensor | None:
        """[out]"""


class Weights(NamedTuple):
    """x Wᵀ + b by its tensors."""

    weight: Tensor
    bias: Tensor | None


@dataclass(frozen=True, eq=False)
class LinearPart:
    """Some of the outputs of a Linear."""

    linear: nn.Linear
    outputs: slice

    @property
    def weight(self) -> Tensor:
        return self.linear.weight[self.outputs]

    @property
    def bias(self) -> Tensor | None:
        return None if self.linear.bias is None else self.linear.bias[self.outputs]


def equal_parts(linear: nn.Linear, count: int) -> list[LinearPart]:
    """The parts of a fused Linear: queries, keys and values have a third each, a gated FFN's two inputs a half."""
    size = linear.out_features // count
    return [LinearPart(linear, slice(start, start + size)) for start in range(0, count * size, size)]


class Dropping(Protocol):
    """A module with a dropout probability that may be changed: an `nn.Dropout`."""

    p: float


@dataclass(frozen=True, eq=False)
class AttentionSpec:
    """softmax(scale · q·k + what positions add) v, then the output projection."""

    query: Affine
    key: Affine
    value: Affine
    output: nn.Linear
    heads: int
    dropout: Dropping
    """Dropout of attention weights, while training."""
    output_dropout: nn.Module = ABSENT
    scaling: float | None = None
    """The factor on q·k. None: 1/√head_size."""
    rotary: Rotary | None = None
    window: int | None = None
    """Local attention: query i sees key j only if |i - j| ≤ window. None: it sees all."""
    bias: BiasTable | None = None
    relative: RelativeTerms | None = None

    @property
    def width(self) -> int:
        """The width of all heads together: heads · head_size. It may differ from the width of the rows."""
        return self.query.weight.shape[0]

    @property
    def head_size(self) -> int:
        return self.width // self.heads

    @property
    def scale(self) -> float:
        return self.head_size**-0.5 if self.scaling is None else self.scaling

    def turned(self, x: Tensor, position: Tensor) -> Tensor:
        """Queries or keys […, n, width] at positions […, n] as they are compared."""
        if self.rotary is None:
            return x
        return self.rotary.turned(x.unflatten(-1, (self.heads, self.head_size)), position).flatten(-2)

    def by_head(self, x: Tensor) -> Tensor:
        """[b, n, width] -> [b, heads, n, head_size]."""
        return x.unflatten(-1, (self.heads, self.head_size)).transpose(1, 2)


@dataclass(frozen=True, eq=False)
class FeedForwardSpec:
    """out(activation(into(x))), or out(activation(into(x)) · factor(x)) where it is gated."""

    into: Affine
    activation: Callable[[Tensor], Tensor]
    out: nn.Linear
    factor: Affine | None = None
    dropout: nn.Module = ABSENT
    """Dropout of what `out` reads."""
    output_dropout: nn.Module = ABSENT

    @property
    def inputs(self) -> list[Affine]:
        """What reads x."""
        return [self.into] if self.factor is None else [self.into, self.factor]

    @property
    def size(self) -> int:
        """Values that `out` reads."""
        return self.out.weight.shape[1]

    @property
    def macs(self) -> int:
        """Multiply-adds of each row."""
        return weights_of(*self.inputs, self.out)


class LayerMacs(NamedTuple):
    """Multiply-adds of a layer: per row that is a query, per row that is a key (and value), per row that goes through
    the output projection and the FFN; and per pair of a query and a key (for its score, and again for its weighted
    sum)."""

    query: int
    key: int
    ffn: int
    pair: int


@dataclass(frozen=True, eq=False)
class LayerSpec:
    attention: AttentionSpec
    attention_norm: nn.Module
    """`ABSENT` where there is none."""
    ffn: FeedForwardSpec
    ffn_norm: nn.Module
    pre_norm: bool = False
    """Whether the norms stand before attention and FFN, inside the residual branches, instead of behind them."""

    def attention_input(self, rows: Tensor) -> Tensor:
        """[…, d] -> […, d]: what queries, keys and values are made of."""
        return self.attention_norm(rows) if self.pre_norm else rows

    @property
    def widths(self) -> tuple[int, int, int]:
        """Of the rows, of all heads together, and of what the FFN's last product reads."""
        return self.attention.output.weight.shape[0], self.attention.width, self.ffn.size

    @cached_property
    def macs(self) -> LayerMacs:
        attention, ffn = self.attention, self.ffn
        tables = 0 if attention.relative is None else attention.width * attention.relative.rows
        return LayerMacs(
            query=weights_of(attention.query) + tables,
            key=weights_of(attention.key, attention.value) + tables,
            ffn=weights_of(attention.output) + ffn.macs,
            pair=attention.width,
        )


def weights_of(*affines: Affine) -> int:
    """Their multiply-adds per row."""
    return sum(affine.weight.numel() for affine in affines)
