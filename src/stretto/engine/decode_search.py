"""From scores to texts: greedy decoding and beam search, step by step. A sentence leaves when it has ended.

Both give each sentence the text that Hugging Face's `generate` gives it. S live sentences of K beams each are rows
[S * K]; V is the size of the vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from stretto.engine.generation import Generation
from stretto.engine.written import Text

#: Practically minus infinity: the score that `generate` gives beams that must not be chosen.
NEVER = -1.0e9
#: `best_of` first takes the maximum of stretches of this many scores; only if there are at least so many scores.
STRETCH, LARGE = 128, 1 << 15


@dataclass(frozen=True)
class Advance:
    """What one step decided."""

    rows: Tensor | None
    """Rows (indices of those before the step) that the next step continues, for all sentences; None: unchanged."""
    ended: list[tuple[int, Text]]
    """Sentences (indices among those before the step) that leave, with their texts."""
    stay: Tensor | None
    """Sentences that stay (indices, ascending); None: all."""


class Search(Protocol):
    @property
    def tokens(self) -> Tensor:
        """[S * K, T] what is written so far, the start token first."""

    def advance(self, logits: Tensor, exits: Tensor) -> Advance:
        """One token more: [S * K, V] logits, [S * K] the block at which each row's state left."""


def hits(tokens: Tensor, ends: Tensor) -> Tensor:
    """Which of these tokens end a text."""
    return (tokens.unsqueeze(-1) == ends).any(dim=-1)


def best_of(scores: Tensor) -> Tensor:
    """[R, V] -> [R] the index of the highest score, the first of equals. torch's argmax is not vectorised: with a large
    vocabulary it takes as long as some blocks. Its maximum is vectorised, so only the stretch with it is searched."""
    rows, vocabulary = scores.shape
    if rows * vocabulary < LARGE:
        return scores.argmax(dim=1)
    whole = vocabulary // STRETCH
    last = vocabulary - STRETCH  # the last stretch may overlap the one before it
    by_stretch = scores[:, : whole * STRETCH].unflatten(1, (whole, STRETCH)).amax(dim=2)
    highest = torch.cat([by_stretch, scores[:, last:].amax(dim=1, keepdim=True)], dim=1)
    first = (highest.argmax(dim=1, keepdim=True) * STRETCH).clamp(max=last)
    places = first + torch.arange(STRETCH, device=scores.device)  # [R, STRETCH]
    return (first + scores.gather(1, places).argmax(dim=1, keepdim=True)).squeeze(1)


class Greedy:
    """The best token at every step."""

    def __init__(self, generation: Generation, sentences: int, device: torch.device, *, scored: bool) -> None:
        self.generation = generation
        self.tokens = torch.full((sentences, 1), generation.start, dtype=torch.long, device=device)
        self.exits = torch.zeros(sentences, 0, dtype=torch.long, device=device)
        self.scores = torch.zeros(sentences, device=device) if scored else None

    def advance(self, logits: Tensor, exits: Tensor) -> Advance:
        scores = self.generation.processed(self.tokens, logits)
        best = best_of(scores)
        if self.scores is not None:
            picked = scores.gather(1, best.unsqueeze(1)).squeeze(1)
            self.scores = self.scores + (picked - scores.logsumexp(dim=-1))
        self.tokens = torch.cat([self.tokens, best.unsqueeze(1)], dim=1)
        self.exits = torch.cat([self.exits, exits.unsqueeze(1)], dim=1)
        if self.tokens.shape[1] >= self.generation.max_length:
            done = torch.ones_like(best, dtype=torch.bool)
        else:
            done = hits(best, self.generation.ends)
        if not bool(done.any()):
            return Advance(None, [], None)
        ended = [(index, self._text(index)) for index in done.nonzero().squeeze(1).tolist()]
        stay = (~done).nonzero().squeeze(1)
        self.tokens, self.exits = self.tokens[stay], self.exits[stay]
        self.scores = None if self.scores is None else self.scores[stay]
        return Advance(None, ended, stay)

    def _text(self, index: int) -> Text:
        score = None if self.scores is None else float(self.scores[index])
        return Text(self.tokens[index, 1:].tolist(), score, self.exits[index].tolist())


