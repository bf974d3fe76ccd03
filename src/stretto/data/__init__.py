"""From a file or the hub to batches of tensors.

sources (files to rows) → columns and records (rows to examples) → labels and dataset (examples to label numbers) →
tokenise (texts to padded batches). `words` and `wordpiece` define what a word is.
"""

from stretto.data.columns import Columns, Gold
from stretto.data.dataset import Dataset, Form, by_length, divide, load, sample, split_off
from stretto.data.records import Record, read

__all__ = ["Columns", "Dataset", "Form", "Gold", "Record", "by_length", "divide", "load", "read", "sample", "split_off"]
