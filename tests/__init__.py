"""Tests mirror shmrl/ room by room; what several rooms need is in `tests.support`."""
