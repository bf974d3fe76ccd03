"""Small random models of every architecture, a small tokenizer, and random padded batches."""

from __future__ import annotations

import copy
import dataclasses
import functools
import random
from typing import Any

import torch
import transformers
from patchwork import FARTHEST, Patchwork, register
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import AutoConfig, PreTrainedTokenizerFast

from stretto.backbones import Backbone, backbone_for
from stretto.data.tokenise import NO_WORD
from stretto.data.words import WordTable, word_keys
from stretto.methods import METHODS
from stretto.state import Inputs
from stretto.tasks import Classification, Span, Tokens

register()

#: Methods that can label a sequence: those of a decoder have tests of their own.
LABELLING = [name for name in METHODS if METHODS[name].needs.met_by(Classification)]
#: Every model type.
ARCHITECTURES = ("bert", "roberta", "xlm-roberta", "camembert", "distilbert", "electra", "albert", "mpnet", "alberta")
#: One of each backbone class: for tests of methods and engines, which see the class and not the name.
BACKBONE_CLASSES = tuple(name for name in ARCHITECTURES if name not in ("xlm-roberta", "camembert"))
#: The same and the test architecture that has all that a spec can say.
STACKS = (*BACKBONE_CLASSES, "patchwork")

WORDS = (
    "a an the this that it movie film plot story actor scene good great fine bad dull poor never not very "
    "really quite was is were what who where when how many one two three city man country . , ! ?"
).split()
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
VOCABULARY = len(SPECIAL) + len(WORDS)


def tiny_config(model_type: str, n_labels: int = 3, n_layers: int = 4) -> Any:
    sizes: dict[str, Any] = {
        "hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": n_layers, "intermediate_size": 64,
        "vocab_size": VOCABULARY, "max_position_embeddings": 70, "num_labels": n_labels, "pad_token_id": 0,
    }  # fmt: skip
    if model_type == "distilbert":
        sizes.update(dim=32, n_heads=4, n_layers=n_layers, hidden_dim=64)
    if model_type in ("electra", "albert", "alberta"):
        sizes.update(embedding_size=16)
    if model_type in ("albert", "alberta"):
        sizes.update(num_hidden_groups=2)
    if model_type == "alberta":
        sizes.update(max_relative_distance=FARTHEST)
    if model_type == "mpnet":
        sizes.update(pad_token_id=1, relative_attention_num_buckets=32)
    if uses_types(model_type):
        sizes.update(type_vocab_size=2)
    return AutoConfig.for_model(model_type, **sizes)


@functools.cache
def tiny_encoder(model_type: str, n_labels: int = 3, n_layers: int = 4, head: str = "SequenceClassification") -> Any:
    """A random model with weights large enough that layers and positions matter."""
    torch.manual_seed(0)
    model = getattr(transformers, f"AutoModelFor{head}").from_config(tiny_config(model_type, n_labels, n_layers))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.15)
    return model.eval()


def tiny_backbone(
    model_type: str, n_labels: int = 3, n_layers: int = 4, head: str = "SequenceClassification"
) -> Backbone:
    encoder = tiny_encoder(model_type, n_labels, n_layers, head)
    return Patchwork(encoder) if model_type == "patchwork" else backbone_for(encoder)


def random_inputs(lengths: list[int], seed: int = 0, *, side: str = "right", types: bool = True) -> Inputs:
    """A padded batch of random tokens. A sequence's tokens depend on `seed` and its index, not on the padding.

    Every token is a word; the first of each sequence is none, as [CLS]."""
    columns = max(lengths)
    ids = torch.zeros(len(lengths), columns, dtype=torch.long)
    mask, token_types = torch.zeros_like(ids), torch.zeros_like(ids)
    for i, length in enumerate(lengths):
        generator = torch.Generator().manual_seed(1000 * seed + i)
        where = slice(0, length) if side == "right" else slice(columns - length, columns)
        ids[i, where] = torch.randint(len(SPECIAL), VOCABULARY, (length,), generator=generator)
        mask[i, where] = 1
        token_types[i, where] = (torch.arange(length) > length // 2).long()
    inputs = Inputs(ids, mask, token_types if types else None)
    word = torch.where(mask.bool() & (inputs.positions > 0), inputs.positions, NO_WORD)
    return dataclasses.replace(inputs, notes={"word": word, "word_key": word_keys(ids, word)})


def give_table(method: Any) -> Any:
    """Random entries for most words of the vocabulary, if the method has a table of words."""
    table = getattr(method, "table", getattr(getattr(method, "scores", None), "table", None))
    if isinstance(table, WordTable):
        ids = torch.arange(len(SPECIAL), VOCABULARY).unsqueeze(1)
        ids = ids[ids.squeeze(1) % 9 > 0]  # the others have not been seen
        keys, order = word_keys(ids, torch.zeros_like(ids)).squeeze(1).sort()
        generator = torch.Generator().manual_seed(11)
        count, width = len(keys), table.values.shape[1]
        values = 1 + torch.randint(0, 4, (count, width), generator=generator).float()
        table.fill(keys, ids[order], torch.ones(count), values)
    return method


def make(name: str, backbone: Backbone, task: Any = None, **settings: Any) -> Any:
    """A method with weights strong enough that exits disagree."""
    from stretto.methods import METHODS, Shape
    from stretto.tasks import Classification

    task = task or Classification([f"label {i}" for i in range(backbone.n_labels)])
    if any(field.name == "max_tokens" for field in dataclasses.fields(METHODS[name].Config)):
        settings.setdefault("max_tokens", 16)  # the texts here are short
    torch.manual_seed(3)
    shape = Shape(backbone.d, backbone.n_layers, backbone.n_labels)
    method = give_table(METHODS[name](METHODS[name].Config(**settings), shape, task))
    with torch.no_grad():
        for parameter in method.parameters():
            parameter.normal_(std=0.4)
    return method.eval()


def uses_types(model_type: str) -> bool:
    return model_type in ("bert", "electra", "albert", "alberta")


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    vocabulary = {token: index for index, token in enumerate(SPECIAL + WORDS)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, model_max_length=64,
        pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]",
    )  # fmt: skip


