"""The decoder engine against Hugging Face's `generate`, and lazy keys and values against the paper's copying."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from executed import CPU_FORMULAS
from tiny import make
from tiny_seq2seq import BLOCKS, END, FAMILIES, VOCABULARY, encoded, random_source, tiny_seq2seq
from torch.utils.flop_counter import FlopCounterMode

from stretto.backbones import backbone_for
from stretto.backbones.decoder import EncoderDecoder
from stretto.engine.decider import Silent
from stretto.engine.decode import DecoderEngine
from stretto.engine.decode_cache import Source
from stretto.engine.decode_cost import decoder_flops
from stretto.engine.decode_reference import DecoderReference, Given
from stretto.engine.generation import Generation
from stretto.engine.packed import PackedEngine
from stretto.engine.reference import ReferenceEngine
from stretto.engine.written import Text
from stretto.errors import StrettoError
from stretto.state import Decision, Inputs, Point, Stack, State
from stretto.tasks import Seq2Seq

LENGTHS = (7, 1, 12, 5, 12, 3)
NEW = 12
#: Many sentences and long texts: another kernel of attention (`attend`), and a table of keys that has to grow.
MANY = (20, 3, 17, 9, 20, 12, 5, 18, 20, 7, 11, 16)
LONG = {"max_new_tokens": 40, "min_length": 36}
SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "n-grams and bad words": {"no_repeat_ngram_size": 2, "bad_words_ids": [[5], [6, 7]]},
    "forced start and minimum length": {"forced_bos_token_id": 3, "min_length": 6},
    "beam": {"num_beams": 4},
    "beam, processors": {"num_beams": 4, "renormalize_logits": True, "no_repeat_ngram_size": 2, "min_length": 4},
    "beam, forced end": {"num_beams": 3, "forced_bos_token_id": 3, "forced_eos_token_id": END},
}


class Scripted(Silent):
    """Lets each token leave at a block that its sentence and position say, or the state of its row."""

    points: frozenset[Point] = frozenset({"before"})
    stacks: frozenset[Stack] = frozenset({"decoder"})

    def __init__(self, asks: bool = False) -> None:
        super().__init__()
        self.asks = asks

    def decide(self, state: State) -> Decision:
        if self.asks:
            return Decision(freeze=(state.exit_logits.argmax(dim=-1) + state.position + state.layer) % 3 == 0)
        return Decision(freeze=self.block_of(state.ids, state.position) < state.layer)

    @staticmethod
    def block_of(sentence: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        """From 1 to all blocks, in an order without a pattern."""
        return (sentence * 7 + position * position * 3 + position) % 11 % BLOCKS + 1


def engine_for(family: str, dtype: str = "float32") -> DecoderEngine:
    backbone = backbone_for(tiny_seq2seq(family))
    assert isinstance(backbone, EncoderDecoder)
    return DecoderEngine(backbone, dtype)


def settings_of(engine: DecoderEngine, **settings: Any) -> Generation:
    return Generation.of(engine.backbone.model, engine.backbone.most_positions, **{"max_new_tokens": NEW, **settings})


def up_to_end(row: torch.Tensor) -> list[int]:
    tokens = row.tolist()[1:]
    return tokens[: tokens.index(END) + 1] if END in tokens else tokens


#: The two forms of T5 differ in nothing that search could meet.
COMPARED = [(family, setting) for family in FAMILIES for setting in SETTINGS if family != "t5" or setting == "greedy"]


@pytest.mark.parametrize(("family", "setting"), COMPARED)
def test_texts_are_those_of_generate(family: str, setting: str) -> None:
    engine, batch = engine_for(family), random_source(LENGTHS)
    model = engine.backbone.model
    with torch.no_grad():
        expected = model.generate(**batch, max_new_tokens=NEW, **SETTINGS[setting])
    generation = settings_of(engine, **SETTINGS[setting])
    texts, _ = engine.run(encoded(model, batch), generation, Silent(), 0.0)
    assert [text.tokens for text in texts] == [up_to_end(row) for row in expected]
    assert len({tuple(text.tokens) for text in texts}) > 1  # not the same text for all
    for part in ([2], [5, 0, 3]):  # alone, and in another batch
        source = encoded(model, {name: value[part] for name, value in batch.items()})
        again, _ = engine.run(source, generation, Silent(), 0.0)
        assert [text.tokens for text in again] == [texts[number].tokens for number in part]


@pytest.mark.parametrize("beams", [1, 2])
@pytest.mark.parametrize("family", FAMILIES)
def test_long_texts_of_many_sentences_are_those_of_generate(family: str, beams: int) -> None:
    engine, batch, settings = engine_for(family), random_source(MANY), {**LONG, "num_beams": beams}
    model = engine.backbone.model
    with torch.no_grad():
        expected = model.generate(**batch, **settings)
    texts, _ = engine.run(encoded(model, batch), settings_of(engine, **settings), Silent(), 0.0)
    assert [text.tokens for text in texts] == [up_to_end(row) for row in expected]
    alone = encoded(model, {name: value[[2]] for name, value in batch.items()})
    assert engine.run(alone, settings_of(engine, **settings), Silent(), 0.0)[0][0].tokens == texts[2].tokens


@pytest.mark.parametrize("early_stopping", [False, True, "never"])
@pytest.mark.parametrize("family", ["marian", "bart", "t5-gated"])
def test_beams_are_those_of_generate_at_every_length_penalty(family: str, early_stopping: bool | str) -> None:
    engine, batch = engine_for(family), random_source(LENGTHS[:4])
    source = encoded(engine.backbone.model, batch)
    for length_penalty in (0.6, 1.0, 2.0):
        settings = {"num_beams": 4, "early_stopping": early_stopping, "length_penalty": length_penalty}
        with torch.no_grad():
            expected = engine.backbone.model.generate(**batch, max_new_tokens=NEW, **settings)
        texts, _ = engine.run(source, settings_of(engine, **settings), Silent(), 0.0)
        assert [text.tokens for text in texts] == [up_to_end(row) for row in expected], length_penalty


def test_the_texts_compared_are_varied() -> None:
    """Identity on constant texts would show little: these have many tokens, several lengths and their own ends."""
    for family in FAMILIES:
        engine = engine_for(family)
        source = encoded(engine.backbone.model, random_source(LENGTHS))
        texts, _ = engine.run(source, settings_of(engine), Silent(), 0.0)
        assert len({token for text in texts for token in text.tokens}) > 15, family
        assert len({len(text.tokens) for text in texts}) > 2, family


def given_by(model: Any, batch: dict[str, torch.Tensor], texts: list[Text], start: int) -> tuple[Given, torch.Tensor]:
    """The texts as a padded batch for the reference, and their exits."""
    longest = max(len(text.tokens) for text in texts)
    tokens, exits = (
        torch.zeros(len(texts), longest, dtype=torch.long),
        torch.ones(len(texts), longest, dtype=torch.long),
    )
    for row, text in enumerate(texts):
        tokens[row, : len(text.tokens)] = torch.tensor([start, *text.tokens[:-1]])
        exits[row, : len(text.exits)] = torch.tensor(text.exits)
    hidden = model.get_encoder()(**batch).last_hidden_state
    return Given(hidden, batch["attention_mask"], tokens), exits


@torch.no_grad()
@pytest.mark.parametrize("family", ["marian", "bart", "t5-gated"])
@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize(("asks", "lengths", "long"), [(False, LENGTHS, {}), (True, LENGTHS, {}), (False, MANY, LONG)])
def test_lazy_keys_give_the_texts_of_copied_states(
    family: str, beams: int, asks: bool, lengths: tuple[int, ...], long: dict[str, int]
) -> None:
    """The reference copies the state of a token that left to all blocks above, and computes whole texts at once."""
    engine, batch = engine_for(family), random_source(lengths)
    backbone, reference = engine.backbone, DecoderReference(engine.backbone)
    generation = settings_of(engine, num_beams=beams, length_penalty=1.0, **long)
    decider = Scripted(asks)
    texts, _ = engine.run(encoded(backbone.model, batch), generation, decider, 0.0)
    given, exits = given_by(backbone.model, batch, texts, generation.start)
    assert len({block for text in texts for block in text.exits}) > 2  # tokens do leave, at several blocks
    logits = reference.logits(reference.states_at(given, exits))
    if long and beams == 1:  # greedy scores are those of the processed logits: the end is kept back
        logits[:, : LONG["min_length"] - 1, END] = -torch.inf
    log_probs = logits.log_softmax(dim=-1)
    for row, text in enumerate(texts):
        of_text = log_probs[row, : len(text.tokens)]
        chosen = of_text.gather(1, torch.tensor(text.tokens).unsqueeze(1)).sum()
        if beams == 1:
            assert of_text.argmax(dim=-1).tolist() == text.tokens
            torch.testing.assert_close(torch.tensor(text.score), chosen, atol=1e-3, rtol=1e-4)
        else:
            torch.testing.assert_close(torch.tensor(text.score), chosen / len(text.tokens), atol=1e-4, rtol=1e-4)
        if not asks:
            assert text.exits == Scripted.block_of(torch.tensor(row), torch.arange(len(text.tokens))).tolist()
    alone, _ = engine.run(encoded(backbone.model, batch).take(torch.tensor([0])), generation, decider, 0.0)
    assert alone[0].tokens == texts[0].tokens and alone[0].exits == texts[0].exits


@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize("decider", [Silent(), Scripted(), Scripted(asks=True)])
def test_the_ledger_counts_what_was_executed(decider: Any, beams: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With no padding (sources of one length, rows not rounded up) every multiply-add is in the trace."""
    monkeypatch.setattr("stretto.engine.decode_block.rounded", lambda matrix: matrix)
    for place in ("decode", "decode_token", "decode_block"):
        monkeypatch.setattr(f"stretto.engine.{place}.few", lambda rows: rows)
    engine = engine_for("t5-gated")
    source = encoded(engine.backbone.model, random_source((6, 6, 6)))
    with FlopCounterMode(display=False, custom_mapping=CPU_FORMULAS) as counter:
        _, trace = engine.run(source, settings_of(engine, num_beams=beams), decider, 0.0)
    assert int(decoder_flops(trace, engine.backbone).sum()) == counter.get_total_flops()
    full = decoder_flops(trace.at_full_depth(), engine.backbone)
    spent = decoder_flops(trace, engine.backbone)
    if type(decider) is Silent:
        assert torch.equal(spent, full)
    elif not decider.asks:
        assert bool((spent <= full).all()) and bool((spent < full).any())


