"""Requests and answers of the server as pydantic models. Its OpenAPI description is made from them.

`/predict` and `/info` have the form of text-embeddings-inference, with a few more fields.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

Text = Annotated[str, Field(max_length=10_000_000)]

#: One text, or two. More are refused by the route, with a better message than pydantic's.
Pair = Annotated[list[Text], Field(json_schema_extra={"maxItems": 2})]
Words = Annotated[list[Text], Field(min_length=1)]


class Given(BaseModel):
    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)


class MaxCost(Given):
    """A budget: the most expensive stored operating point that costs at most this."""

    max_cost: float = Field(gt=0, description="Fraction of the full model's FLOPs.")


class Options(Given):
    """Options of every request."""

    dial: float | None = Field(None, description="Trades score for cost. Default: the model's own.")
    budget: str | MaxCost | None = Field(
        None, description="Instead of a dial: the name of a stored budget, or the most it may cost."
    )
    truncate: bool = Field(True, description="Read only the beginning of a text that is too long; if false, refuse it.")
    deadline_ms: int | None = Field(
        None, gt=0, le=3_600_000, description="Answer within this time, or not at all (504). Default: the server's."
    )


class PredictRequest(Options):
    """One text, one pair, or a batch. A flat list of two strings is one **pair**, as in text-embeddings-inference; a
    batch of two texts is `[["a"], ["b"]]`."""

    inputs: Text | Pair | list[Pair]
    truncation_direction: Literal["Right", "Left", "right", "left"] = "Right"
    raw_scores: bool = Field(False, description="Scores before the softmax.")

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [{"inputs": "A fine film."}, {"inputs": [["A fine film."], ["Dull."]], "dial": 0.3}]
        }
    )


class Score(BaseModel):
    label: str
    score: float


class TokensRequest(Options):
    """A text, or a list of texts and of lists of words."""

    inputs: Text | list[Text | Words]


class AnswerRequest(Options):
    """A question and its context."""

    question: Text
    context: Text


class GenerateRequest(Options):
    """A text, or a list of texts."""

    inputs: Text | list[Text]


class ExplainRequest(Options):
    """One text, or a pair."""

    inputs: Text | Pair


class Took(BaseModel):
    depth: int = Field(description="Layers run.")
    cost: float = Field(description="Fraction of the full model's FLOPs.")


class Entity(BaseModel):
    type: str
    text: str
    start: int
    end: int
    score: float


class Tags(Took):
    words: list[str]
    tags: list[str]
    scores: list[float]
    entities: list[Entity]


class Candidate(BaseModel):
    text: str
    score: float
    start: int | None
    end: int | None


class SpanAnswer(Took):
    answer: str
    score: float
    start: int | None
    end: int | None
    best: list[Candidate]


class Written(BaseModel):
    text: str
    score: float = Field(description="Log-probability of the text; of beam search divided by its length.")
    depth: float = Field(description="Decoder layers that a token went through, on average.")
    cost: float = Field(description="Fraction of the full model's FLOPs.")


class Explained(Took):
    """The last layer of each token; see docs/explaining.md."""

    model_config = ConfigDict(extra="allow")

    method: str
    dial: float
    tokens: list[str]
    joined: list[bool]
    last_layers: list[int]
    lives: list[list[int]]
    exits: list[dict[str, float] | None]
    truncated: bool


class Point(BaseModel):
    """A measured operating point."""

    dial: float
    score: float | None
    cost: float
    depth: float
    name: str | None = Field(None, description="The name of a budget; use it as `budget`.")
    guaranteed: bool = False


class ModelInfo(BaseModel):
    name: str
    task: str
    method: str
    labels: list[str]
    dtype: str
    n_layers: int
    max_input_length: int
    dial: float
    dial_off: float
    dial_meaning: str
    promise: str = Field(description="What holds at the default dial: a guarantee, or an estimate.")
    pairs: bool | None = Field(description="Whether it takes pairs of texts; null: not known.")
    points: list[Point]


class Info(BaseModel):
    """The fields of text-embeddings-inference for the first model, and all models."""

    model_id: str
    model_dtype: str
    model_type: dict[str, Any]
    max_concurrent_requests: int
    max_input_length: int
    max_batch_tokens: int
    max_client_batch_size: int
    auto_truncate: bool
    version: str
    models: list[ModelInfo]


class ModelStats(BaseModel):
    """Counts of sequences: a text, or one of the windows of a long one."""

    accepted: int = Field(description="Accepted into the queue so far.")
    answered: int
    waiting: int
    live: int = Field(description="In the engine.")
    depths: list[int] = Field(description="Inputs that left after layer 1, 2, …")
    mean_cost: float | None


class Stats(BaseModel):
    """Live figures for the page; `/metrics` has more."""

    seconds: float = Field(description="Since the server started.")
    models: dict[str, ModelStats]


class Error(BaseModel):
    error: str
    error_type: Literal[
        "Empty", "Unauthorized", "NotFound", "TooLarge", "Validation", "WrongModel", "Overloaded", "Backend",
        "Unhealthy", "Deadline",
    ]  # fmt: skip
