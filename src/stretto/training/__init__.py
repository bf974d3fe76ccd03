"""Training: a method's stages, resumable, on `transformers.Trainer`. `run.train` is where it starts."""

#: Begins the name of a model that starts from nothing: scratch:marian.
SCRATCH = "scratch:"
