"""What a host gives a run: the arena, the token, the socket directory (`host.py`), and free ports (`ports.py`)."""
