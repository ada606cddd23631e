"""The embedded engine: continuous batching over a transformers model, served with vLLM's HTTP routes and encodings.

Runs in the inference process only; everything in here may import torch.
"""
