"""What an engine answered and what torch really executed for it, for comparison; and how much it pads."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry, shape_wrapper

from stretto.engine.decider import Decider
from stretto.engine.groups import SHORT, groups
from stretto.engine.packed import PackedEngine
from stretto.state import Inputs, Output


def linear_flops(x: Any, *_: Any, out_shape: Any = None, **__: Any) -> int:
    return 2 * x[0] * x[1] * out_shape[1]


def sdpa_flops(q: Any, k: Any, v: Any, *_: Any, **__: Any) -> int:
    batch, heads, n_query, size = q
    return 4 * batch * heads * n_query * k[2] * size


#: torch's counter knows neither CPU attention nor oneDNN's linear.
CPU_FORMULAS = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: sdpa_flops,
    torch.ops.mkldnn._linear_pointwise: linear_flops,
}


FORMULAS = {**flop_registry, **{operation: shape_wrapper(formula) for operation, formula in CPU_FORMULAS.items()}}


@cache
def is_composite(operation: Any) -> bool:
    """Whether torch computes it by other operations, which are then counted."""
    return operation._can_decompose()


class ProductCounter(TorchDispatchMode):
    """Counts the FLOPs of matrix products as torch's `FlopCounterMode` does, in a fraction of its time: not by module,
    and an operation is taken apart only if it can be."""

    def __init__(self) -> None:
        super().__init__()
        self.flops = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if is_composite(func):
            with self:
                return func.decompose(*args, **(kwargs or {}))
        out = func(*args, **(kwargs or {}))
        formula: Callable[..., int] | None = FORMULAS.get(func._overloadpacket)
        if formula is not None:
            self.flops += formula(*args, **(kwargs or {}), out_val=out)
        return out


def executed_flops(engine: PackedEngine, inputs: Inputs, decider: Decider, dial: float) -> tuple[int, Output]:
    """FLOPs of all matrix products of a run. Rows are not rounded up: that is the kernels' need, not the method's."""
    with (
        mock.patch("stretto.engine.parts.round_up", lambda rows: max(rows, 1)),
        ProductCounter() as counter,
    ):
        output = engine.run(inputs, decider, dial)
    return counter.flops, output


@contextmanager
def small_parts() -> Iterator[None]:
    """Inside, parts are joined only as they shrink: tests have few rows, which would all go together."""
    with mock.patch("stretto.engine.stepping.TALL", 0):
        yield


@contextmanager
def padding_up_to(share: float) -> Iterator[None]:
    """Inside, attention may pad its groups as long as that adds this share to the products of a layer."""
    with mock.patch("stretto.engine.groups.MOST_PADDING", share):
        groups.cache_clear()
        try:
            yield
        finally:
            groups.cache_clear()


@contextmanager
def short_up_to(keys: int) -> Iterator[None]:
    """Inside, longer sequences than this go to the fused kernel, and local windows skip keys, in stretches of 3."""
    places = ("groups.SHORT", "attention.SHORT", "windows.SHORT")
    with ExitStack() as stack:
        if keys != SHORT:
            for place in places:
                stack.enter_context(mock.patch(f"stretto.engine.{place}", keys))
            stack.enter_context(mock.patch("stretto.engine.windows.STRETCH", 3))
        groups.cache_clear()
        try:
            yield
        finally:
            groups.cache_clear()


def assert_same(a: Output, b: Output) -> None:
    """Answers, everything the trace counts, and hidden states, if both were asked for them."""
    torch.testing.assert_close(a.logits, b.logits, atol=1e-5, rtol=1e-5)
    for name in ("lengths", "n_query", "n_key", "n_ffn", "decider_macs", "skipped"):
        assert torch.equal(getattr(a.trace, name), getattr(b.trace, name)), name
    if a.hidden is not None and b.hidden is not None:
        width = min(a.hidden.shape[1], b.hidden.shape[1])
        torch.testing.assert_close(a.hidden[:, :width], b.hidden[:, :width], atol=1e-5, rtol=1e-5)
