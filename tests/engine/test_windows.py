"""Local attention over long sequences: which keys a stretch of queries sees, and what that saves."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from executed import executed_flops, short_up_to
from scripted import Scripted
from tiny import random_inputs, tiny_backbone
from torch import nn

from stretto.backbones import AttentionSpec, RelativeTerms
from stretto.engine.cost import Cost, flops, full_flops
from stretto.engine.decider import Silent
from stretto.engine.groups import SHORT
from stretto.engine.packed import PackedEngine
from stretto.engine.reference import ReferenceEngine
from stretto.engine.windows import STRETCH, skipped_undisturbed, stretches
from stretto.state import Decision


@pytest.fixture
def long_from_five() -> Iterator[None]:
    with short_up_to(4):
        yield


def local(window: int | None, relative: RelativeTerms | None = None) -> AttentionSpec:
    linears = (nn.Linear(4, 4) for _ in range(4))
    return AttentionSpec(*linears, heads=1, dropout=nn.Dropout(0.0), window=window, relative=relative)


@pytest.mark.usefixtures("long_from_five")
def test_stretches_by_hand() -> None:
    """Three sequences of 3, 7 and 6 keys; a window of 1; stretches of 3 queries. The first is short, and whole."""
    n_query, n_key = torch.tensor([3, 7, 2]), torch.tensor([3, 7, 6])
    k_position = torch.tensor([0, 1, 2, 0, 1, 2, 3, 8, 9, 10, 0, 1, 2, 4, 5, 6])
    q_position = torch.tensor([0, 1, 2, 0, 1, 2, 3, 8, 9, 10, 0, 4])  # of the last, the tokens 0 and 4 are updated
    found = stretches(local(1), n_query, n_key, q_position, k_position)
    assert found is not None
    assert found.sequence.tolist() == [1, 1, 1, 2]
    assert list(zip(found.q_start.tolist(), found.q_end.tolist(), strict=True)) == [(3, 6), (6, 9), (9, 10), (10, 12)]
    # queries at 0 1 2 see keys at 0..3; those at 3 8 9 see 2..10; that at 10 sees 9 10; those at 0 and 4 see 0..5
    assert list(zip(found.k_start.tolist(), found.k_end.tolist(), strict=True)) == [(3, 7), (5, 10), (8, 10), (10, 15)]
    # of 7 keys 3, 2 and 5 are skipped, for scores and sums: 2 (3 · 3 + 3 · 2 + 5); of 6 keys one, by 2 queries
    assert found.skipped(local(1), n_key, None).tolist() == [0, 40, 4]
    # weighted sums of query rows 4, 7, 8 and 11 alone: 9 + 6 + 5 scores and 3 + 2 · 2 sums; 2 scores and 1 sum
    assert found.skipped(local(1), n_key, torch.tensor([4, 7, 8, 11])).tolist() == [0, 27, 3]
    # 4 + 5 + 2 keys meet a table of 10 rows instead of 7; and 5 instead of 6
    tables = RelativeTerms(torch.zeros(10, 4), torch.zeros(10, 4))
    assert found.skipped(local(1, tables), n_key, None).tolist() == [0, 40 - 40, 4 + 10]


@pytest.mark.usefixtures("long_from_five")
def test_short_sequences_and_global_layers_skip_nothing() -> None:
    lengths = torch.tensor([4, 9])
    position = torch.cat([torch.arange(4), torch.arange(9)])
    assert stretches(local(1), lengths[:1], lengths[:1], position[:4], position[:4]) is None
    assert stretches(local(None), lengths, lengths, position, position) is None
    assert skipped_undisturbed(local(None), lengths, lengths) is None
    # 0 1 2 | 3 4 5 | 6 7 8 see 4, 5 and 4 of 9 keys
    found = skipped_undisturbed(local(1), lengths, lengths)
    assert found is not None
    assert found.tolist() == [0, 2 * 3 * (5 + 4 + 5)]
    first = skipped_undisturbed(local(1), torch.ones_like(lengths), lengths)  # one query sees 2 of 9 keys
    assert first is not None
    assert first.tolist() == [0, 2 * 7]


def test_real_lengths() -> None:
    """At the lengths where it is done: all answers, the trace, and what is executed."""
    backbone, inputs = tiny_backbone("patchwork"), random_inputs([SHORT + STRETCH // 2, SHORT, 140], types=False)

    def drop(state):  # type: ignore[no-untyped-def]
        return Decision(drop=state.attention_received < 2.0) if state.layer == 2 else None

    for decider in (Silent(), Scripted(drop, "between")):
        with torch.no_grad():
            executed, got = executed_flops(PackedEngine(backbone), inputs, decider, 0.0)
            expected = ReferenceEngine(backbone).run(inputs, decider, 0.0)
        torch.testing.assert_close(got.logits, expected.logits, atol=1e-5, rtol=1e-5)
        assert torch.equal(got.trace.skipped, expected.trace.skipped)
        assert executed == pytest.approx(int(flops(got.trace, backbone).sum()), rel=0.01)
        skips = got.trace.skipped.bool().tolist()
        assert skips[1] == [False] * 4  # of SHORT keys, or fewer
        assert skips[0] == [False, True, True, False]  # layers 2 and 3 are local
        full = full_flops(got.trace.lengths, backbone)
        assert torch.equal(Cost.of(got.trace, backbone).full, full)
        assert bool((flops(got.trace, backbone)[[0, 2]] < full[[0, 2]]).all())
