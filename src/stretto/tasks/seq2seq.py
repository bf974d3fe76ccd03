"""A text for a text: translation, or anything else that can be learned from pairs of texts.

Answers are `Text`s, written token by token, so logits exist in training only: [B, T, V] for the T tokens of the right
texts. Scores are sacreBLEU's BLEU and chrF in [0, 1], on text as it is (cased, detokenised).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor
from torch.nn.functional import cross_entropy

from stretto.data.columns import Translations
from stretto.data.dataset import Form
from stretto.data.labels import Given
from stretto.data.tokenise import CHUNK, IGNORED, Encoded, Origin, encode, origins
from stretto.engine.written import Text
from stretto.errors import StrettoError
from stretto.tasks import metrics
from stretto.tasks.base import Prediction, Task, kl


@dataclass(frozen=True)
class TextPrediction(Prediction):
    """`depth` is the average exit: decoder blocks that a token went through."""

    text: str
    score: float
    """Log-probability of the text; with beam search divided by its length."""

    @property
    def summary(self) -> str:
        return self.text


class Seq2Seq(Task):
    name: ClassVar[str] = "seq2seq"
    form: ClassVar[Form] = Form(Translations, Given)
    answers = "text"
    architecture: ClassVar[str | tuple[str, ...]] = ("ForConditionalGeneration", "MTModel")
    auto_class: ClassVar[str] = "AutoModelForSeq2SeqLM"
    pipeline_tag: ClassVar[str] = "translation"
    example: ClassVar[str] = '"some text"'
    main_metric = "bleu"

    def __init__(self, label_names: Sequence[str] = (), *, label_smoothing: float = 0.1) -> None:
        super().__init__([])
        if not 0 <= label_smoothing < 1:
            raise StrettoError(f"Expected label_smoothing from 0 to below 1, got {label_smoothing}. Try 0.1.")
        self.label_smoothing = label_smoothing

    @property
    def outputs(self) -> str:
        return "texts"

    def settings(self) -> dict[str, Any]:
        return {"label_smoothing": self.label_smoothing}

    # ---- from texts to features and back

    def parts_of(self, text: Any) -> tuple[str, ...]:
        if isinstance(text, str):
            return (text,)
        if isinstance(text, tuple) and len(text) == 1 and isinstance(text[0], str):
            return text
        raise StrettoError(f"Expected one text, got {text!r:.80}. Pass a string.")

    def encode(
        self, tokenizer: Any, texts: Sequence[tuple[str, ...]], max_length: int, labels: Sequence[Any] | None = None,
        *, words: bool = False,
    ) -> Encoded:  # fmt: skip
        source = encode(tokenizer, texts, max_length, words=words)
        keep = ("input_ids", "attention_mask", "word")  # T5 and BART have no token types
        features = [{name: values for name, values in one.items() if name in keep} for one in source.features]
        targets = None if labels is None else targets_of(tokenizer, labels, max_length)
        return Encoded(texts, features, source.truncated, source.example_of, targets)

    def origins(self, tokenizer: Any, texts: tuple[str, ...], max_length: int) -> list[Origin] | None:
        return origins(tokenizer, texts, max_length)

    def decode(self, logits: Any, encoded: Encoded) -> list[TextPrediction]:
        return [TextPrediction(written.text, written.score or 0.0) for written in texts_in(logits)]

    def scores(self, logits: Any, encoded: Encoded, labels: Sequence[Any]) -> dict[str, float]:
        """BLEU and chrF, and the average exit over all tokens."""
        written = texts_in(logits)
        exits = [block for text in written for block in text.exits]
        scores = metrics.translation([text.text for text in written], list(labels))
        return {**scores, "average_exit": sum(exits) / max(1, len(exits))}

    def signatures(self) -> dict[str, str]:
        return metrics.translation_signatures()

    # ---- in training

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        """[B], scaled so that their mean is the mean over all tokens of the batch; with label smoothing."""
        tokens = cross_entropy(
            logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="none",
            label_smoothing=self.label_smoothing,
        )  # fmt: skip
        return per_text(tokens.view(labels.shape), labels)

    def distillation(self, student: Tensor, teacher: Tensor, labels: Tensor) -> Tensor:
        return per_text(kl(teacher, student) * (labels != IGNORED), labels)

    def right_logit(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Summed over the tokens of the text."""
        of_label = logits.gather(2, labels.clamp(min=0).unsqueeze(2)).squeeze(2)
        return (of_label * (labels != IGNORED)).sum(dim=1)

    def hf_config(self) -> dict[str, Any]:
        return {}


def per_text(tokens: Tensor, labels: Tensor) -> Tensor:
    """[B, T] of tokens (0 where there is none) -> [B], whose mean is the mean over tokens."""
    return tokens.sum(dim=1) * len(labels) / (labels != IGNORED).sum().clamp(min=1)


def targets_of(tokenizer: Any, labels: Sequence[str], max_length: int) -> list[list[int]]:
    """The tokens of right texts, the end token last."""
    found: list[list[int]] = []
    for start in range(0, len(labels), CHUNK):
        batch = tokenizer(text_target=list(labels[start : start + CHUNK]), verbose=False)["input_ids"]
        found += [tokens if len(tokens) <= max_length else [*tokens[: max_length - 1], tokens[-1]] for tokens in batch]
    return found


def texts_in(logits: Any) -> Sequence[Text]:
    if isinstance(logits, Sequence) and all(isinstance(text, Text) for text in logits):
        return logits
    raise StrettoError("Expected texts to read, got logits. Run the model, which writes them.")
