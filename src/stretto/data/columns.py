"""Layouts: which columns of a source hold a task's inputs and labels, and what they may hold.

`Texts` for one text or a pair with a label, `Words` for the words of a sentence with their tags, `Questions` for a
question with its context and answers. The first row decides the columns. Every error names the line.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from stretto.data.sources import listed
from stretto.errors import StrettoError

TEXT_COLUMNS = ("text", "sentence", "review", "content", "question")
PAIR_COLUMNS = (
    ("text_a", "text_b"),
    ("sentence1", "sentence2"),
    ("premise", "hypothesis"),
    ("question1", "question2"),
    ("question", "sentence"),
)
LABEL_COLUMNS = ("label", "labels", "score", "category", "class", "target")
WORD_COLUMNS = ("tokens", "words")
SOURCE_COLUMNS = ("src", "source", "de", "text")
TARGET_COLUMNS = ("tgt", "target", "translation", "summary", "en", "reference")
TAG_COLUMNS = ("tags", "ner_tags", "labels", "pos_tags")

Label = str | int | float
Row = Mapping[str, Any]
Classes = Mapping[str, tuple[str, ...]]  # of the columns of class numbers


@dataclass(frozen=True)
class Columns:
    """Which columns to read; None means guess from the usual names.

    Tags: `text` holds the words and `label` their tags. Questions: `text` holds the question, `text_b` the context
    and `label` the answers."""

    text: str | None = None
    text_b: str | None = None
    label: str | None = None
    delimiter: str | None = None
    """Separator of the fields of a .csv or .tsv file; default: comma or tab."""


class Gold(NamedTuple):
    """A correct answer: a span of the context."""

    text: str
    start: int
    """Its first character."""


class Layout(ABC):
    """The columns of one source, for one task."""

    shared: ClassVar[int | None] = None
    """Index of the text that several examples share; such examples stay together (`split_off`)."""

    def __init__(self, source: str, names: Sequence[str], columns: Columns, classes: Classes, labelled: bool) -> None:
        self.source, self.names, self.labelled = source, names, labelled
        self.text_columns = self.find_texts(columns)
        rest = [name for name in names if name not in self.text_columns]
        self.label_column = self.find_label(rest, columns)
        self.classes = classes.get(self.label_column or "")

    @abstractmethod
    def find_texts(self, columns: Columns) -> tuple[str, ...]: ...

    @abstractmethod
    def find_label(self, names: Sequence[str], columns: Columns) -> str | None: ...

    @abstractmethod
    def texts(self, where: str, row: Row) -> tuple[str, ...]:
        """What the task reads, part by part."""

    @abstractmethod
    def label(self, where: str, row: Row, name: str, texts: tuple[str, ...]) -> Any:
        """What the model learns to answer, or None."""

    def checked(self, names: Sequence[str], name: str, flag: str) -> str:
        if name not in names:
            raise StrettoError(
                f"{self.source}: expected a column '{name}', got the columns {listed(names)}. Choose with {flag}."
            )
        return name

    def guessed(self, names: Sequence[str], guesses: Sequence[str], what: str, flag: str) -> str:
        """The column with one of the usual names; there must be exactly one."""
        found = [name for name in guesses if name in names]
        if len(found) == 1:
            return found[0]
        raise StrettoError(
            f"{self.source}: expected one column known to hold the {what}, got {' and '.join(found) or 'none'} among "
            f"the columns {listed(self.names)}. Name it with {flag} (in Python: Columns)."
        )


class Texts(Layout):
    """One text or a pair, and a word or a number."""

    def find_texts(self, columns: Columns) -> tuple[str, ...]:
        if columns.text is None and columns.text_b is not None:
            raise StrettoError(
                f"Expected --text together with --text-b, got only --text-b {columns.text_b}. Name both columns."
            )
        if columns.text is not None:
            first = self.checked(self.names, columns.text, "--text")
            return (first,) if columns.text_b is None else (first, self.checked(self.names, columns.text_b, "--text-b"))
        pairs = [pair for pair in PAIR_COLUMNS if set(pair) <= set(self.names)]
        paired = {name for pair in pairs for name in pair}
        guesses = [*pairs, *((name,) for name in TEXT_COLUMNS if name in self.names and name not in paired)]
        if not guesses and "tokens" in self.names:  # a text that is already split into words
            return ("tokens",)
        if len(guesses) == 1:
            return guesses[0]
        found = " and ".join("+".join(guess) for guess in guesses) or "none"
        raise StrettoError(
            f"{self.source}: expected one column (or pair) known to hold the text, got {found} among the columns "
            f"{listed(self.names)}. Name it with --text, and the other of a pair with --text-b (in Python: Columns)."
        )

    def find_label(self, names: Sequence[str], columns: Columns) -> str | None:
        if columns.label is not None:
            return self.checked(names, columns.label, "--label")
        if not self.labelled:
            return None
        if "label" in names:
            return "label"  # wins over the other names
        return self.guessed(names, LABEL_COLUMNS, "label", "--label")

    def texts(self, where: str, row: Row) -> tuple[str, ...]:
        return tuple(self.text(where, row, name) for name in self.text_columns)

    def text(self, where: str, row: Row, name: str) -> str:
        if isinstance(row.get(name), list):
            words = list_in(where, row, name, "words")
            return " ".join(text_in(where, {name: word}, name) for word in words)
        return text_in(where, row, name)

    def label(self, where: str, row: Row, name: str, texts: tuple[str, ...]) -> Label | None:
        return word_or_number(where, row.get(name), name, self.classes)


class Words(Layout):
    """The words of a sentence and their tags, as two lists of equal length. Unlabelled, a text is split at spaces."""

    def find_texts(self, columns: Columns) -> tuple[str, ...]:
        if columns.text_b is not None:
            raise StrettoError(f"Expected one column of words, got --text-b {columns.text_b} too. Leave it out.")
        if columns.text is not None:
            return (self.checked(self.names, columns.text, "--text"),)
        lists = any(name in self.names for name in WORD_COLUMNS)
        usual = WORD_COLUMNS if lists or self.labelled else TEXT_COLUMNS
        return (self.guessed(self.names, usual, "words", "--text"),)

    def find_label(self, names: Sequence[str], columns: Columns) -> str | None:
        if columns.label is not None:
            return self.checked(names, columns.label, "--label")
        if not self.labelled:
            return None
        return self.guessed(names, TAG_COLUMNS, "tags", "--label")

    def texts(self, where: str, row: Row) -> tuple[str, ...]:
        (name,) = self.text_columns
        value = row.get(name)
        if isinstance(value, str) and not self.labelled:
            return tuple(text_in(where, row, name).split())
        words = list_in(where, row, name, "words")
        return tuple(text_in(where, {name: word}, name) for word in words)

    def label(self, where: str, row: Row, name: str, texts: tuple[str, ...]) -> list[Label]:
        tags = list_in(where, row, name, "tags")
        if len(tags) != len(texts):
            raise StrettoError(
                f"{where}: expected a tag for each of {len(texts)} words, got {len(tags)} tags in '{name}'. "
                "Correct the row."
            )
        found = [word_or_number(where, tag, name, self.classes) for tag in tags]
        if None in found:
            raise StrettoError(
                f"{where}: expected a tag for each word in '{name}', got {tags[found.index(None)]!r:.60} at word "
                f"{found.index(None) + 1}. Fill it in."
            )
        return [tag for tag in found if tag is not None]


class Questions(Layout):
    """A question, its context, and its answers: [{text, start}], or SQuAD's {text: […], answer_start: […]}."""

    shared: ClassVar[int | None] = 1  # the context
    usual: ClassVar[tuple[str, str]] = ("question", "context")

    def find_texts(self, columns: Columns) -> tuple[str, ...]:
        question, context = columns.text or self.usual[0], columns.text_b or self.usual[1]
        return self.checked(self.names, question, "--text"), self.checked(self.names, context, "--text-b")

    def find_label(self, names: Sequence[str], columns: Columns) -> str | None:
        if columns.label is None and not self.labelled:
            return None
        return self.checked(names, columns.label or "answers", "--label")

    def texts(self, where: str, row: Row) -> tuple[str, ...]:
        return tuple(text_in(where, row, name) for name in self.text_columns)

    def label(self, where: str, row: Row, name: str, texts: tuple[str, ...]) -> tuple[Gold, ...] | None:
        value = row.get(name)
        if value is None:
            return None
        return tuple(gold(where, name, text, start, texts[1]) for text, start in answer_parts(where, name, value))


