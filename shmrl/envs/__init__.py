"""Bundled environments and how an environment is found by name (`registry.py`). Runs in the env workers."""
