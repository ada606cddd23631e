"""Inference: the HTTP client of an engine (no torch) and, in `embedded/`, an engine of our own with vLLM's routes."""
