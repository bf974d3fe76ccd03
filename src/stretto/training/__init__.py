"""Training: a method's stages, resumable, on `transformers.Trainer`. Entry point: `run.train`."""

#: Prefix of the name of a model that is trained from scratch: scratch:marian.
SCRATCH = "scratch:"