class Translations(Layout):
    """A text and the text that answers it."""

    def find_texts(self, columns: Columns) -> tuple[str, ...]:
        if columns.text_b is not None:
            raise StrettoError(f"Expected one column of texts, got --text-b {columns.text_b} too. Leave it out.")
        if columns.text is not None:
            return (self.checked(self.names, columns.text, "--text"),)
        return (self.guessed(self.names, SOURCE_COLUMNS, "texts to read", "--text"),)

    def find_label(self, names: Sequence[str], columns: Columns) -> str | None:
        if columns.label is not None:
            return self.checked(names, columns.label, "--label")
        if not self.labelled:
            return None
        return self.guessed(names, TARGET_COLUMNS, "texts to write", "--label")

    def texts(self, where: str, row: Row) -> tuple[str, ...]:
        (name,) = self.text_columns
        return (text_in(where, row, name),)

    def label(self, where: str, row: Row, name: str, texts: tuple[str, ...]) -> str:
        return text_in(where, row, name)


# ---- single values -----------------------------------------------------------------------------------------


def text_in(where: str, row: Row, name: str) -> str:
    value = row.get(name)
    if value is None:
        came = "null" if name in row else f"only the fields {listed(row)}"
        raise StrettoError(f"{where}: expected a text in '{name}', got {came}. Fill it in (an empty text is '').")
    if not isinstance(value, str):
        raise StrettoError(
            f"{where}: expected a text in '{name}', got {value!r:.60} ({type(value).__name__}). "
            "Write it as a string, or choose another column with --text."
        )
    return whole_text(value, f"{where}: expected Unicode text in '{name}'")


