"""An anytime masked language model: how well each layer can guess a masked word.

One head, tied to the embeddings, reads every layer; whole words are masked. Its losses show from which layer on a word
is understood (`stretto.methods.depth_reconstruction`). No labels are needed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

from stretto.backbones import backbone_for
from stretto.data.words import Tally, word_starts, words_in
from stretto.engine.decider import Silent
from stretto.engine.packed import PackedEngine
from stretto.engine.reference import ReferenceEngine
from stretto.state import Decision, Inputs, State

#: The target of a token that is not to be guessed.
NO_TARGET = -1
#: Masked copies that go through the engine together.
COPIES = 64
#: Tokens whose logits over the vocabulary are held at a time.
GUESSES = 512


class AnytimeHead(nn.Module):
    """From the state of a token after any layer to its word piece. n tokens, d hidden size, V pieces."""

    def __init__(self, d: int, embedding: Tensor) -> None:
        super().__init__()
        vocabulary, size = embedding.shape
        self.transform = nn.Sequential(nn.Linear(d, size), nn.GELU(), nn.LayerNorm(size))
        self.bias = nn.Parameter(torch.zeros(vocabulary))

    def losses(self, rows: Tensor, targets: Tensor, embedding: Tensor) -> Tensor:
        """[n, d], [n], [V, e] -> [n] cross-entropy."""
        logits = self.transform(rows) @ embedding.T + self.bias
        return cross_entropy(logits, targets, reduction="none")


class AnytimeLM(nn.Module):
    """A separate encoder, with the head."""

    def __init__(self, encoder: Any, mask_id: int) -> None:
        super().__init__()
        self.encoder, self.mask_id = encoder.requires_grad_(True), mask_id
        self.backbone = backbone_for(encoder)
        self.head = AnytimeHead(self.backbone.d, self.embedding)

    @property
    def embedding(self) -> Tensor:
        """[V, e], shared with the encoder."""
        return self.encoder.get_input_embeddings().weight

    def forward(self, inputs: Inputs) -> Tensor:
        """Σ_n of layer n's mean loss over the masked tokens of a batch (`masked`)."""
        target = inputs.notes["target"]
        hidden = target != NO_TARGET
        engine = ReferenceEngine(self.backbone)
        states = engine.as_heads_read(engine.hidden_states(inputs))
        # the logits over the vocabulary are large: recomputed in the backward pass, one layer at a time
        losses = [
            checkpoint(self.head.losses, state[hidden], target[hidden], self.embedding, use_reentrant=False)
            for state in states
        ]
        return torch.stack(losses).sum() / hidden.sum().clamp(min=1)


# ---- masks -------------------------------------------------------------------------------------------------


def masked(inputs: Inputs, hidden: Tensor, mask_id: int) -> Inputs:
    """The batch with the tokens of `hidden` ([B, T] bool) masked and noted as `target`."""
    target = torch.where(hidden, inputs.input_ids, NO_TARGET)
    ids = torch.where(hidden, mask_id, inputs.input_ids)
    return Inputs(ids, inputs.attention_mask, inputs.token_type_ids, notes={"target": target})


def word_numbers(inputs: Inputs) -> Tensor:
    """[B, T]: 0, 1, … for the tokens of the first, second, … word of each sequence; -1 for those of no word."""
    word = inputs.notes["word"]
    is_word = (word >= 0) & inputs.attention_mask.bool()
    return torch.where(is_word, (word_starts(word) & is_word).cumsum(dim=1) - 1, -1)


def choose_words(number: Tensor, share: float) -> Tensor:
    """[B, T] words' numbers -> [B, T] bool: every word with probability `share`, at least one of each sequence."""
    chance = torch.rand(len(number), int(number.max()) + 2, device=number.device)  # a column for no word, the last
    exists = torch.zeros_like(chance, dtype=torch.bool)
    exists[torch.arange(len(number), device=number.device).unsqueeze(1), number] = True
    exists[:, -1] = False
    chance = chance.masked_fill(~exists, 2.0)
    chosen = (chance < share) | (chance == chance.amin(dim=1, keepdim=True))
    return (chosen & exists).gather(1, number % chance.shape[1])


def in_groups(number: Tensor, share: float) -> Tensor:
    """[B, T] words' numbers -> [B, T] groups: neighbouring words are in different ones, each has about `share` of all.

    -1 for tokens of no word."""
    return torch.where(number < 0, -1, number % max(round(1 / share), 1))


# ---- losses ------------------------------------------------------------------------------------------------


