/* Recovery from dead processes.
 *
 * A sweep runs in whichever process noticed the death, holding byte 256 + process of the `live` file; it is
 * idempotent, so a sweeper that dies is simply followed. A clean close is the same sweep of oneself.
 */
#include "arena_core.h"
#include "arena_atomics.h"
#include <errno.h>
#include <time.h>

static void orphan(srl_arena *a, srl_block *b, uint64_t w) {
    srl_store_relaxed(&b->orphan_ns, srl_now_ns(CLOCK_BOOTTIME));
    if (srl_cas_sc(&b->word, w, w | (uint64_t)SRL_ORPHAN << 16))
        srl_event_note(a, SRL_DID_ORPHAN, (uint32_t)(b - a->blocks), SRL_GEN(w),
                       srl_load_relaxed(&b->nbytes));
}

/* One step of a dead process's block towards where it would be had the process finished; true when nothing is
 * left to do. */
static bool settle(srl_arena *a, uint32_t slot, uint32_t p) {
    srl_block *b = srl_at(a, slot);
    uint64_t w = srl_load_sc(&b->word);
    unsigned flags = SRL_FLAGS(w);
    switch (SRL_STATE(w)) {
    case SRL_WRITING:
        if (SRL_OWNER(w) != p)
            return true;
        srl_cas_sc(&b->word, w, SRL_WITH_STATE(w, SRL_FREEING));
        return false;
    case SRL_READY:
        if (flags & SRL_SHIPPED && srl_done_complete(b))
            srl_retire(a, b, w, SRL_DID_RETIRE);
        else if (SRL_OWNER(w) == p && !(flags & SRL_ORPHAN))
            orphan(a, b, w);
        else
            return true;
        return false;
    case SRL_RETIRED:
        srl_finish(a, b);
        return true;
    case SRL_FREEING: /* its winner may have died before it could say so */
        srl_pend(a, slot);
        return true;
    default:
        return true;
    }
}

void srl_sweep(srl_arena *a, uint32_t p) {
    srl_process *dead = a->processes + p;
    if (srl_load_sc(&dead->ticket)) {
        srl_store_sc(&dead->ticket, 0);
        srl_add32_sc(&a->h->space_waiters, UINT32_MAX);
    }
    for (uint64_t i = 0; i < srl_table_used(a); i++) {
        uint64_t *holders = srl_at(a, (uint32_t)i)->holders + p / 64;
        if (srl_load_sc(holders) >> p % 64 & 1)
            srl_and_sc(holders, ~(UINT64_C(1) << p % 64));
        while (!settle(a, (uint32_t)i, p))
            ;
    }
    if (srl_lock_owner(a) == p && srl_lock(a, srl_now_ns(CLOCK_MONOTONIC) + 1000000000u) == 0)
        srl_unlock(a); /* took it over: the slot's next tenant would make the dead owner look alive */
    srl_drain_if_free(a);
    srl_event_note(a, SRL_DID_SWEEP, p, 0, 0);
    srl_store_sc(&dead->used, 0);
}

/* Orphans older than the arena's ttl are retired; 0 = they live until discarded. -> how many */
int64_t srl_expire_orphans(srl_arena *a) {
    uint64_t ttl = a->h->orphan_ttl_ns, now = srl_now_ns(CLOCK_BOOTTIME);
    int64_t n = 0;
    for (uint64_t i = 0; ttl && i < srl_table_used(a); i++) {
        srl_block *b = srl_at(a, (uint32_t)i);
        uint64_t w = srl_load_sc(&b->word);
        if (SRL_STATE(w) != SRL_READY || !(SRL_FLAGS(w) & SRL_ORPHAN) ||
            srl_load_relaxed(&b->orphan_ns) + ttl > now)
            continue;
        if (srl_retire(a, b, w, SRL_DID_EXPIRE)) {
            srl_finish(a, b);
            n++;
        }
    }
    return n;
}