def test_a_sentence_that_stays_low_needs_no_source_above() -> None:
    class Low(Silent):
        points: frozenset[Point] = frozenset({"before"})
        stacks: frozenset[Stack] = frozenset({"decoder"})

        def decide(self, state: State) -> Decision:
            return Decision(freeze=torch.full_like(state.frozen, state.layer == 3))

    engine = engine_for("marian")
    source = encoded(engine.backbone.model, random_source(LENGTHS))
    texts, trace = engine.run(source, settings_of(engine), Low(), 0.0)
    assert trace.source[:, :2].eq(source.lengths.unsqueeze(1)).all() and not trace.source[:, 2:].any()
    assert not trace.projected[:, 2:].any()
    assert {block for text in texts for block in text.exits} == {2}


def test_int8_writes_texts_and_stays_near() -> None:
    engine, exact = engine_for("marian", "int8"), engine_for("marian")
    states = torch.randn(5, 32, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(engine.logits(states), exact.logits(states), atol=0.15, rtol=0.1)
    for beams in (1, 3):
        texts, _ = engine.run(
            encoded(engine.backbone.model, random_source(LENGTHS)),
            settings_of(engine, num_beams=beams),
            Scripted(),
            0.0,
        )
        assert all(0 < len(text.tokens) <= NEW and max(text.tokens) < VOCABULARY for text in texts)


def test_lengths_at_their_limits() -> None:
    engine = engine_for("marian")
    model = engine.backbone.model
    longest = model.config.max_position_embeddings
    source = encoded(model, random_source((3, 5)))
    texts, _ = engine.run(source, settings_of(engine, max_new_tokens=longest, min_length=longest), Silent(), 0.0)
    assert all(len(text.tokens) >= longest - 1 for text in texts)  # more than the cache holds at first
    with pytest.raises(StrettoError, match="at most 64 new tokens"):
        settings_of(engine, max_new_tokens=longest + 1)
    one, _ = engine.run(source, settings_of(engine, max_new_tokens=1), Silent(), 0.0)
    assert [len(text.tokens) for text in one] == [1, 1]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"do_sample": True}, "greedy decoding or beam search"),
        ({"encoder_no_repeat_ngram_size": 2}, "encoder_no_repeat_ngram_size to be unset"),
        ({"colour": 3}, "GenerationConfig, got colour"),
        ({"num_beams": 0}, "num_beams of 1 or more"),
    ],
)
def test_settings_that_are_not_had_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(StrettoError, match=message):
        settings_of(engine_for("marian"), **settings)


