"""What makes a decoder's step fast gives the same as the plain way."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from transformers import MinLengthLogitsProcessor, MinNewTokensLengthLogitsProcessor

from stretto.engine.decode_cache import FEW_HEADS, attend
from stretto.engine.decode_search import LARGE, best_of
from stretto.engine.generation import in_place
from stretto.engine.linear import MANY_ROWS, SMALL_WEIGHT, Int8Product, StepProduct, step_product


@pytest.mark.parametrize(("out", "inner"), [(24, 16), (16, 24), (512, 512), (SMALL_WEIGHT // 64 + 1, 64)])
@pytest.mark.parametrize("rows", [1, 2, 17, MANY_ROWS, MANY_ROWS + 1])
def test_every_kernel_computes_the_same(out: int, inner: int, rows: int) -> None:
    torch.manual_seed(0)
    linear, x, residual = nn.Linear(inner, out), torch.randn(rows, inner), torch.randn(rows, out)
    expected = F.silu(linear(x))
    with torch.inference_mode():
        plain = step_product(linear, dtype="float32", activation=F.silu)
        assert isinstance(plain, StepProduct)
        torch.testing.assert_close(plain(x), expected, atol=1e-5, rtol=1e-5)
        summed = step_product(linear, dtype="float32")(x, residual)
        torch.testing.assert_close(summed, linear(x) + residual, atol=1e-5, rtol=1e-5)
        factor = torch.rand(rows, 1)
        scaled = step_product(linear, dtype="float32").add_scaled(x, residual, factor)
        torch.testing.assert_close(scaled, linear(x) * factor + residual, atol=1e-5, rtol=1e-5)


def test_a_small_weight_stays_float_in_int8() -> None:
    small, large = nn.Linear(64, 64), nn.Linear(512, 512)
    assert small.weight.numel() < SMALL_WEIGHT <= large.weight.numel()
    assert isinstance(step_product(small, dtype="int8"), StepProduct)
    assert isinstance(step_product(large, dtype="int8"), Int8Product)


@pytest.mark.parametrize("vocabulary", [300, 8192, 8193, 9001])
def test_the_best_score_is_the_one_argmax_finds(vocabulary: int) -> None:
    torch.manual_seed(0)
    rows = LARGE // vocabulary + 2
    assert rows * vocabulary > LARGE
    scores = torch.randn(rows, vocabulary).round(decimals=1)  # many are equal: the first of them counts
    scores[0] = -torch.inf
    scores[0, -1] = 0.0
    scores[1] = 5.0
    assert torch.equal(best_of(scores), scores.argmax(dim=1))
    assert torch.equal(best_of(scores[:1]), scores[:1].argmax(dim=1))


@pytest.mark.parametrize(
    "process", [MinLengthLogitsProcessor(4, [3, 7]), MinNewTokensLengthLogitsProcessor(1, 3, torch.tensor([3, 7]))]
)
@pytest.mark.parametrize("written", [1, 3, 4, 6])
def test_processors_in_place_give_the_scores_of_transformers(process: object, written: int) -> None:
    tokens, scores = torch.ones(2, written, dtype=torch.long), torch.randn(2, 9)
    expected = process(tokens, scores)  # type: ignore[operator]
    ours = in_place(process)
    assert ours is not process and torch.equal(ours(tokens, scores.clone()), expected)
    assert bool(torch.isinf(expected).any()) == (written < 4)


@pytest.mark.parametrize("batch", [1, FEW_HEADS])
@pytest.mark.parametrize("n", [5, 24])
@pytest.mark.parametrize("added", [False, True])
def test_both_kernels_of_attention_give_the_same(batch: int, n: int, added: bool) -> None:
    torch.manual_seed(0)
    heads, size = 4, 8
    q, k, v = (torch.randn(batch, heads, length, size) for length in (2, n, n))
    bias = None
    if added:
        bias = torch.zeros(batch, 1, 1, n).masked_fill(torch.arange(n) >= n - 2, -torch.inf)
    scores = 0.3 * q @ k.transpose(2, 3)
    expected = (scores if bias is None else scores + bias).softmax(dim=-1) @ v
    torch.testing.assert_close(attend(q, k, v, 0.3, bias), expected, atol=1e-5, rtol=1e-5)