def whole_text(text: str, expected: str) -> str:
    """The text, unless it has half a surrogate pair: JSON can write one (\\ud83d), but no tokenizer accepts it."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise StrettoError(
            f"{expected}, got half a surrogate pair ({text[error.start]!a}) at character {error.start + 1}. "
            "Repair or remove it."
        ) from None
    return text


def word_or_number(where: str, value: Any, name: str, classes: tuple[str, ...] | None) -> Label | None:
    if isinstance(value, bool):
        return str(value).lower()
    if classes is not None and isinstance(value, int):
        return classes[value] if 0 <= value < len(classes) else None  # hidden test labels are -1
    if isinstance(value, str):
        return value.strip() or None
    if value is None or (isinstance(value, float) and math.isnan(value)):  # NaN: pandas' empty cell
        return None
    if isinstance(value, (int, float)):
        return value
    raise StrettoError(
        f"{where}: expected a word or a number in '{name}', got {value!r:.60} ({type(value).__name__}). "
        "Give each example one label, or choose another column with --label."
    )


def list_in(where: str, row: Row, name: str, what: str) -> list[Any]:
    value = row.get(name)
    if isinstance(value, (list, tuple)):
        return list(value)
    came = "nothing" if value is None else f"{value!r:.60} ({type(value).__name__})"
    raise StrettoError(
        f"{where}: expected a list of {what} in '{name}', got {came}. "
        "Write lists as .jsonl or .parquet; .csv and .tsv cannot hold them."
    )


def answer_parts(where: str, name: str, value: Any) -> list[tuple[Any, Any]]:
    """(text, start) of each answer, in either format."""
    if isinstance(value, dict) and {"text", "answer_start"} <= set(value):
        texts, starts = value["text"], value["answer_start"]
        if isinstance(texts, list) and isinstance(starts, list) and len(texts) == len(starts):
            return list(zip(texts, starts, strict=True))
    if isinstance(value, list) and all(isinstance(answer, dict) for answer in value):
        return [(answer.get("text"), answer.get("start", answer.get("answer_start"))) for answer in value]
    raise StrettoError(
        f'{where}: expected answers in \'{name}\' as [{{"text": …, "start": …}}] (an empty list for none), got '
        f"{value!r:.60}. Use this format in a .jsonl or .parquet file; .csv and .tsv cannot hold lists."
    )


def gold(where: str, name: str, text: Any, start: Any, context: str) -> Gold:
    if not isinstance(text, str) or not text or not isinstance(start, int) or isinstance(start, bool):
        raise StrettoError(
            f"{where}: expected answers in '{name}' with a text and the number of its first character, got "
            f"{text!r:.60} at {start!r:.20}. Correct it, or leave the list empty if there is no answer."
        )
    if start < 0 or context[start : start + len(text)] != text:
        there = context[max(start, 0) : max(start, 0) + len(text)]
        raise StrettoError(
            f"{where}: expected the answer '{text:.60}' at character {start} of the context, got '{there:.60}' there. "
            "Correct its start (characters count from 0)."
        )
    return Gold(text, start)