def test_no_sentences_give_no_texts() -> None:
    engine = engine_for("bart")
    nothing = Source(torch.empty(0, 32), torch.zeros(0, dtype=torch.long))
    texts, trace = engine.run(nothing, settings_of(engine), Silent(), 0.0)
    assert texts == [] and len(trace.steps) == 0


@torch.no_grad()
@pytest.mark.parametrize("family", FAMILIES)
def test_both_engines_run_the_encoder_as_hugging_face_does(family: str) -> None:
    backbone, batch = backbone_for(tiny_seq2seq(family)), random_source((7, 1, 40, 5, 3))
    inputs = Inputs(**batch)
    expected = encoded(backbone.model, batch).rows
    packed = PackedEngine(backbone).run(inputs, Silent(), 0.0, keep_hidden=True)
    reference = ReferenceEngine(backbone).run(inputs, Silent(), 0.0, keep_hidden=True)
    for output in (packed, reference):
        assert output.hidden is not None
        torch.testing.assert_close(output.hidden[inputs.attention_mask.bool()], expected, atol=1e-4, rtol=1e-4)


@torch.no_grad()
@pytest.mark.parametrize("family", FAMILIES)
def test_both_engines_shorten_the_encoder_alike(family: str) -> None:
    """Tokens that were dropped are restored: the decoder reads all of them."""
    backbone, inputs = backbone_for(tiny_seq2seq(family)), Inputs(**random_source((7, 1, 40, 5, 3)))
    method = make("length_adaptive", backbone, Seq2Seq())
    packed = PackedEngine(backbone).run(inputs, method, 0.3, keep_hidden=True)
    reference = ReferenceEngine(backbone).run(inputs, method, 0.3, keep_hidden=True)
    assert packed.hidden is not None and reference.hidden is not None
    there = inputs.attention_mask.bool()
    torch.testing.assert_close(packed.hidden[there], reference.hidden[there], atol=1e-4, rtol=1e-4)
    assert torch.equal(packed.trace.n_ffn, reference.trace.n_ffn)
    assert int(packed.trace.n_ffn[2, -1]) < 40


