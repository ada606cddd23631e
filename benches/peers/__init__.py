"""The same hand-over of blobs between two processes through shmrl and through what people use instead.

`python -m benches.peers` prints the tables. `peers.py` lists who takes part and each has a file of its own; `roles.py`
is what the two processes do, `hosts.py` where they run, `runner.py` the turns, `report.py` the tables and the picture.
"""
