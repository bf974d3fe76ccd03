"""Up to which layer each token is used: one text, run with the model's own method and recorded.

A `Watcher` replaces the method on the packed engine. It passes every decision through and records what happened to
each token, the score it was ranked by (`Decision.score`), the depth it was given (`Decision.depth`), what was compared
with the dial (`Decision.compared`), and the answers of the exits that the method asked. It computes nothing itself:
answer and cost are those of `AdaptiveModel.predict`. Only rows of the last layer that no head reads, which `predict`
leaves out, are computed here, so that they are seen as in other layers.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from stretto.data.batches import batches
from stretto.data.tokenise import Encoded, Origin
from stretto.engine.decider import Decider, OwnHead, Silent, ask
from stretto.model import AdaptiveModel, Text
from stretto.state import Compared, Decision, Inputs, State
from stretto.tasks import LabelPrediction, Prediction


@dataclass(frozen=True)
class Comparison:
    """A number that decided, and the bound it was compared with."""

    value: float | list[float | None]
    """Of the text; or of each token, None where there was none."""
    bound: float

    @property
    def summary(self) -> str:
        """'0.31 (bound 0.4)', or of tokens '0.02 to 0.4 (bound 0.1)'."""
        values = [self.value] if isinstance(self.value, float) else [each for each in self.value if each is not None]
        ends = dict.fromkeys(f"{each:.4g}" for each in (min(values), max(values)))
        return f"{' to '.join(ends)} (bound {self.bound:.4g})"


@dataclass(frozen=True)
class Explanation:
    """T tokens, L layers."""

    tokens: list[str]
    """The text of the token; special tokens by their names."""
    joined: list[bool]
    """[T] True where a token continues the word of the one before."""
    lives: Tensor
    """[L + 1, T] bool: the token came out of the layer; row 0 is the embeddings."""
    frozen: Tensor
    """[L, T] bool: it went through the layer without being updated."""
    scores: Tensor
    """[L, T] what the method ranked it by in the layer; NaN where it did not."""
    depths: list[int] | None
    """[T] the depth the method gave each token; None if it gave none."""
    exits: list[dict[str, float] | None]
    """[L] the answer of the exit after the layer, if the method asked it; for regression the value, under ''."""
    compared: list[dict[str, Comparison]]
    """[L] what the method compared in each layer, by name."""
    prediction: Prediction
    method: str
    dial: float
    truncated: bool
    windows: int
    """Parts that the input was read in; the tokens are those of the first."""
    end: str = "answered here"
    """What happens after the last layer that ran, in words."""

    @property
    def not_shown(self) -> str:
        """A note if these tokens are not the whole input."""
        if self.windows > 1:
            return f"the context was read in {self.windows} windows; these are the tokens of the first"
        return f"the text was longer than {len(self.tokens)} tokens and was truncated" if self.truncated else ""

    @property
    def depth(self) -> int:
        return self.prediction.depth

    @property
    def answered_after(self) -> int:
        """The last layer: deeper than `depth` if some were left out."""
        return max(self.depth, *self.last_layers)

    @property
    def last_layers(self) -> list[int]:
        """[T] the last layer each token came out of; 0 if it went before the first."""
        return (self.lives.shape[0] - 1 - self.lives.flip(0).int().argmax(dim=0)).tolist()

    def to_json(self) -> dict[str, Any]:
        return {
            "method": self.method,
            "dial": self.dial,
            **asdict(self.prediction),
            "truncated": self.truncated,
            "windows": self.windows,
            "tokens": self.tokens,
            "joined": self.joined,
            "last_layers": self.last_layers,
            "lives": self.lives.int().tolist(),
            "frozen": self.frozen.int().tolist(),
            "token_scores": [[None if score != score else score for score in row] for row in self.scores.tolist()],
            "depths": self.depths,
            "exits": self.exits,
            "compared": [{what: asdict(each) for what, each in layer.items()} for layer in self.compared],
        }


class Watcher(Silent):
    """Decides as another decider, on a batch of one sequence, and records what happens."""

    points = frozenset({"before", "between", "after"})

    def __init__(self, watched: Decider, n_layers: int, n_tokens: int) -> None:
        super().__init__(watched.exits)
        self.watched, self.restore = watched, watched.restore
        self.lives = torch.zeros(n_layers + 1, n_tokens, dtype=torch.bool)
        self.lives[0] = True
        self.frozen = torch.zeros(n_layers, n_tokens, dtype=torch.bool)
        self.scores = torch.full((n_layers, n_tokens), torch.nan, dtype=torch.float64)
        self.depths: list[int] | None = None
        self.exit_logits: dict[int, Tensor] = {}
        self.compared: list[dict[str, Comparison]] = [{} for _ in range(n_layers)]

    def own_head(self) -> OwnHead | None:
        return self.watched.own_head()

    def decide(self, state: State) -> Decision:
        if "exit_logits" in state.providers:
            state.providers["exit_logits"] = partial(self._overhear, state.layer, state.providers["exit_logits"])
        decision = ask(self.watched, state)
        position = state.position.cpu()
        if self.depths is None and decision.depth is not None:  # such methods drop nothing: all tokens are live
            self.depths = decision.depth.tolist()
        if decision.score is not None:
            self.scores[state.layer - 1, position] = decision.score.cpu().double()
        if decision.compared is not None:
            self.compared[state.layer - 1][decision.compared.what] = self._noted(decision.compared, state)
        if decision.skip is not None and bool(decision.skip[0]):  # the tokens pass through it unchanged
            self.lives[state.layer, position] = self.frozen[state.layer - 1, position] = True
        if state.point == "between":  # asked in every layer that runs
            self.frozen[state.layer - 1, position] = state.frozen.cpu()
            stays = torch.ones_like(state.protected)
            if decision.drop is not None:
                stays = ~decision.drop | state.protected
            self.lives[state.layer, position] = stays.cpu()
        return decision

    def _noted(self, compared: Compared, state: State) -> Comparison:
        values, bound = numbers(compared)
        if state.point == "after":
            return Comparison(values[0], bound)
        by_token: list[float | None] = [None] * self.lives.shape[1]
        for position, value in zip(state.position.tolist(), values, strict=True):
            by_token[position] = value
        return Comparison(by_token, bound)

    def _overhear(self, layer: int, ask: Any) -> Tensor:
        logits: Tensor = ask()
        self.exit_logits[layer] = logits
        return logits


def numbers(compared: Compared) -> tuple[list[float], float]:
    """The values, and the bound of the first; logits as probabilities."""
    value, bound = compared.value.double(), compared.bound[:1].double()
    if compared.logits:
        value, bound = value.sigmoid(), bound.sigmoid()
    return value.tolist(), float(bound)


def watch(model: AdaptiveModel, inputs: Inputs, dial: float | None) -> Watcher:
    """Run one sequence with the model's method and record it."""
    watcher = Watcher(model.method, model.backbone.n_layers, inputs.input_ids.shape[1])
    model.packed.run(inputs.to(model.encoder.device), watcher, model.dials_of(dial, 1), keep_hidden=True)
    return watcher