def tiny_model(
    method: str = "deebert", model_type: str = "bert", n_labels: int = 2, task: Any = None, n_layers: int = 4,
    **settings: Any,
) -> Any:  # fmt: skip
    """A random AdaptiveModel of its own (not shared with other tests); without a `task` for reviews."""
    from stretto.methods import METHODS, Shape
    from stretto.model import AdaptiveModel
    from stretto.tasks import Classification, Regression

    if task is None:
        task = Classification(["bad", "good", "so-so"][:n_labels]) if n_labels > 1 else Regression()
    head = task.auto_class.removeprefix("AutoModelFor")
    encoder = copy.deepcopy(tiny_encoder(model_type, task.num_labels, n_layers, head))
    encoder.config.update(task.hf_config())
    backbone = backbone_for(encoder)
    torch.manual_seed(7)
    shape = Shape(backbone.d, backbone.n_layers, backbone.n_labels, mask_id=SPECIAL.index("[UNK]"))
    built = give_table(METHODS[method](METHODS[method].Config(**settings), shape, task))
    return AdaptiveModel(encoder, tiny_tokenizer(), built, task).eval()


def tiny_reviews(n: int = 64, seed: int = 0) -> Any:
    """A learnable task: a text is good if it says so more often than bad."""
    from stretto.data import Dataset

    dice = random.Random(seed)
    texts, labels = [], []
    for index in range(n):
        good = index % 2
        words = dice.choices(WORDS, k=dice.randint(2, 12)) + ["good" if good else "bad"] * dice.randint(1, 3)
        dice.shuffle(words)
        texts.append((" ".join(words),))
        labels.append(good)
    return Dataset(texts, labels, ["bad", "good"], [f"made:{i + 1}" for i in range(n)])


TAGS = ["O", "B-ask", "I-ask", "B-place"]
TAG_OF = {"how": "B-ask", "many": "I-ask", "city": "B-place", "country": "B-place"}


def tiny_tagging(n: int = 64, seed: int = 0) -> Any:
    """A learnable task: "how many" asks, cities and countries are places."""
    from stretto.data import Dataset

    dice = random.Random(seed)
    plain = [word for word in WORDS if word not in TAG_OF]
    texts, labels = [], []
    for _ in range(n):
        words = [
            word
            for _ in range(dice.randint(1, 8))
            for word in dice.choice([[dice.choice(plain)], ["how", "many"], ["city"], ["country"]])
        ]
        texts.append(tuple(words))
        labels.append([TAGS.index(TAG_OF.get(word, "O")) for word in words])
    return Dataset(texts, labels, TAGS, [f"made:{i + 1}" for i in range(n)], Tokens.form)


def tiny_questions(n: int = 64, seed: int = 0, *, no_answer: bool = False, longest: int = 12) -> Any:
    """A learnable task: how many? The number, and all "very" before it. With `no_answer` a third has no number."""
    from stretto.data import Dataset, Gold

    dice = random.Random(seed)
    plain = [word for word in WORDS if word not in ("one", "two", "three", "very")]
    texts, labels = [], []
    for index in range(n):
        words = dice.choices(plain, k=dice.randint(3, longest))
        place = dice.randrange(len(words) + 1)
        before = " ".join(words[:place]) + " " * (place > 0)
        answer = "" if no_answer and index % 3 == 0 else "very " * dice.randint(0, 2) + dice.choice(["one", "two"])
        texts.append(("how many ?", f"{before}{answer} {' '.join(words[place:])}"))
        labels.append((Gold(answer, len(before)),) if answer else ())
    return Dataset(texts, labels, None, [f"made:{i + 1}" for i in range(n)], Span.form)
