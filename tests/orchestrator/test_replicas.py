"""Which replica an episode goes to, and what remains when one is lost."""

from shmrl.orchestrator.replicas import Place, Replica, Replicas


def replicas(count):
    return Replicas("a", [Replica(None, Place(f"tcp://10.0.0.{n}:5000", f"node{n}")) for n in range(1, 1 + count)])


def test_groups_go_where_the_fewest_episodes_are_in_flight_and_stay_there():
    both = replicas(2)
    one, two = both.every
    assert [both.take("g0", 1), both.take("g1", 1), both.take("g0", 1), both.take("g0", 1)] == [one, two, one, one]
    assert (one.inflight, two.inflight) == (3, 1)
    assert both.take("g2", 4) is two
    for _ in range(3):
        both.give_back(one, "g0", 1)
    assert (one.inflight, two.inflight) == (0, 5)
    assert both.take("g0", 1) is one  # the fewest again: nothing of the group was left


def test_a_group_that_shares_its_prompt_stays_until_it_leaves():
    both = replicas(2)
    one, two = both.every
    first = both.take("g0", 1, stays=True)
    both.give_back(first, "g0", 1)
    both.take("g1", 1)
    both.take("g2", 1)
    assert (first, both.take("g0", 1, stays=True)) == (one, one)
    both.give_back(one, "g0", 1)
    both.leave("g0")
    assert both.take("g0", 1) is two if one.inflight > two.inflight else True


def test_what_a_lost_replica_had_goes_elsewhere_and_the_last_one_cannot_be_lost():
    both = replicas(2)
    one, two = both.every
    assert both.take("g0", 1, stays=True) is one
    assert both.lose(one, "it died")
    assert both.lose(one, "it died")  # told by every request it had
    assert both.take("g0", 1, stays=True) is two
    assert not both.lose(two, "it died")
    assert both.alive == [two]