def test_a_decider_knows_the_stack_and_the_step_it_is_asked_in() -> None:
    class Witness(Silent):
        points: frozenset[Point] = frozenset({"before"})
        stacks: frozenset[Stack] = frozenset({"encoder", "decoder"})

        def __init__(self) -> None:
            super().__init__()
            self.seen: list[tuple[str, int, int]] = []

        def decide(self, state: State) -> None:
            assert state.stack == "encoder" or bool((state.position == state.step).all())
            self.seen.append((state.stack, state.step, state.layer))

    engine, witness = engine_for("marian"), Witness()
    batch = random_source(LENGTHS)
    output = PackedEngine(engine.backbone).run(Inputs(**batch), witness, 0.0)
    assert set(witness.seen) == {("encoder", 0, layer) for layer in range(1, engine.backbone.n_layers + 1)}
    witness.seen.clear()
    generation = settings_of(engine, max_new_tokens=3, min_length=4)
    _, trace = engine.run(encoded(engine.backbone.model, batch), generation, witness, 0.0)
    asked = {(step, layer) for _, step, layer in witness.seen}
    assert {stack for stack, _, _ in witness.seen} == {"decoder"}
    assert {step for step, _ in asked} == {0, 1, 2} and max(layer for _, layer in asked) == BLOCKS
    assert (output.trace.stack, trace.stack) == ("encoder", "decoder")
