"""What each replay is worth, on real rollouts: the table of `benches.fidelity`, smaller."""

from benches.fidelity import table, write_scaled
from shmrl.config import TinyModel


def test_replay_removes_what_it_should(tmp_path):
    shape = TinyModel(layers=3, hidden=32, heads=2, head_dim=16, moe_intermediate=32, initializer_range=0.02)
    free, replayed, biased, exact = table(write_scaled(tmp_path / "model", shape), count=24, tokens=(16, 32))
    assert free.flipped > 0.005
    assert free.kl > 5 * replayed.kl
    assert biased.ratio < 0.95  # every ratio carries the kept mass
    assert abs(exact.ratio - 1) < 1e-4
    assert exact.kl <= 1e-6
    assert exact.flipped == 0.0
