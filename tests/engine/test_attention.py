"""Attention over packed rows: products and the fused kernel agree, groups fit, sizes stay together."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from executed import padding_up_to
from scripted import by_sequence, ragged_state
from torch import nn
from torch.testing import assert_close

from stretto.backbones import AttentionSpec
from stretto.backbones.spec import LayerMacs
from stretto.engine import attention
from stretto.engine import groups as grouping
from stretto.engine.attention import PackedAttention, softmax, weighted_sums
from stretto.engine.groups import Block, LayerShape, groups, together

CPU = torch.device("cpu")


def shape_of(d: int, heads: int, f: int) -> LayerShape:
    return LayerShape(heads, 0, LayerMacs(query=d * d, key=2 * d * d, ffn=d * d + 2 * d * f, pair=d))


SMALL = shape_of(8, 2, 32)
SPEC = AttentionSpec(*(nn.Linear(8, 8) for _ in range(4)), heads=2, dropout=nn.Dropout(0.0))


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("n_key", [1, 3, attention.VECTOR - 1, attention.VECTOR, 40])
def test_products_equal_the_fused_kernel(n_key: int, biased: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    count, heads, n_query, size = 3, 2, 5, 8
    q = torch.randn(count, heads, n_query, size)
    k, v = torch.randn(2, count, heads, n_key, size)
    bias = torch.randn(count, heads, n_query, n_key) if biased else None
    products = weighted_sums(q, k, v, bias, 0.3)
    monkeypatch.setattr(attention, "SHORT", 0)
    assert_close(products, weighted_sums(q, k, v, bias, 0.3), atol=1e-5, rtol=1e-5)


def test_softmax_of_short_rows_survives_large_scores() -> None:
    scores = torch.tensor([[200.0, 0.0, -200.0], [-1e4, -1e4, -1e4]])
    assert_close(softmax(scores), torch.tensor([[1.0, 0.0, 0.0], [1 / 3, 1 / 3, 1 / 3]]))


def test_a_group_holds_neighbours_of_one_size_as_many_as_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grouping, "MOST_SCORES", 2 * SMALL.heads * 4 * 4)  # two sequences of four tokens
    sizes = [4, 4, 4, 0, 5]
    assert list(together(SMALL, sizes, [4, 4, 4, 6, 5], sizes)) == [(0, 2), (2, 3), (3, 4), (4, 5)]


def test_a_sequence_without_queries_is_passed_over() -> None:
    found = groups(SMALL, (4, 0, 5), (4, 60, 5), True, CPU)
    assert [(g.first, g.count, g.queries.start, g.keys.start) for g in found] == [(0, 1, 0, 0), (2, 1, 4, 64)]


def test_neighbours_are_padded_as_long_as_it_adds_little() -> None:
    """d = 64, ffn = 256: a sequence of n tokens may add (4 · 64 n / 2 + 256 n) / 128 = 3 n pairs."""
    shape, sizes = shape_of(64, 2, 256), [8, 9, 10, 10, 12]
    # the first four add 400 - 345 = 55 pairs of 111 allowed; with the last they would add 720 - 489 = 231 of 147
    assert list(together(shape, sizes, sizes, sizes)) == [(0, 4), (4, 5)]
    # without the FFN it is (3 · 64 n / 2) / 128 = 0.75 n: 8 and 9 would add 17 of 12.75
    assert list(together(shape, sizes, sizes, [0] * 5)) == [(0, 1), (1, 2), (2, 4), (4, 5)]
    # tables of 40 rows cost a row 20 pairs: 8 and 9 add 17 + 2 · 20 = 57 of 51
    assert list(together(shape._replace(relative=40), sizes[:2], sizes[:2], sizes[:2])) == [(0, 1), (1, 2)]


def test_sequences_beyond_the_short_are_never_padded() -> None:
    shape, few = shape_of(384, 12, 1536), [4] * 6
    assert list(together(shape, few, [100, 110, 128, 129, 129, 131], few)) == [(0, 3), (3, 5), (5, 6)]


def test_a_block_spreads_its_rows_and_packs_them_again() -> None:
    block, packed = Block(2, (1, 3, 0, 2), CPU), torch.arange(20.0).view(10, 2)
    spread = block.spread(packed)
    assert spread.shape == (4, 3, 2) and block.place == slice(2, 8)
    assert spread[1].tolist() == packed[3:6].tolist() and spread[3, :2].tolist() == packed[6:8].tolist()
    assert block.pack(spread).tolist() == packed[2:8].tolist()
    assert block.cells(torch.tensor([2, 4, 7])).tolist() == [0, 4, 10]
    assert block.present.sum(dim=1).tolist() == [1, 3, 0, 2]


@pytest.fixture(params=[0.0, 1e6], ids=["alone", "padded"])
def padding(request: pytest.FixtureRequest) -> Iterator[float]:
    """What padding may add: nothing, so that only equal sizes are computed together, or anything."""
    with padding_up_to(request.param):
        yield request.param


def random_attention(n_query: list[int], n_key: list[int]) -> PackedAttention:
    k, v = torch.randn(2, sum(n_key), SPEC.width)
    q = torch.randn(sum(n_query), SPEC.width)
    nowhere = torch.zeros(len(q), dtype=torch.long), torch.zeros(len(k), dtype=torch.long)
    return PackedAttention(SPEC, SMALL, q, k, v, n_query, n_key, *nowhere)


@pytest.mark.parametrize("n_query", [[4, 3, 5], [2, 0, 5], [0, 1, 1]])
def test_a_sequence_sees_its_own_rows_only(n_query: list[int], padding: float) -> None:
    n_key = [4, 3, 5]
    packed = random_attention(n_query, n_key)
    assert len(packed.grouped(all_fed=True)) == (1 if padding else sum(map(bool, n_query)))
    found, received = torch.zeros(sum(n_query), 8), packed.received()
    packed.context(found)
    query_start = key_start = 0
    for queries, keys in zip(n_query, n_key, strict=True):
        q = packed.q[query_start : query_start + queries].view(-1, 2, 4)
        k, v = (x[key_start : key_start + keys].view(-1, 2, 4) for x in (packed.k, packed.v))
        p = (torch.einsum("qhc,khc->hqk", q, k) / 2).softmax(dim=2)
        expected = torch.einsum("hqk,khc->qhc", p, v).reshape(queries, 8)
        assert_close(found[query_start : query_start + queries], expected, atol=1e-6, rtol=1e-5)
        assert_close(received[key_start : key_start + keys], p.sum(dim=(0, 1)), atol=1e-6, rtol=1e-5)
        query_start, key_start = query_start + queries, key_start + keys


@pytest.mark.parametrize("parts_padding", [0.0, 1e6])
@pytest.mark.parametrize("wanted", [[[1, 3], [0, 2], []], [[2], [0, 1, 3], [1, 2]], [[], [3], [2]]])
def test_sums_of_some_rows_are_those_of_all(wanted: list[list[int]], padding: float, parts_padding: float) -> None:
    """However the sequences are grouped for the scores, and then for the sums."""
    sizes, starts = [4, 4, 3], [0, 4, 8]
    n_rows = [len(rows) for rows in wanted]
    packed, everything, some = random_attention(sizes, sizes), torch.zeros(11, 8), torch.zeros(sum(n_rows), 8)
    packed.context(everything)
    assert len(packed.probabilities) == (1 if padding else 2)
    rows = torch.tensor([start + row for start, rows in zip(starts, wanted, strict=True) for row in rows])
    with padding_up_to(parts_padding):
        packed.context_of(rows, some)
    assert_close(some, everything[rows], atol=1e-6, rtol=1e-5)


def test_sorting_by_length_takes_everything_along() -> None:
    state = ragged_state([1, 2, 3], [4], [5, 6], dial=[0.1, 0.2, 0.3])
    notes = state.notes_of("somebody")
    notes.sequences["name"], notes.rows["score"] = torch.tensor([10, 11, 12]), state.attention_received
    state.gate = torch.tensor([0.5, 0.6, 0.7])
    index = state.sort_by_length()
    assert state.lengths.tolist() == [1, 2, 3]
    assert index.tolist() == state.row_ids.tolist() == [3, 4, 5, 0, 1, 2]
    assert state.sequence.tolist() == [0, 1, 1, 2, 2, 2]
    assert state.position.tolist() == [0, 0, 1, 0, 1, 2]
    assert by_sequence(notes.rows["score"], state) == [[4], [5, 6], [1, 2, 3]]
    assert state.ids.tolist() == [1, 2, 0]
    assert notes.sequences["name"].tolist() == [11, 12, 10]
    assert_close(state.dial, torch.tensor([0.2, 0.3, 0.1], dtype=torch.float64))
    assert_close(state.gate, torch.tensor([0.6, 0.7, 0.5]))
