/* Recovery from dead processes, and the walks over all blocks: statistics and the consistency check.
 *
 * A sweep runs in whichever process noticed the death, holding byte 256 + process of the `live` file; it is
 * idempotent, so a sweeper that dies is simply followed. A clean close is the same sweep of oneself.
 */
#include "arena_core.h"
#include "arena_atomics.h"
#include <errno.h>
#include <stdio.h>
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
            srl_retire(a, b, w);
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
        if (srl_retire(a, b, w)) {
            srl_finish(a, b);
            n++;
        }
    }
    return n;
}

void srl_get_stats(const srl_arena *a, srl_stats *out) {
    const srl_header *h = a->h;
    *out = (srl_stats){.capacity_bytes = (uint64_t)a->max_pages * SRL_PAGE};
    out->committed_bytes = srl_committed_pages(a) * SRL_PAGE;
    out->peak_bytes = srl_load_relaxed(&h->peak_bytes);
    out->waits = srl_load_relaxed(&h->waits);
    uint64_t generations = 0, freeing = 0, n = srl_table_used(a);
    for (uint64_t i = 0; i < n; i++) {
        const srl_block *b = a->blocks + i;
        uint64_t w = srl_load_sc(&b->word);
        unsigned state = SRL_STATE(w);
        generations += SRL_GEN(w);
        if (state == SRL_FREE)
            continue;
        freeing += state == SRL_FREEING;
        out->blocks += state != SRL_FREEING;
        out->used_bytes += srl_load_relaxed(&b->span);
        out->orphaned += state == SRL_READY && SRL_FLAGS(w) & SRL_ORPHAN;
        if (SRL_FLAGS(w) & SRL_SPILLED) {
            out->spilled++;
            out->spilled_bytes += srl_load_relaxed(&b->offset);
        }
    }
    out->freed = generations + freeing;
    out->created = out->freed + out->blocks;
}

/* --------------------------------------------------------------------------------------------------- fsck */

typedef struct {
    char *text;
    unsigned room, found;
} report;

#define FAULT(r, ...)                                                                                        \
    do {                                                                                                     \
        int n_ = snprintf((r)->text, (r)->room, __VA_ARGS__);                                                \
        if (n_ > 0 && (unsigned)n_ < (r)->room) {                                                            \
            (r)->text += n_;                                                                                 \
            (r)->room -= (unsigned)n_;                                                                       \
        }                                                                                                    \
        (r)->found++;                                                                                        \
    } while (0)

#define BLOCK_FAULT(what, ...) FAULT(r, "block %u generation %u: " what "\n", i, SRL_GEN(w), ##__VA_ARGS__)

static void check_block(const srl_arena *a, uint32_t i, uint64_t w, report *r) {
    const srl_block *b = a->blocks + i;
    uint64_t end = srl_committed_pages(a) * SRL_PAGE;
    unsigned state = SRL_STATE(w), owner = SRL_OWNER(w);
    if (state > SRL_FREEING)
        BLOCK_FAULT("state %u does not exist", state);
    bool spilled = SRL_FLAGS(w) & SRL_SPILLED;
    uint64_t room = spilled ? b->offset : b->span;
    if (spilled && b->span)
        BLOCK_FAULT("spilled, and a span of %lu", b->span);
    if (!spilled && (b->span > end || b->offset > end - b->span))
        BLOCK_FAULT("span %lu + %lu passes the committed %lu bytes", b->offset, b->span, end);
    if (b->nbytes > room || b->tail_nbytes > room - b->nbytes)
        BLOCK_FAULT("%lu bytes and a tail of %u in a %s of %lu", b->nbytes, b->tail_nbytes,
                    spilled ? "file" : "span", room);
    if (owner >= a->max_processes)
        BLOCK_FAULT("owner %u of %u processes", owner, a->max_processes);
    else if (state == SRL_WRITING && !a->processes[owner].used)
        BLOCK_FAULT("being written by process %u, which is not attached", owner);
    if (state == SRL_READY && !(SRL_FLAGS(w) & SRL_ORPHAN) && owner < a->max_processes &&
        !a->processes[owner].used)
        BLOCK_FAULT("owned by process %u, which is not attached, and no orphan", owner);
    uint64_t any = 0;
    for (unsigned p = 0; p < a->max_processes; p++) {
        uint64_t bit = srl_load_sc(b->holders + p / 64) >> p % 64 & 1;
        any |= bit;
        if (bit && !a->processes[p].used)
            BLOCK_FAULT("held by process %u, which is not attached", p);
    }
    if (state == SRL_RETIRED && !any)
        BLOCK_FAULT("retired, held by nobody, and not freed");
}

static uint64_t free_page_bytes(const srl_arena *a, report *r) {
    uint64_t total = 0, end = srl_committed_pages(a), guard = end + 1;
    for (unsigned bin = 0; bin < SRL_BINS; bin++)
        for (uint32_t p = a->h->bins[bin]; p != SRL_NONE; p = a->pages[p].next) {
            if (p >= end || a->pages[p].kind != SRL_PAGE_FREE || !guard--) {
                FAULT(r, "bin %u: page %u is not the head of a free span\n", bin, p);
                return total;
            }
            total += (uint64_t)a->pages[p].length * SRL_PAGE;
        }
    return total;
}

/* Bytes in pages cut into cells, and how many of those bytes blocks own, from the page records. */
static void cell_page_bytes(const srl_arena *a, uint64_t *pages, uint64_t *free_cells) {
    *pages = *free_cells = 0;
    for (uint64_t p = 0; p < srl_committed_pages(a);) {
        const srl_page *g = a->pages + p;
        if (g->kind == SRL_PAGE_CELLS && g->cell_class < SRL_CELL_CLASSES) {
            uint64_t size = (256u << (g->cell_class / 4)) / 4 * (4 + g->cell_class % 4);
            *pages += SRL_PAGE;
            *free_cells += SRL_PAGE - g->cells_used * size;
        }
        p += g->kind == SRL_PAGE_CELLS || !g->length ? 1 : g->length;
    }
}

/* Under the lock. Every fault found, one line each, into `out`; -> how many. */
int srl_fsck(srl_arena *a, char *out, unsigned out_len) {
    report r = {out, out_len, 0};
    uint64_t used = 0, cells, free_cells;
    if (out_len)
        *out = 0;
    if (!srl_counts_are_sane(a))
        FAULT(&r, "%lu descriptors used of %lu committed of %u, %lu pages committed of %u\n",
              a->h->table_used, a->h->table_committed, a->max_blocks, a->h->committed_pages, a->max_pages);
    for (uint64_t i = 0; i < srl_table_used(a); i++) {
        uint64_t w = srl_load_sc(&a->blocks[i].word);
        if (SRL_STATE(w) == SRL_FREE)
            continue;
        used += a->blocks[i].span;
        check_block(a, (uint32_t)i, w, &r);
    }
    uint64_t free_pages = free_page_bytes(a, &r), committed = srl_committed_pages(a) * SRL_PAGE;
    cell_page_bytes(a, &cells, &free_cells);
    if (used != a->h->used_bytes)
        FAULT(&r, "blocks own %lu bytes, the allocator counts %lu\n", used, a->h->used_bytes);
    if (used + free_pages + free_cells != committed)
        FAULT(&r, "used %lu + free pages %lu + free cells %lu != committed %lu\n", used, free_pages,
              free_cells, committed);
    return (int)r.found;
}
