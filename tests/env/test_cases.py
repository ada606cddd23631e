"""Faults that users of comparable systems met with servers and clients, and the tests that hold the right value.

A case names tests anywhere in the suite, and of each a piece of its checks, as in payload/test_cases.py.
"""

import pytest

from tests.support.named import checks_of

POOL, SERVER, PROTOCOL = (f"env/test_{room}.py::" for room in ("pool", "server", "protocol"))
SESSIONS, REMOTE = "env/sessions/test_sessions.py::", "env/sessions/test_remote.py::"
SUPERVISOR, NODE, FETCH = "launcher/test_supervisor.py::", "node/test_server.py::", "node/test_fetch.py::"
DISPATCHER, LINK, SINKS = (f"orchestrator/test_{room}.py::" for room in ("dispatcher", "link", "sinks"))

CASES = {
    "EN-01 requests of a dead worker": {
        POOL + "test_a_killed_worker_fails_its_requests_and_is_replaced": '["WorkerDied"] * 3',
        "env/test_rollouts.py::test_what_a_killed_worker_had_stored_is_freed": "(0, 1, 1)",
    },
    "EN-04 restart storms": {
        POOL + "test_a_worker_that_dies_at_start_ends_the_server_with_its_words": "died 3 times, restart_budget is 2",
        POOL + "test_good_replies_restore_the_restart_budget": '["restarts"] == 3',
    },
    "EN-05 health lies both ways": {
        POOL + "test_a_busy_worker_is_lagging_and_keeps_its_requests": "(await flying).success",
        POOL + "test_without_a_worker_the_server_is_alive_and_not_ready": "(True, 0, 1, [])",
        SESSIONS + "test_alive_is_not_ready": "(503, True, False)",
    },
    "EN-06 a port that was free": {
        SERVER + "test_servers_on_port_0_do_not_meet": "== 32",
        SERVER + "test_a_port_in_use_is_named_with_its_holder": "is in use by .*pid",
    },
    "EN-08 orphans": {
        SUPERVISOR + "test_kill_of_the_launcher_leaves_nothing": "137",
        SUPERVISOR + "test_an_exception_in_the_launcher_leaves_nothing": "the tick raised",
        SUPERVISOR + "test_a_signal_stops_with_its_number": "128 + number",
    },
    "EN-10 the client cancels": {
        POOL + "test_cancelled_episodes_end_and_the_others_finish": "len(results) == 9",
        POOL + "test_an_episode_that_is_cancelled_before_it_began_replies_too": '["sessions"] == 0',
        POOL + "test_a_worker_that_does_not_let_go_of_a_run_that_is_taken_over_is_ended": '["WorkerDied", "Cancelled"]',
    },
    "EN-12 a wait that loses messages": {
        LINK + "test_no_message_is_lost_to_a_wait_that_times_out": "10_000",
    },
    "EN-14 what msgpack cannot carry": {
        "test_wire.py::test_refused_with_its_path_and_the_next_message_goes_through": "match=path",
        "test_wire.py::test_nan_stays_nan": "math.isnan",
    },
    "EN-16 replies stop the loop": {
        "orchestrator/test_scale.py::test_a_thousand_replies_in_a_second": "2 << 20",  # times: benches/bench_replies.py
    },
    "EN-17 a task that is lost silently": {
        DISPATCHER + "test_128_groups_of_which_3_raise_and_1_hangs": '{"shipped": 124, "failed": 3, "timed_out": 1}',
    },
    "EN-18 silent retries": {
        FETCH + "test_a_server_that_stays_away_is_given_up_after_the_timeout": "Connection refused",
        FETCH + "test_a_broken_connection_is_resumed_behind_the_last_byte": "[3 << 20, 3 << 20, 3 << 20, 1 << 20]",
        REMOTE + "test_a_server_that_accepts_and_says_nothing_is_given_up": "no answer within",
        REMOTE + "test_the_first_refusal_is_told_with_the_sum": "len(told) == 1",
    },
    "EN-20 half-open sessions": {
        SESSIONS + "test_an_idle_session_is_closed_and_never_stepped_again": '["reset\\nclose\\n"] * 4',
        SESSIONS + "test_a_client_behind_a_cut_cable_frees_its_place": '["active_sessions"] == 0',
        SESSIONS + "test_the_kernel_asks_after_half_a_minute_whether_a_client_is_there": "<= 30",
        SESSIONS + "test_clients_that_vanish_while_the_environment_loads_hold_no_place": '["active_sessions"] == 0',
    },
    "EN-21 what readiness asks for": {
        SESSIONS + "test_alive_is_not_ready": '(503, {"status": "unhealthy"})',
    },
    "EN-22 another run's files": {
        "config/test_rundir.py::test_a_used_directory_is_refused_with_the_three_ways_out": "way in str(caught.value)",
    },
    "EN-23 staleness": {
        SINKS + "test_lag_is_counted_from_the_first_token_when_it_ships": '["stale"] == 2 - shipped',
        DISPATCHER + "test_an_episode_that_must_be_stale_is_cancelled_and_its_group_refilled": "(4, 4)",
    },
    "EN-25 a blocked file system": {
        "monitor/test_watchdog.py::test_what_blocks_is_said_and_ended": "rank 0 stalled",
        "monitor/test_watchdog.py::test_a_long_step_is_no_false_alarm": "trained",
        "trainer/test_step.py::test_a_rank_that_does_not_get_on_reading_says_so_and_ends": "rank 0 stalled",
    },
    "EN-27 channels without a token": {
        NODE + "test_without_the_token_every_request_is_401_and_changes_nothing": "401",
        NODE + "test_foreign_and_forged_ids_are_404_freed_ones_410_and_nothing_is_listed": "404",
        PROTOCOL + "test_garbage_gets_a_typed_error_and_the_next_request_works": '"ProtocolError"',
        PROTOCOL + "test_the_token_is_required": "wrong token",
        SESSIONS + "test_a_token_that_is_no_text_is_wrong": "401",
        "env/sessions/test_hosting.py::test_an_env_server_of_a_url_shows_its_token_nowhere": "token in text",
    },
    "EN-28 everyone starts at once": {
        POOL + "test_workers_are_loaded_a_few_at_a_time": "== 2",
    },
}


@pytest.mark.parametrize("case", CASES)
def test_it_has_tests_with_its_value(case):
    assert {name: value for name, value in CASES[case].items() if value not in checks_of(name)} == {}


def test_no_case_is_forgotten():
    numbers = "01 04 05 06 08 10 12 14 16 17 18 20 21 22 23 25 27 28"
    assert [case.split()[0] for case in CASES] == [f"EN-{number}" for number in numbers.split()]