def explain(model: AdaptiveModel, text: Text, dial: float | None = None) -> Explanation:
    """Answer one input and record what happens to each token (of a long context, to those of its first window)."""
    parts = model.task.check_input(text)
    dial = model.dial if dial is None else dial
    encoded = model.encode([parts])
    (inputs,) = batches(encoded.features[:1], model.tokenizer.pad_token_id, 1)
    return watched(model, encoded, watch(model, inputs, dial), model.predict(text, dial), dial)


def watched(
    model: AdaptiveModel, encoded: Encoded, watcher: Watcher, prediction: Prediction, dial: float, **other: Any
) -> Explanation:
    """What a watcher has seen of the one input that was encoded."""
    parts = encoded.texts[0]
    answers = {layer: exit_answer(model, logits, encoded) for layer, logits in watcher.exit_logits.items()}
    names = model.tokenizer.convert_ids_to_tokens(encoded.features[0]["input_ids"])
    tokens, joined = pieces(names, parts, model.task.origins(model.tokenizer, parts, model.max_length))
    return Explanation(
        tokens=tokens,
        joined=joined,
        lives=watcher.lives,
        frozen=watcher.frozen,
        scores=watcher.scores,
        depths=watcher.depths,
        exits=[answers.get(layer) for layer in range(1, model.backbone.n_layers + 1)],
        compared=watcher.compared,
        prediction=prediction,
        method=model.method.name,
        dial=float(dial),
        truncated=encoded.truncated > 0,
        windows=len(encoded.features),
        **other,
    )


def exit_answer(model: AdaptiveModel, logits: Tensor, encoded: Encoded) -> dict[str, float]:
    """[1, C] -> the probability of every label; for regression the value, under ''."""
    (answer,) = model.task.decode(logits, encoded)
    assert isinstance(answer, LabelPrediction)  # exits answer sequences
    return answer.probabilities or {"": float(answer.label)}


def pieces(names: list[str], texts: tuple[str, ...], found: list[Origin] | None) -> tuple[list[str], list[bool]]:
    """Readable tokens: as in the text, special ones by their `names`; and whether each continues the word of the one
    before. Without origins, WordPiece's own marks are used."""
    if found is None:
        return [name.removeprefix("##") for name in names], [name.startswith("##") for name in names]
    tokens = [
        ("" if place.side is None else texts[place.side][place.start : place.end].strip()) or name
        for name, place in zip(names, found, strict=True)
    ]
    words = [(place.side, place.word) for place in found]
    joined = [now == before and None not in now for before, now in pairwise([(None, None), *words])]
    return tokens, joined


def visible(token: str) -> str:
    """The token with invisible characters (control characters, direction marks) written out."""
    return "".join(sign if sign.isprintable() else f"\\u{ord(sign):04x}" for sign in token) or "␣"
