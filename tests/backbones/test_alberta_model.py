"""ALBERTa's own architecture: its formulas, what its switches change, and its folders in plain Auto classes."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from commands import ENVIRONMENT
from tiny import random_inputs, tiny_config
from torch import nn

from stretto import StrettoError
from stretto.backbones.alberta_config import AlbertaConfig
from stretto.backbones.alberta_model import (
    AlbertaForMaskedLM,
    AlbertaForSequenceClassification,
    AlbertaLayer,
    AlbertaModel,
    distances,
    relative_scores,
    token_positions,
)

HEADS = ("MaskedLM", "SequenceClassification", "TokenClassification", "QuestionAnswering")


def config(**changes: Any) -> AlbertaConfig:
    made = tiny_config("alberta", n_layers=6)
    return AlbertaConfig(**{**made.to_dict(), "num_hidden_groups": 3, **changes})


def built(kind: Any = AlbertaModel, **changes: Any) -> Any:
    torch.manual_seed(0)
    model = kind(config(**changes))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.15)
    return model.eval()


# ---- formulas ----------------------------------------------------------------------------------------------


def test_distances_are_key_minus_query_and_cut_off() -> None:
    assert distances(torch.tensor([[0, 1, 2, 3]]), 2)[0].tolist() == [
        [2, 3, 4, 4],  # from the first token: 0, 1, 2, and 3 cut to 2
        [1, 2, 3, 4],
        [0, 1, 2, 3],
        [0, 0, 1, 2],
    ]


def test_positions_start_at_the_first_token_on_either_side() -> None:
    mask = torch.tensor([[1, 1, 1, 0], [0, 0, 1, 1]])
    assert token_positions(mask).tolist() == [[0, 1, 2, 2], [0, 0, 0, 1]]


def test_relative_scores_by_hand() -> None:
    query = torch.tensor([[[[1.0, 0.0], [0.0, 2.0]]]])  # one sequence, one head, two tokens
    key = torch.tensor([[[[3.0, 1.0], [1.0, 1.0]]]])
    table = torch.tensor([[10.0, 0.0], [0.0, 1.0], [1.0, 1.0]])  # r = -1, 0, 1
    scores = relative_scores(query, key, table, distances(torch.tensor([[0, 1]]), 1))
    # 00: (1,0)·E_0 + (3,1)·E_0 = 0 + 1     01: (1,0)·E_1 + (1,1)·E_1 = 1 + 2
    # 10: (0,2)·E_-1 + (3,1)·E_-1 = 0 + 30  11: (0,2)·E_0 + (1,1)·E_0 = 2 + 1
    assert scores[0, 0].tolist() == [[1.0, 3.0], [30.0, 3.0]]


def test_a_layer_by_hand() -> None:
    """d = 2, one head; the FFN answers zero, values are the states, keys are zero and queries (ln 3, 0)."""
    layer = AlbertaLayer(
        AlbertaConfig(hidden_size=2, num_attention_heads=1, intermediate_size=2, num_hidden_layers=1,
                      num_hidden_groups=1, max_relative_distance=1)
    ).eval()  # fmt: skip
    layer.attention_norm = layer.ffn_norm = nn.Identity()
    with torch.no_grad():
        for linear in (layer.query, layer.key, layer.ffn_out):
            linear.weight.zero_(), linear.bias.zero_()
        layer.query.bias.copy_(torch.tensor([math.log(3), 0.0]))
        for linear in (layer.value, layer.attention_output):
            linear.weight.copy_(torch.eye(2)), linear.bias.zero_()
        layer.relative.weight.copy_(torch.tensor([[0.0, 0.0], [math.sqrt(2), 9.0], [0.0, 0.0]]))  # only r = 0 counts
        hidden = torch.tensor([[[4.0, 0.0], [0.0, 8.0]]])
        out = layer(hidden, torch.zeros(1, 1, 1, 2), distances(torch.tensor([[0, 1]]), 1))
    # scores: ln 3 · √2 / √2 on the diagonal, 0 elsewhere: softmax (3/4, 1/4); H + Attn(H)
    torch.testing.assert_close(out, hidden + torch.tensor([[[3.0, 2.0], [1.0, 6.0]]]))


# ---- the model ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("head", HEADS)
def test_heads_answer_and_learn(head: str) -> None:
    model = getattr(transformers, f"AutoModelFor{head}").from_config(config(num_labels=3))
    inputs = random_inputs([7, 4])
    given = {"input_ids": inputs.input_ids, "attention_mask": inputs.attention_mask}
    labels = {
        "MaskedLM": {"labels": inputs.input_ids},
        "SequenceClassification": {"labels": torch.tensor([0, 2])},
        "TokenClassification": {"labels": inputs.input_ids % 3},
        "QuestionAnswering": {"start_positions": torch.tensor([1, 2]), "end_positions": torch.tensor([3, 2])},
    }[head]
    output = model(**given, **labels)
    shapes = {"MaskedLM": (2, 7, model.config.vocab_size), "SequenceClassification": (2, 3)}
    if head == "QuestionAnswering":
        assert output.start_logits.shape == output.end_logits.shape == (2, 7)
    else:
        assert output.logits.shape == shapes.get(head, (2, 7, 3))
    output.loss.backward()
    without = [name for name, parameter in model.named_parameters() if parameter.grad is None]
    assert without == []


@pytest.mark.parametrize("changes", [{}, {"use_absolute": False}, {"use_relative": False}])
def test_padding_on_either_side_changes_nothing(changes: dict[str, Any]) -> None:
    model = built(AlbertaForSequenceClassification, **changes)
    right, left = random_inputs([9, 5, 1]), random_inputs([9, 5, 1], side="left")
    with torch.no_grad():
        outputs = [model(i.input_ids, i.attention_mask, output_hidden_states=True) for i in (right, left)]
        alone = model(right.input_ids[1:2, :5])  # without padding, and without a mask
    torch.testing.assert_close(outputs[0].logits, outputs[1].logits, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(outputs[0].logits[1:2], alone.logits, atol=1e-5, rtol=1e-5)
    for a, b in zip(outputs[0].hidden_states, outputs[1].hidden_states, strict=True):
        torch.testing.assert_close(a[right.attention_mask.bool()], b[left.attention_mask.bool()], atol=1e-5, rtol=1e-5)


def test_layers_of_a_group_share_their_parameters() -> None:
    model = built()
    assert [list(model.groups).index(layer) for layer in model.layers] == [0, 0, 1, 1, 2, 2]
    uneven = built(num_hidden_layers=4)
    assert [list(uneven.groups).index(layer) for layer in uneven.layers] == [0, 0, 1, 2]
    deeper, wider = built(num_hidden_layers=12), built(num_hidden_groups=6)
    per_group = sum(p.numel() for p in model.groups[0].parameters())
    assert deeper.num_parameters() == model.num_parameters()
    assert wider.num_parameters() == model.num_parameters() + 3 * per_group


def test_states_are_those_of_the_layers_one_after_another() -> None:
    model, inputs = built(), random_inputs([6, 3])
    with torch.no_grad():
        states = model(inputs.input_ids, inputs.attention_mask, output_hidden_states=True).hidden_states
        bias = torch.zeros(2, 1, 1, 6).masked_fill(inputs.attention_mask[:, None, None] == 0, -1e30)
        distance = distances(inputs.positions, model.config.max_relative_distance)
        hidden = model.embeddings(inputs.input_ids, None, inputs.positions)
        for layer, state in zip(model.layers, states[:-1], strict=True):
            torch.testing.assert_close(hidden, state)
            hidden = layer(hidden, bias, distance)
    torch.testing.assert_close(model.final_norm(hidden), states[-1])


def test_switches_for_positions() -> None:
    """Without absolute positions only distances count; without relative terms there is no table; without both, order
    does not matter."""
    ids = torch.tensor([[5, 6, 7, 8]])
    turned = ids.flip(1)

    def states(**changes: Any) -> torch.Tensor:
        with torch.no_grad():
            return built(**changes)(ids).last_hidden_state - built(**changes)(turned).last_hidden_state.flip(1)

    for changes in ({}, {"use_absolute": False}, {"use_relative": False}):
        assert states(**changes).abs().max() > 1e-3, changes
    assert states(use_absolute=False, use_relative=False).abs().max() < 1e-5

    later = torch.tensor([[3, 4, 5, 6]])
    for absolute in (True, False):
        model = built(use_absolute=absolute)
        with torch.no_grad():
            moved = model(ids, position_ids=later).last_hidden_state - model(ids).last_hidden_state
        assert bool(moved.abs().max() > 1e-3) == absolute
    assert not [name for name, _ in built(use_absolute=False).named_parameters() if "position" in name]
    assert not [name for name, _ in built(use_relative=False).named_parameters() if "relative" in name]


def test_scores_of_words_come_from_their_embeddings() -> None:
    model = built(AlbertaForMaskedLM)
    assert model.lm_head.decoder.weight is model.get_input_embeddings().weight


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_hidden_groups": 7}, "Expected num_hidden_groups between 1 and num_hidden_layers, got 7 and 6."),
        ({"num_attention_heads": 5}, "Expected num_attention_heads to divide hidden_size, got 5 and 32."),
        ({"max_relative_distance": 0}, "Expected a max_relative_distance of 1 or more, got 0."),
    ],
)
def test_sizes_that_do_not_fit(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(StrettoError, match=message):
        config(**changes)


# ---- Auto classes ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("head", HEADS)
def test_a_saved_folder_loads_with_auto_classes(head: str, tmp_path: Path) -> None:
    auto_class = getattr(transformers, f"AutoModelFor{head}")
    model = auto_class.from_config(config(num_labels=3, use_absolute=False)).eval()
    model.save_pretrained(tmp_path)
    loaded = auto_class.from_pretrained(tmp_path).eval()
    assert type(loaded) is type(model)
    assert loaded.config.use_absolute is False
    ids = random_inputs([6]).input_ids
    with torch.no_grad():
        torch.testing.assert_close(model(ids)[0], loaded(ids)[0])


def test_an_encoder_goes_from_pretraining_to_a_task(tmp_path: Path) -> None:
    pretrained = built(AlbertaForMaskedLM)
    pretrained.save_pretrained(tmp_path)
    tagger = transformers.AutoModelForTokenClassification.from_pretrained(tmp_path, num_labels=5)
    for name, weight in pretrained.alberta.state_dict().items():
        assert torch.equal(weight, tagger.alberta.state_dict()[name]), name


def test_plain_transformers_loads_it_once_registered(tmp_path: Path) -> None:
    AlbertaForMaskedLM(config()).save_pretrained(tmp_path)
    script = (
        "from transformers import AutoModelForMaskedLM\n"
        "from stretto.backbones import register_architectures\n"
        "register_architectures()\n"
        f"print(type(AutoModelForMaskedLM.from_pretrained({str(tmp_path)!r})).__name__)"
    )
    done = subprocess.run([sys.executable, "-c", script], env=ENVIRONMENT, capture_output=True, text=True)
    assert done.stdout.strip() == "AlbertaForMaskedLM", done.stderr


def test_importing_stretto_stays_light() -> None:
    script = "import sys, stretto; print([m for m in ('torch', 'transformers', 'numpy') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", script], env=ENVIRONMENT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
