"""Benchmarks: what the engine makes of saved FLOPs."""
