"""Faults that users of comparable systems met with per-token arrays, and the tests that hold the right value.

A case names tests anywhere in the suite, and of each a piece of its checks: the value that the case is about.
"""

import pytest

from tests.support.named import checks_of

BRANCH, ROUTING, ASSEMBLE = "payload/test_branch.py::", "payload/test_routing.py::", "payload/test_assemble.py::"
ENCODE, INGEST, HEADS, PACK, TORCH = (
    f"payload/test_{room}.py::" for room in ("encode", "ingest", "heads", "pack", "torch")
)
ANSWERS = "inference/test_answers.py::"
LEDGER, SINKS, RUN, EXPORT, SOURCES = (
    f"orchestrator/test_{room}.py::" for room in ("ledger", "sinks", "run", "export", "sources")
)
STEP, LOST, NODES = (f"trainer/test_{room}.py::" for room in ("step", "lost", "nodes"))
FETCH, SERVER, PREFLIGHT = "node/test_fetch.py::", "node/test_server.py::", "launcher/test_preflight.py::"
GATHER, BLOCKS = "payload/test_gather.py::", "node/test_blocks.py::"

CASES = {
    "RR-01 the last token has no row": {
        BRANCH + "test_routing_rows_are_one_less_than_tokens_or_equal": "expected 6 .* or 7",
        BRANCH + "test_one_token_has_no_row": "make(1, 1, rows=0).R == 0",
        ASSEMBLE + "test_the_missing_tail_is_marked_not_invented": "[True] * 6 + [False]",
    },
    "RR-02 the boundary row comes from the next turn": {
        ROUTING + "test_the_boundary_row_of_a_turn_comes_from_the_next": "[0, 1, 2, 3, 4, 5, 26, 27, 28, 29]",
        INGEST + "test_three_turns_with_an_abort": 'branch.rows["routing"].values, expected',
    },
    "RR-03 truncated tokens, untruncated rows": {
        ASSEMBLE + "test_a_cut_sample_is_fully_covered": "(17_804, 17_804, 18_057)",
        ASSEMBLE + "test_a_reference_beyond_what_is_stored_is_an_error": "truncate a sample of 9 tokens to 10",
    },
    "RR-05 a resume repeats the whole sequence": {
        ROUTING + "test_abort_and_resume_takes_only_what_is_not_covered": "[*range(10), 40, 41, 42, 43, 44]",
    },
    "RR-07 more experts than a byte holds": {
        ENCODE + "test_expert_ids_are_stored_in_the_narrowest_type": "2 * 22 * np.dtype(dtype).itemsize",
    },
    "RR-09 uint16 in torch": {
        TORCH + "test_wide_ids_widen_to_signed_types": "tensor.max().item() == E - 1",
        ASSEMBLE + "test_missing_rows_export_as_minus_one_in_a_type_that_holds_every_id": "int16 cannot hold",
    },
    "RR-10 -1 wraps to an expert": {
        ASSEMBLE + "test_missing_rows_export_as_minus_one_in_a_type_that_holds_every_id": "[255, -1]",
        ROUTING + "test_a_partly_missing_row_is_corrupt": "id -1 at token 0",
    },
    "RR-11 padding goes to one expert": {
        ASSEMBLE + "test_padding_spreads_over_experts_and_ranks": "[16] * 8",
        ASSEMBLE + "test_padding_is_numbered_after_slicing": "routing_padding(4, (2, 2), 8, 4)",
        LOST + "test_a_stand_in_has_a_real_route_and_no_loss": "first.routing[:1]",
    },
    "RR-13 two rules for the padded length": {
        PACK + "test_one_rule_for_the_padded_length": "7744 + padding",
        ASSEMBLE + "test_a_reference_beyond_what_is_stored_is_an_error": "less than the rows",
    },
    "RR-14 right shape, wrong order": {
        ASSEMBLE + "test_token_order_is_packing_order": "[0, 2, 1, 3, -1, -1]",
    },
    "RR-15 dense layers shift the index": {
        ASSEMBLE + "test_layers_are_asked_for_by_global_id": "rows[:, 27:43]",
        INGEST + "test_columns_of_dense_layers_are_dropped": r"expected integers \[n, 4, 2\]",
    },
    "RR-18 zeros that look valid": {
        BRANCH + "test_a_row_of_zeros_is_a_capture_bug": "position=(1, 0, 1), value=0",
        BRANCH + "test_ids_are_experts": "value=bad",
    },
    "RR-19 another request's rows": {
        ASSEMBLE + "test_a_lost_block_is_named": "slot={lost.handles[0].slot}",
        "arena/test_machine.py::test_the_arena_does_what_a_dict_would": "25, 40",
    },
    "RR-21 prompt rows of another server": {
        ROUTING + "test_prefill_and_decode_in_either_order": "[0, 1, 2, 3, 4, 15, 16, 17, 18]",
        ROUTING + "test_a_decode_server_that_finished_with_one_token": "[0, 1, 2, 3, 4]",
        ROUTING + "test_junk_outside_the_valid_range_is_not_looked_at": "r.finish(5)) == [0, 1, 2, 3]",
    },
    "RR-22 empty, not captured, lost": {
        INGEST + "test_an_empty_turn_changes_nothing": "[1, 2, 3, 4]",
        ASSEMBLE + "test_every_cut": "check(batch, 0, branch, n)",
        ASSEMBLE + "test_samples_without_routing_are_not_covered": "not batch.routing_covered[9:].any()",
        STEP + "test_tokens_without_a_route_are_fed_and_counted": "(plain.T - 1) / fed",
        LOST + "test_ranks_drop_together_what_one_of_them_cannot_read": "payload/dropped_micro_batches",
    },
    "RR-23 reused before it was read": {
        "arena/test_blocks.py::test_reserve_fill_seal": "pytest.raises(NotSealed)",
        "arena/test_processes.py::test_a_killed_reader_lets_go": 'stats()["blocks"] == 1',
        "env/test_rollouts.py::test_what_a_killed_worker_had_stored_is_freed": "(0, 1, 1)",
    },
    "RR-24 rows copied to everyone": {
        "orchestrator/test_memory.py::test_bytes_per_sample_and_memory_do_not_depend_on_the_length": "2 << 20",
        "orchestrator/test_scale.py::test_a_thousand_replies_in_a_second": "2 << 20",
        "arena/test_processes.py::test_eight_readers_share_one_copy": "0.05 * 48 * 1024",
    },
    "RR-25 every hop has its own wire form": {
        INGEST + "test_every_form_gives_the_same_rows": "np.array_equal(got, rows)",
        INGEST + "test_long_base64": "(6_291_456, 8_388_608)",
        INGEST + "test_double_base64_is_refused": "base64 of base64",
        INGEST + "test_what_nobody_sends": "match=words",
    },
    "RR-29 a split drops the remainder": {
        PACK + "test_ten_samples_in_four_micro_batches_keep_their_references": "[3, 3, 2, 2]",
    },
    "RR-30 writable views and aliased rows": {
        "arena/test_views.py::test_arrays_share_the_mapping_read_only_and_count": "writeable",
        TORCH + "test_tensors_own_their_memory": 'tensors.head_ids.numpy(), before["head_ids"]',
        TORCH + "test_torch_never_gets_the_arena_to_write_to": 'bytes(view) == b"abc"',
        ASSEMBLE + "test_staging_is_reused_and_never_aliases_the_arena": '["data"][0] == address',
    },
    "RR-32 replay of a dense model": {
        PREFLIGHT + "test_router_replay_on_a_dense_model_names_the_field_and_the_keys_looked_for": "'routing'",
    },
    "RR-33 zigzag": {
        ASSEMBLE + "test_context_parallel_ranks_read_two_ranges_per_sequence": "whole.routing[wanted][covered]",
        GATHER + "test_a_rank_of_four_stages_and_two_context_ranks_reads_an_eighth_of_the_pages": "sha256(share)",
    },
    "TK-01 ratios over the kept set": {
        "trainer/test_logprobs.py::test_reference_values": "[-0.313262, -0.440190]",
        STEP + "test_without_sampling_replay_the_ratio_is_biased": "> 1e-4",
        STEP + "test_exact_on_policy": "<= 1e-6",
    },
    "TK-02 ids and counts are cut together": {
        ASSEMBLE + "test_truncation_cuts_ids_and_counts_together": "[2, 0, 1, 0, 0]",
        BRANCH + "test_mask_counts_sum_to_its_ids": "counts sum to 5, there are 6 values",
    },
    "TK-04 -inf": {
        ENCODE + "test_minus_inf_is_stored_bit_for_bit": "logprobs.tobytes()",
        FETCH + "test_a_copy_of_a_payload_assembles_to_the_same_arrays": "b.head_logprobs.tobytes()",
        BRANCH + "test_head_keeps_minus_inf_and_refuses_nan_and_none": 'float("nan")',
    },
    "TK-06 null": {
        ANSWERS + "test_unreadable_answers": "^u sent",
        HEADS + "test_heads_that_are_incomplete": "caught.value.position",
        HEADS + "test_masks": "None at position 1",
        BRANCH + "test_head_keeps_minus_inf_and_refuses_nan_and_none": "position=(0, 1), value=None",
    },
    "TK-07 the sampled token comes first": {
        ASSEMBLE + "test_head_without_the_sampled_token": "[7, 2, 9]",
        BRANCH + "test_head_columns_with_the_sampled_token_first": "value=3",
    },
    "TK-08 raw and processed": {
        ENCODE + "test_raw_and_processed_sources_are_refused_at_packing": "'raw' in s0/g/e, 'processed' in s1/g/e",
        ENCODE + "test_the_header_is_enough_to_adopt_a_block": 'sample.meta["temperature"] == 0.6',
        STEP + "test_exact_at_another_temperature": "== {0.6}",
        STEP + "test_raw_logprobs_are_compared_at_temperature_one": 'metrics["train/mismatch_kl"] <= 1e-6',
    },
    "TK-11 tiny sets with a long tail": {
        ENCODE + "test_masks_cost_their_ids_and_one_offset_per_token": "1.15 * (4 * sizes.sum() + 4 * T)",
        BRANCH + "test_a_mask_row_has_a_cap": "151_936",
    },
    "TK-12 missing masks stop the run": {
        SINKS + "test_a_field_the_trainer_replays_must_be_there_in_the_first_group": "came without {missing}",
        RUN + "test_masks_that_never_come_stop_the_run_at_the_first_sample": "code == 1",
        STEP + "test_untruncated_sampling_needs_no_mask": '"mask" not in samples[0].fields',
        BRANCH + "test_truncated_sampling_needs_a_mask": "math/g1",
        BRANCH + "test_untruncated_sampling_needs_none": '"top_k": -1',
    },
    "TK-13 huge heads": {
        PREFLIGHT + "test_sixteen_gibibytes_of_heads_do_not_fit_an_arena_of_eight": "16 << 30",
    },
    "FR-02 an old step again": {
        EXPORT + "test_blocks_of_other_nodes_are_fetched_into_the_file": 'both["arrays"] == one["arrays"]',
        EXPORT + "test_a_step_of_a_dead_run_assembles_in_a_fresh_process_to_the_same_digests": "sha256",
        EXPORT + "test_a_step_of_a_live_run_is_found_chosen_and_written": "no micro batch 2:0",
        LEDGER + "test_a_block_of_two_retained_steps_is_freed_when_the_last_is_let_go": "== (0, 2, 2)",
    },
    "FR-06 a prompt is stored once": {
        "env/test_shared_rows.py::test_a_group_of_16_with_a_prompt_of_30_000_stores_46_000_rows": "46_000",
        LEDGER + "test_a_group_of_16_with_a_prompt_of_30_000_stores_46_000_rows_and_frees_it_with_the_last": "46_000",
        ENCODE + "test_a_group_of_16_stores_its_prompt_once": "30 + 16 * 9",
        ASSEMBLE + "test_shared_prefixes_assemble_like_whole_branches": "routes(40)[20:35]",
    },
    "FR-07 a rank reads its layers and tokens": {
        ASSEMBLE + "test_a_rank_of_four_stages_and_two_context_ranks_reads_an_eighth": "* 8 == full.routing.nbytes",
        GATHER + "test_a_rank_of_four_stages_and_two_context_ranks_reads_an_eighth_of_the_pages": "sha256(share)",
        BLOCKS + "test_ranks_that_read_their_layers_and_tokens_share_one_transfer": 'server.counters["sent_bytes"]',
    },
    "FR-09 a hard mode, and a resume": {
        NODES + "test_required_shared_memory_refuses_a_remote_reader": "allows shared memory alone",
        SOURCES
        + "test_a_replica_of_another_node_is_refused_where_shared_memory_is_required": "allows shared memory alone",
        FETCH + "test_a_server_killed_in_the_middle_and_started_again_is_resumed": "sent_bytes",
    },
    "FR-10 nobody else gets them": {
        SERVER + "test_without_the_token_every_request_is_401_and_changes_nothing": "401",
        SERVER + "test_foreign_and_forged_ids_are_404_freed_ones_410_and_nothing_is_listed": "404",
        SERVER + "test_the_token_is_in_no_log_line": "TOKEN not in caplog.text",
        SERVER
        + "test_over_tls_blocks_are_fetched_and_a_server_of_another_authority_is_refused_at_once": "verify failed",
        "node/test_host.py::test_a_node_with_an_address_has_a_server_that_is_started_again_and_shows_no_token": "token",
    },
    "FR-12 a field without a change of the core": {
        ASSEMBLE + "test_registered_fields_work_everywhere_with_no_core_change": "topk[: counts[:5].sum()]",
    },
}


@pytest.mark.parametrize("case", CASES)
def test_it_has_tests_with_its_value(case):
    assert {name: value for name, value in CASES[case].items() if value not in checks_of(name)} == {}


def test_no_case_is_forgotten():
    told = "01 02 03 05 07 09 10 11 13 14 15 18 19 21 22 23 24 25 29 30 32 33", "01 02 04 06 07 08 11 12 13"
    wanted = [
        f"{kind}-{number}" for kind, numbers in zip(("RR", "TK"), told, strict=True) for number in numbers.split()
    ]
    assert [case.split()[0] for case in CASES] == wanted + [f"FR-{n}" for n in ("02", "06", "07", "09", "10", "12")]
