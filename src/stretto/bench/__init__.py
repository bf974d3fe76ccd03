"""Benchmarks of stretto itself: `stretto bench …`."""
