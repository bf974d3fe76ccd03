"""Training: a method's stages, resumable, on `transformers.Trainer`. `run.train` is where it starts."""
