"""Attention over packed rows: products and the fused kernel agree, groups fit, sizes stay together."""

from __future__ import annotations

import pytest
import torch
from scripted import by_sequence, ragged_state
from torch.testing import assert_close

from stretto.engine import attention
from stretto.engine.attention import PackedAttention, groups, softmax, weighted_sums


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("n_key", [1, 3, attention.VECTOR - 1, attention.VECTOR, 40])
def test_products_equal_the_fused_kernel(n_key: int, biased: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    count, heads, n_query, size = 3, 2, 5, 8
    q = torch.randn(count, heads, n_query, size)
    k, v = torch.randn(2, count, heads, n_key, size)
    bias = torch.randn(count, heads, n_query, n_key) if biased else None
    products = weighted_sums(q, k, v, bias)
    monkeypatch.setattr(attention, "SHORT", 0)
    assert_close(products, weighted_sums(q, k, v, bias), atol=1e-5, rtol=1e-5)


def test_softmax_of_short_rows_survives_large_scores() -> None:
    scores = torch.tensor([[200.0, 0.0, -200.0], [-1e4, -1e4, -1e4]])
    assert_close(softmax(scores), torch.tensor([[1.0, 0.0, 0.0], [1 / 3, 1 / 3, 1 / 3]]))


def test_a_group_holds_neighbours_of_one_size_as_many_as_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    heads = 2
    monkeypatch.setattr(attention, "MOST_SCORES", 2 * heads * 4 * 4)  # two sequences of four tokens
    found = list(groups([4, 4, 4, 0, 5], [4, 4, 4, 6, 5], heads))
    assert [(g.first, g.count, g.query_start, g.key_start) for g in found] == [
        (0, 2, 0, 0), (2, 1, 8, 8), (4, 1, 12, 18),
    ]  # fmt: skip


@pytest.mark.parametrize("n_rows", [[2, 2, 0], [1, 3, 2]])  # the first two sequences are alike: together, or one by one
def test_sums_of_some_rows_are_those_of_all(n_rows: list[int]) -> None:
    sizes, heads, d = [4, 4, 3], 2, 8
    q, k, v = torch.randn(3, sum(sizes), d)
    everything, some = torch.zeros(sum(sizes), d), torch.zeros(sum(n_rows), d)
    packed = PackedAttention(q, k, v, sizes, sizes, heads)
    packed.context(everything)
    starts = [0, 4, 8]
    rows = torch.cat([torch.arange(start, start + n) for start, n in zip(starts, n_rows, strict=True)])
    packed.context_of(rows, n_rows, some)
    assert_close(some, everything[rows], atol=1e-6, rtol=1e-5)


def test_sorting_by_length_takes_everything_along() -> None:
    state = ragged_state([1, 2, 3], [4], [5, 6], dial=[0.1, 0.2, 0.3])
    state.notes["name"] = torch.tensor([10, 11, 12])
    state.row_notes["score"] = state.attention_received
    state.gate = torch.tensor([0.5, 0.6, 0.7])
    index = state.sort_by_length()
    assert state.lengths.tolist() == [1, 2, 3]
    assert index.tolist() == state.row_ids.tolist() == [3, 4, 5, 0, 1, 2]
    assert state.sequence.tolist() == [0, 1, 1, 2, 2, 2]
    assert state.position.tolist() == [0, 0, 1, 0, 1, 2]
    assert by_sequence(state.row_notes["score"], state) == [[4], [5, 6], [1, 2, 3]]
    assert state.ids.tolist() == [1, 2, 0]
    assert state.notes["name"].tolist() == [11, 12, 10]
    assert_close(state.dial, torch.tensor([0.2, 0.3, 0.1], dtype=torch.float64))
    assert_close(state.gate, torch.tensor([0.6, 0.7, 0.5]))
