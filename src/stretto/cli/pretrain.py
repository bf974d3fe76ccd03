"""`stretto pretrain`: plain texts in, an encoder of our own architecture out."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from stretto.cli.guard import data_name
from stretto.cli.options import Delimiter, Json, Split
from stretto.cli.output import STDOUT, resumable, say, write_json
from stretto.cli.settings import config_types, parse, training_types
from stretto.cli.streams import without_panics
from stretto.cli.train import TrainVerb, check_arguments
from stretto.errors import StrettoError, counted
from stretto.training.processes import is_main_process

if TYPE_CHECKING:
    from stretto.data import Dataset

EXAMPLES = """
stretto pretrain corpus.txt my-encoder --vocab-size 8000                   # also learns a WordPiece tokenizer
stretto pretrain corpus.txt.gz my-encoder --tokenizer bert-base-uncased
stretto pretrain articles.jsonl my-encoder --text body --vocab-size 8000 --cased --max-length 256
stretto pretrain corpus.txt wide --vocab-size 8000 --hidden-size 256 --num-hidden-layers 12 --num-train-epochs 20
stretto pretrain corpus.txt my-encoder --vocab-size 8000 --no-relative     # an ablation
stretto train reviews.csv --model my-encoder --method alberta --output reviews-model

Further flags: the settings of the method alberta (`stretto methods alberta`), such as --no-revpc, and every name of
transformers.TrainingArguments, such as --num-train-epochs 5, --max-steps 1000, --learning-rate 5e-4,
--per-device-train-batch-size 64, --save-steps 100, --seed 1, --report-to tensorboard.
An interrupted run resumes when the same command is given again.
"""


class PretrainVerb(TrainVerb):
    """Takes the settings out of the command line: names of TrainingArguments, and of the method `alberta`."""

    def known(self) -> Mapping[str, Any]:
        return {**config_types("alberta"), **training_types()}


def pretrain(
    text_file: Annotated[
        str, Argument(metavar="TEXT", help="A text per line (.txt) or row (.jsonl, .csv); or .gz.", callback=data_name)
    ],
    output: Annotated[str, Argument(metavar="OUTPUT", help="Folder for the encoder.")],
    tokenizer: Annotated[str | None, Option(help="Folder or hub name with a tokenizer to use.")] = None,
    vocab_size: Annotated[int | None, Option(min=6, help="Train a WordPiece tokenizer with this many entries.")] = None,
    cased: Annotated[bool, Option("--cased", help="The trained tokenizer is case-sensitive.")] = False,
    text: Annotated[str | None, Option(help="Column of the text, if its name is unusual.")] = None,
    delimiter: Delimiter = None,
    split: Split = None,
    held_out: Annotated[float, Option(help="Part of the texts to measure perplexity on.")] = 0.05,
    max_length: Annotated[int, Option(min=1, help="Longest input in tokens; longer texts are split.")] = 128,
    hidden_size: Annotated[int, Option(min=1, help="Width.")] = 128,
    embedding_size: Annotated[int, Option(min=1, help="Width of the token embeddings.")] = 64,
    num_hidden_layers: Annotated[int, Option(min=1, help="Number of layers.")] = 9,
    num_hidden_groups: Annotated[int, Option(min=1, help="Groups of layers that share parameters.")] = 3,
    num_attention_heads: Annotated[int, Option(min=1, help="Attention heads.")] = 4,
    intermediate_size: Annotated[int, Option(min=1, help="Width of the FFN.")] = 512,
    max_relative_distance: Annotated[int, Option(min=1, help="Larger distances count as this one.")] = 32,
    absolute: Annotated[bool, Option("--absolute/--no-absolute", help="Absolute positions.")] = True,
    relative: Annotated[bool, Option("--relative/--no-relative", help="Relative positions.")] = True,
    gates: Annotated[bool, Option("--gates/--no-gates", help="Train the gates of the method alberta too.")] = True,
    overwrite: Annotated[bool, Option("--overwrite", help="Replace a finished encoder.")] = False,
    restart: Annotated[bool, Option("--restart", help="Discard an unfinished run at OUTPUT.")] = False,
    json: Json = None,
    settings: Annotated[list[str] | None, Option("--set", help="name=value.", hidden=True)] = None,
) -> None:
    """Pretrain an encoder (ALBERTa's own architecture) on plain text, as a masked language model.

    Some of the texts are held out. Perplexity is measured on their masked words, during and after training."""
    of_training, of_method = training_types(), config_types("alberta")
    loose = dict(pair.partition("=")[::2] for pair in settings or [])
    arguments = {name: parse(name, value, of_training[name]) for name, value in loose.items() if name in of_training}
    of_gates = {name: parse(name, value, of_method[name]) for name, value in loose.items() if name not in of_training}
    sizes: dict[str, Any] = {
        "hidden_size": hidden_size, "embedding_size": embedding_size, "num_hidden_layers": num_hidden_layers,
        "num_hidden_groups": num_hidden_groups, "num_attention_heads": num_attention_heads,
        "intermediate_size": intermediate_size, "max_position_embeddings": max_length,
        "max_relative_distance": max_relative_distance, "use_absolute": absolute, "use_relative": relative,
    }  # fmt: skip
    if (tokenizer is None) == (vocab_size is None):
        came = "both" if tokenizer else "neither"
        raise StrettoError(f"Expected either --tokenizer or --vocab-size, got {came}. Name one or train one.")
    output = str(Path(output))  # "out/" and "out" are one

    from transformers import set_seed

    from stretto.backbones.alberta_config import AlbertaConfig
    from stretto.backbones.alberta_model import AlbertaForMaskedLM
    from stretto.data import split_off
    from stretto.saving.folder import quiet_transformers
    from stretto.saving.place import locked
    from stretto.training.pretraining import DEFAULTS, make_gates
    from stretto.training.pretraining import pretrain as pretrain_model

    shape = AlbertaConfig(**sizes)  # unfit sizes are named before any work is done
    if of_gates and not gates:
        raise StrettoError(f"Expected no settings of gates with --no-gates, got {', '.join(of_gates)}. Leave them out.")
    if gates:
        make_gates(shape, **of_gates)
    check_arguments({**DEFAULTS, **arguments})
    seed = arguments.get("seed", DEFAULTS["seed"])
    work = Path(f"{output}.work")
    with locked(output, main=is_main_process()), quiet_transformers(), resumable(work):
        check_output(Path(output), overwrite)
        train_data, dev_data = split_off(read_texts(text_file, text, split, delimiter), held_out, seed)
        total = counted(len(train_data) + len(dev_data), "text")
        say(f"measuring perplexity on {len(dev_data)} of {total}, held out from training")
        clear_work(Path(output), work, restart)
        used = open_tokenizer(tokenizer, vocab_size, cased, train_data, work)
        set_seed(seed)
        model = AlbertaForMaskedLM(AlbertaConfig(vocab_size=len(used), pad_token_id=used.pad_token_id, **sizes))
        method = make_gates(model.config, **of_gates) if gates else None
        summary = pretrain_model(
            model, used, train_data, dev_data, output, gates=method, progress=is_main_process(), **arguments
        )
    if not is_main_process():
        return
    if json != STDOUT:
        print(
            f"Saved to {output}: {summary.parameters:,} parameters, {summary.vocabulary:,} tokens in its vocabulary.\n"
            f"Perplexity of masked words in {summary.held_out_texts} held-out texts: {summary.perplexity:.2f} "
            f"after {summary.steps} steps.\n\nTry:\n"
            f"  stretto train DATA.csv --model {output} --method alberta --output my-model"
        )
    if json is not None:
        from dataclasses import asdict

        from stretto.saving.versions import versions

        write_json(
            json, {"data": text_file, "output": output, **asdict(summary), "model": sizes, "versions": versions()}
        )


def check_output(output: Path, overwrite: bool) -> None:
    """A finished encoder is only replaced with --overwrite; anything else is never replaced."""
    from stretto.saving.place import refuse_finished
    from stretto.training.pretraining import SUMMARY

    if output.exists() and not (output / SUMMARY).exists() and (output.is_file() or any(output.iterdir())):
        raise StrettoError(
            f"Expected a new output folder, got '{output}', which has other content. Choose another name."
        )
    if not overwrite:
        refuse_finished(output, SUMMARY, "encoder")


def clear_work(output: Path, work: Path, restart: bool) -> None:
    """An unfinished run is resumed, or discarded with `restart`."""
    from stretto.saving.place import remove_work
    from stretto.training.plan import PLAN
    from stretto.training.pretraining import SUMMARY
    from stretto.training.processes import wait_for_all

    if is_main_process():
        remove_work(output, SUMMARY, work / PLAN, restart=restart)
        if any(work.glob("checkpoint-*")):
            say(f"resuming the unfinished run in {work}")
        else:
            (work / PLAN).unlink(missing_ok=True)  # it did not get anywhere
    wait_for_all()


def read_texts(source: str, column: str | None, split: str | None, delimiter: str | None) -> Dataset:
    """One text per example; blank ones are left out."""
    from stretto.data import Columns, Dataset, read

    records = read(source, columns=Columns(text=column, delimiter=delimiter), split=split, labelled=False)
    found = [((text,), record.where) for record in records for text in record.texts if text.strip()]
    if not found:
        raise StrettoError(f"{source}: expected texts, got blank lines only. Check that the file is complete.")
    return Dataset([texts for texts, _ in found], None, None, [where for _, where in found])


def open_tokenizer(name: str | None, vocab_size: int | None, cased: bool, data: Dataset, work: Path) -> Any:
    """The named tokenizer, or one trained on the texts (a resumed run finds it in `work`)."""
    from stretto.data.wordpiece import train_tokenizer
    from stretto.saving.digests import dataset_digest
    from stretto.saving.files import replacing_folder
    from stretto.saving.folder import load_tokenizer

    if name is not None:
        with without_panics():
            return load_tokenizer(name)
    assert vocab_size is not None
    learned = work / f"tokenizer-{vocab_size}{'-cased' if cased else ''}-{dataset_digest(data)}"
    if not learned.is_dir():
        say(f"training a tokenizer on {counted(len(data), 'text')}")
        with replacing_folder(learned) as temporary:
            train_tokenizer([text for (text,) in data.texts], vocab_size, cased=cased).save_pretrained(temporary)
    found = load_tokenizer(str(learned))
    if len(found) > vocab_size:
        say(f"the tokenizer has {len(found)} entries, not {vocab_size}: every character of the texts takes one or two")
    return found
