"""Every way on which a block leaves a run, and the tests that count blocks on it."""

import re

import pytest

from tests.support.named import source_of

PATHS = {
    "filtered: a group of equal rewards": (
        "orchestrator/test_sinks.py::test_a_group_of_equal_rewards_leaves_nothing_and_a_batch_of_them_is_skipped",
    ),
    "pruned: an advantage of zero within a group": (
        "orchestrator/test_sinks.py::test_advantages_reach_every_branch_and_zero_ones_are_released",
    ),
    "dropped: too few of a group succeeded": (
        "orchestrator/test_dispatcher.py::"
        "test_a_group_goes_on_without_a_failed_episode_and_is_dropped_when_one_is_left",
        "orchestrator/test_dispatcher.py::test_a_success_in_every_group_does_not_hide_that_all_are_dropped",
        "orchestrator/test_dispatcher.py::test_a_group_its_environment_scores_is_one_request",
    ),
    "dropped: a group was given up for want of room": (
        "orchestrator/test_room.py::test_the_youngest_group_is_given_up_when_the_estimate_was_too_low",
    ),
    "stale: in the queue, and in flight": (
        "orchestrator/test_sinks.py::test_lag_is_counted_from_the_first_token_when_it_ships",
        "orchestrator/test_dispatcher.py::test_an_episode_that_must_be_stale_is_cancelled_and_its_group_refilled",
    ),
    "untrained: nothing was sampled": ("orchestrator/test_sinks.py::test_a_sample_without_sampled_tokens_is_released",),
    "truncated away": (
        "orchestrator/test_ledger.py::test_truncation_gives_back_what_only_the_rest_used",
        "orchestrator/test_sinks.py::test_what_is_cut_away_and_what_has_nothing_left_to_train_is_given_back",
    ),
    "refused on arrival: no number, an old policy, a lost sibling": (
        "orchestrator/test_dispatcher.py::test_a_reward_that_is_no_number_is_a_failure",
        "orchestrator/test_dispatcher.py::test_an_engine_that_says_it_kept_old_weights_ends_the_run",
        "orchestrator/test_dispatcher.py::test_successes_of_a_group_whose_failures_end_the_run_are_released",
        "orchestrator/test_ledger.py::test_an_episode_that_lost_a_block_keeps_none",
        "orchestrator/test_ledger.py::test_what_others_share_outlives_an_episode_that_lost_a_block",
    ),
    "returned late": (
        "orchestrator/test_dispatcher.py::test_replies_that_return_after_their_group_was_dropped_are_released",
        "orchestrator/test_dispatcher.py::test_128_groups_of_which_3_raise_and_1_hangs",
    ),
    "cancelled": (
        "env/test_pool.py::test_cancelled_episodes_end_and_the_others_finish",
        "env/test_rollouts.py::test_a_cancelled_episode_gives_up_its_wait_for_space",
    ),
    "abandoned after the reply": ("env/test_pool.py::test_a_reply_that_nobody_claims_is_freed",),
    "failed half-way through keep": ("env/test_rollouts.py::test_siblings_are_freed_when_one_branch_does_not_fit",),
    "a branch that does not encode": (
        "env/test_rollouts.py::test_siblings_are_freed_when_one_branch_does_not_encode",
        "env/test_rollouts.py::test_failures_are_data_and_leave_nothing",
    ),
    "evaluated": (
        "orchestrator/test_sinks.py::test_an_evaluation_keeps_scores_and_releases_every_block",
        "env/test_rollouts.py::test_an_evaluation_episode_brings_messages_and_keeps_nothing",
    ),
    "demonstrated: the warm-up": (
        "orchestrator/test_run.py::test_the_warm_up_comes_first_and_its_samples_have_weight_only",
    ),
    "trained": (
        "orchestrator/test_ledger.py::test_a_shipped_block_outlives_its_readers_until_the_step_is_durable",
        "orchestrator/test_ledger.py::test_a_context_parallel_group_reads_the_same_blocks",
        "orchestrator/test_run.py::test_three_steps_two_sources_one_evaluation_and_nothing_left",
        "trainer/test_step.py::test_exact_on_policy",
    ),
    "trained, and shared or retained": (
        "orchestrator/test_ledger.py::test_a_shared_prefix_is_freed_with_its_last_sample",
        "orchestrator/test_ledger.py::test_a_block_of_two_retained_steps_is_freed_when_the_last_is_let_go",
    ),
    "a group's prompt, whose episodes are requests of their own": (
        "env/test_shared_rows.py::test_16_requests_of_one_group_store_46_000_rows_over_two_workers",
        "env/test_shared_rows.py::test_what_no_reply_brought_to_the_client_is_freed_with_the_last_request",
        "env/test_shared_rows.py::test_requests_of_a_group_that_end_while_they_are_stored_leave_nothing",
        "env/test_shared_rows.py::test_a_worker_killed_while_it_stores_the_prompt_leaves_it_to_the_next",
        "env/test_shared_rows.py::test_a_worker_killed_in_the_middle_of_a_group_takes_nothing_from_its_siblings",
        "orchestrator/test_episodes.py::test_a_prompt_stays_while_its_group_is_under_way",
    ),
    "trained on another node": (
        "node/test_copies.py::test_ranks_that_ask_at_once_cause_one_transfer_each_and_the_last_done_frees",
        "node/test_server.py::test_delete_is_done_by_a_reader_and_the_last_one_frees",
        "trainer/test_nodes.py::test_two_arenas_train_the_same_bytes_as_one",
    ),
    "lost, and dropped by the ranks": (
        "trainer/test_step.py::test_a_lost_block_leaves_the_loss",
        "trainer/test_nodes.py::test_a_block_lost_on_another_node_drops_its_micro_batch",
        "orchestrator/test_ledger.py::test_a_block_that_was_lost_before_it_ships_is_the_ranks_to_drop",
        "orchestrator/test_ledger.py::test_a_block_an_operator_discarded_is_no_error",
    ),
    "shutdown: drained, and at once": (
        "orchestrator/test_run.py::test_a_signal_drains_and_a_resumed_run_goes_on_with_the_same_servers",
        "orchestrator/test_run.py::test_the_second_signal_stops_at_once",
        "orchestrator/test_run.py::test_masks_that_never_come_stop_the_run_at_the_first_sample",
        "orchestrator/test_sinks.py::test_a_batch_by_tokens_is_cut_when_they_are_together",
    ),
    "the death of an env worker": (
        "env/test_pool.py::test_a_killed_worker_fails_its_requests_and_is_replaced",
        "env/test_rollouts.py::test_what_a_killed_worker_had_stored_is_freed",
    ),
    "the death of an env server": ("env/test_server.py::test_a_signal_leaves_nothing",),
    "the death of a node server": (
        "node/test_copies.py::test_a_node_server_killed_and_started_again_adopts_its_copies",
    ),
    "the loss of a node, with all that was armed and not fetched": (
        "orchestrator/test_arenas.py::test_a_lost_node_is_written_off_and_everything_there_is_gone",
        "orchestrator/test_nodes.py::test_a_replica_and_a_node_that_are_lost_take_only_themselves",
        "trainer/test_nodes.py::test_a_lost_node_costs_its_own_samples_alone",
    ),
    "the death of a rank, of the orchestrator, of the launcher": (
        "faults/test_kill.py::test_a_killed_role_ends_the_run_and_resume_finishes_it",
        "faults/test_kill.py::test_a_killed_launcher_leaves_nothing_and_resume_finishes_the_run",
    ),
    "any of these, in any order": (
        "faults/test_interleavings.py::test_whatever_happens_every_block_is_freed_once",
        "faults/test_interleavings.py::test_whoever_is_killed_every_block_is_freed_once",
    ),
    "none: what leaks is named, by tag and holder": (
        "launcher/test_run.py::test_a_block_that_is_left_fails_the_run_and_is_named",
        "orchestrator/test_leaks.py::test_blocks_that_nobody_released_fail_the_run_and_are_named",
    ),
}
COUNTS = re.compile(r"blocks|counts\(|freed|assert_nothing_left|PATHS|run\(processes")


@pytest.mark.parametrize("path", PATHS)
def test_it_has_tests_and_each_counts_blocks(path):
    assert [name for name in PATHS[path] if not COUNTS.search(source_of(name))] == []
