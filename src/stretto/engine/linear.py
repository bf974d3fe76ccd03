"""The packed engine's matrix products: weights converted once to the layout of the kernel."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from functools import cache, cached_property
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from stretto.backbones.spec import Affine
from stretto.errors import StrettoError

DTYPES = ("float32", "int8")
#: Activations that oneDNN computes within a product, by its name for them.
FUSED: dict[str, Callable[[Tensor], Tensor]] = {"gelu": F.gelu, "tanh": torch.tanh, "relu": F.relu}

#: Weights of fewer numbers are small. A `StepProduct` does not use oneDNN for them, up to `MANY_ROWS` rows; int8 gains
#: nothing there either.
SMALL_WEIGHT, MANY_ROWS = 1 << 17, 128


class Product(Protocol):
    """x [M, in] -> x Wᵀ + b [M, out], then the activation if built with one, then + residual [M, out] if given.

    `add_scaled` is residual + factor (x Wᵀ + b) for a `factor` [M, 1], without activation; a factor of 1 gives
    exactly the same bits as no factor."""

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor: ...
    def add_scaled(self, x: Tensor, residual: Tensor, factor: Tensor) -> Tensor: ...


class PlainProduct:
    """torch's own linear: any device, any activation."""

    def __init__(self, weight: Tensor, bias: Tensor, activation: Callable[[Tensor], Tensor] | None) -> None:
        self.weight, self.bias, self.activation = weight, bias, activation

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        y = F.linear(x, self.weight, self.bias)
        if self.activation is not None:
            y = self.activation(y)
        return y if residual is None else y + residual

    def add_scaled(self, x: Tensor, residual: Tensor, factor: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias) * factor + residual


class OneDnnProduct:
    """oneDNN with the weight reordered once; exact GELU, tanh and the residual sum are fused into the product.

    At 16 rows it already runs at the rate of tall matrices, where torch's own linear reaches half of it."""

    def __init__(self, weight: Tensor, bias: Tensor, activation: Callable[[Tensor], Tensor] | None) -> None:
        self.fused = next((name for name, known in FUSED.items() if computes(known, activation)), "none")
        self.activation = activation if self.fused == "none" else None
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weight, 512)
        self.bias = bias

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        if residual is not None:
            return torch.ops.mkldnn._linear_pointwise.binary(x, residual, self.weight, self.bias, "add")
        y = torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, self.fused, [], "none")
        return y if self.activation is None else self.activation(y)

    def add_scaled(self, x: Tensor, residual: Tensor, factor: Tensor) -> Tensor:
        # factor (x Wᵀ + b) = (factor x) Wᵀ + (factor - 1) b + b: the product itself stays the fused one
        return self(x * factor, torch.addcmul(residual, factor - 1, self.bias))


class StepProduct:
    """The product of a decoder's step, which has from one to a few dozen rows. Which kernel is fastest depends on their
    number. Each layout of the weight is made when it is first needed.

    One row only reads the weight: in the layout whose lines are longer, which is up to twice as fast. A small weight:
    transposed, since oneDNN takes 20 µs for any product at all. Else oneDNN."""

    def __init__(self, weight: Tensor, bias: Tensor, activation: Callable[[Tensor], Tensor] | None) -> None:
        self.weight, self.bias, self.activation = weight, bias, activation
        outputs, inputs = weight.shape
        self.wide = outputs > inputs
        self.few_rows = MANY_ROWS if weight.numel() < SMALL_WEIGHT else 1

    @cached_property
    def transposed(self) -> Tensor:
        return self.weight.t().contiguous()

    @cached_property
    def packed(self) -> OneDnnProduct:
        return OneDnnProduct(self.weight, self.bias, self.activation)

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        rows = x.shape[0]
        if rows > self.few_rows:
            return self.packed(x, residual)
        if rows == 1 and not self.wide:
            y = F.linear(x, self.weight, self.bias)
        else:
            y = torch.addmm(self.bias, x, self.transposed)
        if self.activation is not None:
            y = self.activation(y)
        return y if residual is None else y.add_(residual)

    def add_scaled(self, x: Tensor, residual: Tensor, factor: Tensor) -> Tensor:
        return self.packed.add_scaled(x, residual, factor)