class Beam:
    """K texts at once for each sentence. Finished ones are kept, the K best of them, until none can get better."""

    def __init__(self, generation: Generation, sentences: int, device: torch.device) -> None:
        self.generation, self.beams = generation, generation.num_beams
        shape = (sentences, self.beams)
        self.written = torch.full((*shape, 1), generation.start, dtype=torch.long, device=device)  # [S, K, T]
        self.exits = torch.zeros(*shape, 0, dtype=torch.long, device=device)
        self.running = torch.zeros(shape, device=device)  # [S, K] sums of log-probabilities
        self.running[:, 1:] = NEVER  # all beams start alike: only the first may go on
        self.best = torch.full(shape, NEVER, device=device)  # [S, K] scores of finished texts
        self.is_finished = torch.zeros(shape, dtype=torch.bool, device=device)
        self.finished: list[list[Text | None]] = [[None] * self.beams for _ in range(sentences)]
        self.can_improve = torch.ones(sentences, 1, dtype=torch.bool, device=device)

    @property
    def tokens(self) -> Tensor:
        return self.written.flatten(0, 1)

    def advance(self, logits: Tensor, exits: Tensor) -> Advance:
        generation, sentences, beams = self.generation, len(self.written), self.beams
        length = self.written.shape[2]  # before this step; the start token is not generated
        log_probs = generation.processed(self.tokens, logits.log_softmax(dim=-1))
        vocabulary = log_probs.shape[-1]
        total = (log_probs.view(sentences, beams, -1) + self.running.unsqueeze(2)).flatten(1)
        candidates = max(2, 1 + len(generation.ends)) * beams
        values, index = total.topk(candidates)  # [S, candidates]
        beam, token = index // vocabulary, index % vocabulary
        ends = hits(token, generation.ends)
        if length + 1 >= generation.max_length:
            ends = torch.ones_like(ends)
        exits = torch.cat([self.exits, exits.view(sentences, beams, 1)], dim=2)

        self._finish(values, beam, token, exits, ends)
        self.running, going = (values + ends.float() * NEVER).topk(beams)  # [S, K]
        parent = beam.gather(1, going)
        rows = (parent + torch.arange(sentences, device=parent.device).unsqueeze(1) * beams).flatten()
        self.written = torch.cat([by_beam(self.written, parent), token.gather(1, going).unsqueeze(2)], dim=2)
        self.exits = by_beam(exits, parent)

        done = self._is_done(ends, length)
        if not bool(done.any()):
            return Advance(rows, [], None)
        ended = [(number, self._text(number)) for number in done.nonzero().squeeze(1).tolist()]
        stay = (~done).nonzero().squeeze(1)
        for name in ("written", "exits", "running", "best", "is_finished", "can_improve"):
            setattr(self, name, getattr(self, name)[stay])
        self.finished = [self.finished[number] for number in stay.tolist()]
        return Advance(rows, ended, stay)

    def _finish(self, values: Tensor, beam: Tensor, token: Tensor, exits: Tensor, ends: Tensor) -> None:
        """Keep the best K of the texts finished before and now. Only the K best candidates may finish."""
        generation, beams = self.generation, self.beams
        may = ends & (torch.arange(ends.shape[1], device=ends.device) < beams)
        full = self.is_finished.all(dim=1, keepdim=True) & (generation.early_stopping is True)
        if not bool(may.any()):
            return
        scores = values / self.written.shape[2] ** generation.length_penalty
        scores = scores + full.float() * NEVER + (~self.can_improve).float() * NEVER + (~may) * NEVER
        self.best, place = torch.cat([self.best, scores], dim=1).topk(beams)
        self.is_finished = torch.cat([self.is_finished, may], dim=1).gather(1, place)
        for number, places in enumerate(place.tolist()):
            old = self.finished[number]
            self.finished[number] = [
                old[which] if which < beams else self._candidate(number, which - beams, scores, beam, token, exits)
                for which in places
            ]

    def _candidate(self, number: int, which: int, scores: Tensor, beam: Tensor, token: Tensor, exits: Tensor) -> Text:
        parent = int(beam[number, which])
        tokens = [*self.written[number, parent, 1:].tolist(), int(token[number, which])]
        return Text(tokens, float(scores[number, which]), exits[number, parent].tolist())

    def _is_done(self, ends: Tensor, generated: int) -> Tensor:
        """[S] bool: no open text can beat the finished ones, all beams are full, or no beam can continue.

        `generated` tokens were generated, this step's included."""
        generation = self.generation
        at = generated
        if generation.early_stopping == "never" and generation.length_penalty > 0:
            at = generation.max_length - 1
        possible = self.running[:, :1] / at**generation.length_penalty
        worst = torch.where(self.is_finished, self.best.min(dim=1, keepdim=True).values, NEVER)
        self.can_improve = self.can_improve & (possible > worst).any(dim=1, keepdim=True)
        full = self.is_finished.all(dim=1) & (generation.early_stopping is True)
        return ~self.can_improve.squeeze(1) | full | ends.all(dim=1)

    def _text(self, number: int) -> Text:
        text = self.finished[number][0]
        assert text is not None
        return text


def by_beam(values: Tensor, beam: Tensor) -> Tensor:
    """[S, K, T], [S, K'] -> [S, K', T]: these beams of each sentence."""
    return values.gather(1, beam.unsqueeze(2).expand(-1, -1, values.shape[2]))
