"""What heads read and cost; models whose own head pools the mean; and those whose head nobody here knows."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from executed import assert_same, executed_flops
from scripted import Scripted, ragged_state
from tiny import make, random_inputs, tiny_config, tiny_encoder
from torch import nn
from transformers import (
    AutoModelForMaskedLM,
    BertForSequenceClassification,
    BertForTokenClassification,
    ModernBertConfig,
    ModernBertForSequenceClassification,
    ModernBertForTokenClassification,
)
from transformers.modeling_outputs import SequenceClassifierOutput

from stretto.backbones import Backbone, backbone_for
from stretto.backbones.heads import EveryRow, FirstRow, Head, MeanOfRows, sequence_head, token_head
from stretto.engine.cost import Cost, flops
from stretto.engine.decider import Silent
from stretto.engine.packed import PackedEngine
from stretto.engine.reference import ReferenceEngine
from stretto.engine.replay import record, replay
from stretto.errors import StrettoError
from stretto.state import Decision, State


class MeanForSequenceClassification(BertForSequenceClassification):
    """BERT, but its classifier reads the mean of the tokens."""

    def forward(self, input_ids: Any = None, attention_mask: Any = None, token_type_ids: Any = None, **_: Any) -> Any:
        hidden = self.bert(input_ids, attention_mask, token_type_ids).last_hidden_state
        mask = attention_mask.unsqueeze(-1)
        mean = (hidden * mask).sum(dim=1) / mask.sum(dim=1)
        return SequenceClassifierOutput(logits=self.classifier(self.bert.pooler(mean.unsqueeze(1))))


def mean_backbone(pooling: str = "mean") -> Backbone:
    config = tiny_config("bert")
    config.classifier_pooling = pooling
    model = MeanForSequenceClassification(config)
    model.load_state_dict(tiny_encoder("bert").state_dict())
    return backbone_for(model.eval())


@pytest.mark.parametrize(
    ("kind", "expected", "macs"),
    [
        (FirstRow, [[1.0, 2.0], [7.0, 8.0]], [8, 8]),
        (MeanOfRows, [[2.0, 4.0], [7.0, 8.0]], [8, 8]),
        (EveryRow, [[1.0, 2.0], [3.0, 6.0], [7.0, 8.0]], [16, 8]),
    ],
)
def test_a_head_reads_the_same_packed_or_padded_and_counts_its_work(
    kind: type[Head], expected: list[list[float]], macs: list[int]
) -> None:
    head = kind(lambda read: 2 * read, [nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 2))])
    rows = torch.tensor([[1.0, 2.0], [3.0, 6.0], [7.0, 8.0]])
    assert head.pool_rows(rows, ragged_state([0.0, 0.0], [0.0])).tolist() == expected
    hidden = torch.tensor([[[1.0, 2.0], [3.0, 6.0]], [[torch.nan] * 2, [7.0, 8.0]]])  # padded on the left
    mask = torch.tensor([[1, 1], [0, 1]])
    read = head.pool_padded(hidden, mask)
    assert (read[mask.bool()] if head.every_row else read).tolist() == expected
    assert head.macs == 8 and head.macs_of(torch.tensor([2, 1])).tolist() == macs
    assert head(rows).tolist() == [[2.0, 4.0], [6.0, 12.0], [14.0, 16.0]]


def test_a_model_that_pools_the_mean_is_answered_as_by_its_own_forward() -> None:
    backbone, inputs = mean_backbone(), random_inputs([9, 5, 1, 12])
    with torch.no_grad():
        expected = backbone.model(inputs.input_ids, inputs.attention_mask, inputs.token_type_ids).logits
        for engine in (PackedEngine(backbone), ReferenceEngine(backbone)):
            output = engine.run(inputs, Silent(), 0.0)
            torch.testing.assert_close(output.logits, expected, atol=1e-5, rtol=1e-5)
            assert Cost.of(output.trace, backbone).total == 1.0
    other = PackedEngine(mean_backbone("cls")).run(inputs, Silent(), 0.0).logits
    assert not torch.allclose(other, expected, atol=1e-2)  # the pooling makes a difference


def test_the_mean_is_that_of_the_rows_still_there() -> None:
    backbone, inputs = mean_backbone(), random_inputs([9, 5, 1, 12])

    def drop(state: State) -> Decision:
        return Decision(drop=state.position > 3) if state.layer == 2 else Decision()

    decider = Scripted(drop, "before", restore=True)
    with torch.no_grad():
        expected = ReferenceEngine(backbone).run(inputs, decider, 0.0, keep_hidden=True)
    executed, output = executed_flops(PackedEngine(backbone), inputs, decider, 0.0)
    assert_same(output, expected)
    assert executed == pytest.approx(int(flops(output.trace, backbone).sum()), rel=0.01)
    assert expected.hidden is not None and expected.read is not None
    torch.testing.assert_close(expected.read[3], expected.hidden[3, :4].mean(dim=0))
    torch.testing.assert_close(backbone.head(expected.read), expected.logits)


def test_a_recording_holds_what_the_head_reads() -> None:
    backbone, inputs = mean_backbone(), random_inputs([9, 5, 1, 12])
    method, engine = make("deebert", backbone), PackedEngine(backbone)
    recording = record(engine, method.exits, [inputs])
    for dial in (0.0, 0.5):
        assert_same(replay(backbone, method, recording, dial), engine.run(inputs, method, dial))


MODERN = ModernBertConfig(
    hidden_size=32, num_attention_heads=4, num_hidden_layers=2, intermediate_size=64, vocab_size=50, num_labels=3,
    pad_token_id=0, bos_token_id=1, eos_token_id=2, cls_token_id=1, sep_token_id=2, attn_implementation="eager",
)  # fmt: skip


@pytest.mark.parametrize("pooling", ["cls", "mean"])
def test_modernbert_pools_as_its_config_says(pooling: str) -> None:
    config = copy.deepcopy(MODERN)
    config.classifier_pooling = pooling
    model = ModernBertForSequenceClassification(config).eval()
    inputs = random_inputs([7, 4], types=False)
    head = sequence_head(model, lambda pooled: model.classifier(model.head(pooled)), [model.head, model.classifier])
    with torch.no_grad():
        output = model(inputs.input_ids, inputs.attention_mask, output_hidden_states=True)
        read = head.pool_padded(output.hidden_states[-1], inputs.attention_mask)
        torch.testing.assert_close(head(read), output.logits)


def test_a_module_before_a_token_head_is_refused() -> None:
    with pytest.raises(StrettoError, match=r"Expected a ModernBertForTokenClassification .* also has head"):
        token_head(ModernBertForTokenClassification(MODERN))


def test_a_module_that_nobody_knows_is_refused() -> None:
    model = BertForTokenClassification(tiny_config("bert"))
    assert backbone_for(model).head.macs == 32 * 3
    model.adapter = nn.Linear(32, 32)
    with pytest.raises(StrettoError, match=r"got one that also has adapter"):
        _ = backbone_for(model).head


def test_another_pooling_is_refused() -> None:
    with pytest.raises(StrettoError, match=r"classifier_pooling to be one of cls, mean; got 'attention'"):
        _ = mean_backbone("attention").head


def test_a_model_without_a_head_to_answer_with_is_refused() -> None:
    backbone = backbone_for(AutoModelForMaskedLM.from_config(tiny_config("bert")))
    with pytest.raises(StrettoError, match=r"a head for sequences, tokens or questions, got a BertForMaskedLM"):
        _ = backbone.head