class LossRecorder(Silent):
    """Runs the head after every layer but the last."""

    points = frozenset({"after"})

    def __init__(self, model: AnytimeLM, losses: Tensor) -> None:
        super().__init__()
        self.model, self.noted = model, losses  # [B, T, L]

    def decide(self, state: State) -> Decision | None:
        rows = self.model.backbone.for_head(state.rows)
        self.note(rows, state.input_notes["target"], state.ids[state.sequence], state.position, state.layer)
        return None

    def note(self, rows: Tensor, target: Tensor, sequence: Tensor, position: Tensor, layer: int) -> None:
        """[N, d], then [N] each."""
        for some in (target != NO_TARGET).nonzero().squeeze(1).split(GUESSES):
            found = self.model.head.losses(rows[some], target[some], self.model.embedding)
            self.noted[sequence[some], position[some], layer - 1] = found


@torch.inference_mode()
def masked_losses(model: AnytimeLM, engine: PackedEngine, inputs: Inputs, group: Tensor) -> Tensor:
    """[B, T, L] the loss of each token at each layer, when the tokens of its group ([B, T]) are masked together.

    The groups of a sequence are masked one after another, each in a copy of the sequence; 0 for tokens in no group
    (-1)."""
    n_layers = model.backbone.n_layers
    everything = torch.zeros(*group.shape, n_layers, device=group.device)
    n_groups = int(group.max()) + 1
    wanted = torch.zeros(len(group), n_groups + 1, dtype=torch.bool, device=group.device)
    wanted[torch.arange(len(group), device=group.device).unsqueeze(1), group] = True  # column -1: no group
    for some in wanted[:, :n_groups].nonzero().split(COPIES):
        if not len(some):  # no words at all
            break
        source, which = some.unbind(dim=1)
        types = None if inputs.token_type_ids is None else inputs.token_type_ids[source]
        copies = Inputs(inputs.input_ids[source], inputs.attention_mask[source], types)
        hidden = group[source] == which.unsqueeze(1)
        copies = masked(copies, hidden, model.mask_id)
        recorder = LossRecorder(model, everything.new_zeros(*copies.input_ids.shape, n_layers))
        last = engine.run(copies, recorder, 0.0, keep_hidden=True).hidden
        assert last is not None
        sequence, column = hidden.nonzero(as_tuple=True)
        position = copies.positions[hidden]  # where engine and recorder have what stands in that column
        recorder.note(last[sequence, position], copies.notes["target"][hidden], sequence, position, n_layers)
        everything[source[sequence], column] = recorder.noted[sequence, position]
    return everything


def word_losses(losses: Tensor, number: Tensor) -> Tensor:
    """[B, T, L] losses of tokens, [B, T] words' numbers -> [B, T, L]: for each token the mean loss of its word's."""
    most = int(number.max()) + 2
    place = torch.arange(len(number), device=number.device).unsqueeze(1) * most + number % most  # the last: no word
    sums = losses.new_zeros(len(number) * most, losses.shape[2]).index_add(0, place.flatten(), losses.flatten(0, 1))
    return (sums / torch.bincount(place.flatten(), minlength=len(sums)).clamp(min=1).unsqueeze(1))[place]


def occurrence_losses(model: AnytimeLM, inputs: Inputs) -> Tensor:
    """[B, T, L] for each token how well each layer guesses its word in this place: every word is masked in turn."""
    number = word_numbers(inputs)
    return word_losses(masked_losses(model, PackedEngine(model.backbone), inputs, number), number)


def tally_losses(model: AnytimeLM, batches: Iterable[Inputs], share: float) -> Tally:
    """By word the sums of its losses at every layer, and how often it was masked (the last of the L + 1 numbers).

    `share` of the words of a text are masked together, as in training: every word once, in 1 / `share` passes."""
    tally, engine = Tally(model.backbone.n_layers + 1), PackedEngine(model.backbone)
    for inputs in batches:
        inputs = inputs.to(model.encoder.device)
        number = word_numbers(inputs)
        losses = word_losses(masked_losses(model, engine, inputs, in_groups(number, share)), number)
        words = words_in(inputs.input_ids, inputs.attention_mask, inputs.notes["word"], inputs.notes["word_key"])
        found = losses[words.sequence, words.column]
        tally.add(words.keys, words.pieces, torch.cat([found, found.new_ones(len(found), 1)], dim=1))
    tally.settle()
    return tally


def first_texts(batches: Iterable[tuple[Inputs, Tensor]], count: int) -> Iterator[Inputs]:
    """The inputs of whole batches, until there are `count` texts or more; 0 means all."""
    seen = 0
    for inputs, _ in batches:
        yield inputs
        seen += len(inputs.input_ids)
        if count and seen >= count:
            return