def packed_int8(weight: Tensor, bias: Tensor) -> Any:
    """What the int8 kernel reads: [out, in] weights with one scale per output, [out] bias."""
    scales = weight.abs().amax(dim=1).clamp(min=1e-8) / 127
    zeros = torch.zeros(len(scales), dtype=torch.long)
    with warnings.catch_warnings():  # torch has no successor yet for what `linear_prepack` takes
        warnings.filterwarnings("ignore", message=".*quantize_per_channel.*deprecated")
        quantised = torch.quantize_per_channel(weight, scales, zeros, axis=0, dtype=torch.qint8)
    return torch.ops.quantized.linear_prepack(quantised, bias)


@cache
def int8_saturates() -> bool:
    """Whether this CPU (one without VNNI) adds pairs of 8-bit products in 16 bits, which overflow: 1 · 1 of the largest
    values, 64 times, then gives half of 64. Activations of 7 bits are small enough."""
    ones = torch.ones(1, 64)
    return float(torch.ops.quantized.linear_dynamic(ones, packed_int8(ones, torch.zeros(1)))) < 60


class Int8Product:
    """int8 weights, activations quantised on the fly per matrix."""

    def __init__(self, weight: Tensor, bias: Tensor, activation: Callable[[Tensor], Tensor] | None) -> None:
        self.packed, self.seven_bits = packed_int8(weight, bias), int8_saturates()
        # in place where possible: the FFN's wide matrix is too large to be written twice for nothing
        self.activation = torch.ops.aten.gelu_ if computes(F.gelu, activation) else activation

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        y = torch.ops.quantized.linear_dynamic(x, self.packed, self.seven_bits)
        if self.activation is not None:
            y = self.activation(y)
        return y if residual is None else y.add_(residual)

    def add_scaled(self, x: Tensor, residual: Tensor, factor: Tensor) -> Tensor:
        return torch.ops.quantized.linear_dynamic(x, self.packed, self.seven_bits).mul_(factor).add_(residual)


def check_dtype(dtype: str) -> None:
    if dtype not in DTYPES:
        raise StrettoError(f"Expected dtype to be one of {', '.join(DTYPES)}; got '{dtype}'. Choose one of them.")


def step_product(*linears: Affine, dtype: str, activation: Callable[[Tensor], Tensor] | None = None) -> Product:
    """`product` for the few rows of a decoder's step."""
    small = sum(linear.weight.numel() for linear in linears) < SMALL_WEIGHT
    made = product(*linears, dtype="float32" if small and dtype in DTYPES else dtype, activation=activation)
    return StepProduct(*joined(linears), activation) if isinstance(made, OneDnnProduct) else made


def joined(linears: Sequence[Affine]) -> tuple[Tensor, Tensor]:
    """Weight and bias of several linears, their outputs side by side. One alone is not copied."""
    if len(linears) == 1:
        return linears[0].weight.detach(), bias_of(linears[0])
    return torch.cat([linear.weight.detach() for linear in linears]), torch.cat([bias_of(linear) for linear in linears])


def product(*linears: Affine, dtype: str, activation: Callable[[Tensor], Tensor] | None = None) -> Product:
    """One product for several linears that read the same input (their outputs side by side)."""
    weight, bias = joined(linears)
    check_dtype(dtype)
    on_cpu = weight.device.type == "cpu"
    if dtype == "int8":
        if not on_cpu:
            raise StrettoError(f"Expected a CPU model for int8, got one on {weight.device}. Move it to the CPU.")
        return Int8Product(weight, bias, activation)
    if on_cpu and weight.dtype == torch.float32 and torch.backends.mkldnn.is_available():
        return OneDnnProduct(weight, bias, activation)
    return PlainProduct(weight, bias, activation)


def bias_of(linear: Affine) -> Tensor:
    """[out]; zeros for a linear without bias."""
    return linear.weight.new_zeros(len(linear.weight)) if linear.bias is None else linear.bias.detach()


def computes(known: Callable[[Tensor], Tensor], activation: Callable[[Tensor], Tensor] | None) -> bool:
    """Whether an activation is the same function, judged by its values, not its class. GELU, for example, has several
    forms, and only the one with erf is fused."""
    if activation is None:
        return False
    probe = torch.linspace(-4, 4, 33)
    return torch.equal(activation(probe), known(probe))
