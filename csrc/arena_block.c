/* Blocks: reserve, seal, acquire, release, adopt, ship, done, free, discard.
 *
 * Runs in every attached process. The protocol is the one checked exhaustively in the model: a failed acquire
 * is a full release, whoever clears the last holder of a RETIRED block wins one CAS to FREEING, and spans
 * return under the lock only.
 */
#include "arena_core.h"
#include "arena_atomics.h"
#include <errno.h>
#include <string.h>
#include <sys/random.h>
#include <time.h>

static uint64_t *word_of_bit(uint64_t *bits, uint32_t index) {
    return bits + index / 64;
}
static uint64_t mask_of_bit(uint32_t index) {
    return UINT64_C(1) << index % 64;
}

/* --------------------------------------------------------------------------------------- back to the pool */

void srl_pend(srl_arena *a, uint32_t slot) {
    srl_or_sc(word_of_bit(a->pending, slot), mask_of_bit(slot));
    srl_store_sc(&a->h->pending_hint, 1);
}

/* The file goes before the word says FREE: whoever dies in between leaves a FREEING block, and the next who has
 * the lock removes it once more. */
void srl_drop_spilled(srl_arena *a, const srl_block *b, uint64_t w) {
    if (SRL_FLAGS(w) & SRL_SPILLED && a->drop_file)
        a->drop_file(a->ctx, (uint32_t)(b - a->blocks), SRL_GEN(w));
}

/* Under the lock: the map first, then the word, and the link of the free list where the span was only when the
 * word no longer says that there is one. `w` is the FREEING word that was won; any other is dealt with. */
static void free_locked(srl_arena *a, srl_block *b, uint64_t w) {
    if (SRL_STATE(w) != SRL_FREEING || srl_load_sc(&b->word) != w)
        return;
    srl_drop_spilled(a, b, w);
    if (srl_span_give(a, b, SRL_OWNER(w)))
        return; /* a descriptor that was scribbled on: fsck shows it, nobody gets its bytes */
    srl_store_sc(&b->word, SRL_WORD(SRL_GEN(w) + 1, SRL_FREE, 0, 0));
    srl_store_relaxed(&b->offset, a->h->free_slot);
    if (SRL_GEN(w) + 1 != UINT32_MAX)
        SRL_SET(a->h->free_slot, (uint64_t)(b - a->blocks) + 1);
    a->freed = true;
    srl_event_note(a, SRL_DID_FREE, (uint32_t)(b - a->blocks), SRL_GEN(w), b->nbytes);
}

void srl_drain(srl_arena *a) {
    if (!srl_load_sc(&a->h->pending_hint) || !srl_swap_sc(&a->h->pending_hint, 0))
        return;
    for (uint64_t i = 0; i < (srl_table_used(a) + 63) / 64; i++) {
        uint64_t bits = srl_load_relaxed(a->pending + i) ? srl_swap_sc(a->pending + i, 0) : 0;
        for (; bits; bits &= bits - 1) {
            srl_block *b = srl_at(a, (uint32_t)(i * 64) + (uint32_t)__builtin_ctzll(bits));
            free_locked(a, b, srl_load_sc(&b->word));
        }
    }
}

/* Won the CAS to FREEING. Never waits: this may run inside a garbage collection. A large file takes its time to go,
 * so it goes before the lock is taken. */
static void give_back(srl_arena *a, srl_block *b, uint64_t w) {
    srl_drop_spilled(a, b, w);
    if (srl_lock(a, 0)) {
        srl_pend(a, (uint32_t)(b - a->blocks));
        srl_drain_if_free(a); /* the holder may have let go before it could see the hint */
        return;
    }
    free_locked(a, b, w);
    srl_unlock(a);
}

/* The last-holder check, on the word as it is now, whatever its generation. */
void srl_finish(srl_arena *a, srl_block *b) {
    uint64_t w = srl_load_sc(&b->word);
    if (SRL_STATE(w) != SRL_RETIRED)
        return;
    for (int i = 0; i < 4; i++)
        if (srl_load_sc(b->holders + i))
            return;
    uint64_t freeing = SRL_WITH_STATE(w, SRL_FREEING);
    if (srl_cas_sc(&b->word, w, freeing))
        give_back(a, b, freeing);
}

/* ------------------------------------------------------------------------------------------------ writing */

static int next_nonce(srl_arena *a, uint64_t *nonce) {
    if (!a->nonces_left) {
        if (getrandom(a->nonces, sizeof a->nonces, 0) != (ssize_t)sizeof a->nonces)
            return -EAGAIN;
        a->nonces_left = sizeof a->nonces / sizeof *a->nonces;
    }
    *nonce = a->nonces[--a->nonces_left];
    return 0;
}

static int find_slot(srl_arena *a, uint64_t *slot) {
    srl_header *h = a->h;
    if (h->free_slot && h->free_slot <= srl_table_used(a))
        *slot = h->free_slot - 1;
    else if (h->free_slot)
        return -EUCLEAN;
    else if (h->table_used < h->table_committed)
        *slot = h->table_used;
    else
        return h->table_committed < a->max_blocks ? -EXFULL : -ENOSPC;
    return SRL_STATE(srl_load_sc(&srl_at(a, (uint32_t)*slot)->word)) == SRL_FREE ? 0 : -EUCLEAN;
}

static void take_slot(srl_arena *a, uint64_t slot) {
    srl_header *h = a->h;
    if (slot == h->table_used)
        srl_store_relaxed(&h->table_used, slot + 1);
    else
        SRL_SET(h->free_slot, srl_load_relaxed(&srl_at(a, (uint32_t)slot)->offset));
}

static void describe(srl_block *b, const srl_request *r, uint64_t span) {
    char tag[SRL_TAG_MAX] = {0};
    memcpy(tag, r->tag, r->tag_len);
    srl_copy_relaxed(b->tag, tag, sizeof tag);
    srl_store_relaxed(&b->offset, r->offset);
    srl_store_relaxed(&b->nbytes, r->nbytes);
    srl_store_relaxed(&b->nonce, r->nonce);
    srl_store_relaxed(&b->span, span);
    srl_store_relaxed(&b->birth_ns, srl_now_ns(CLOCK_BOOTTIME));
    srl_store_relaxed((uint64_t *)&b->step, UINT64_MAX);
    srl_store32_relaxed(&b->readers, 0);
    srl_store32_relaxed(&b->tail_nbytes, 0);
    srl_store32_relaxed(&b->crc, 0);
    srl_store32_relaxed(&b->share, r->share);
    for (int i = 0; i < 4; i++)
        if (srl_load_relaxed(b->done +
                             i)) /* nobody sets one without a hold, and a free descriptor has no holder */
            srl_and_sc(b->done + i, 0);
}

static int take_space(srl_arena *a, srl_request *r, uint64_t span) {
    r->offset = r->nbytes + r->room;
    if (r->spill)
        return 0;
    int rc = srl_span_take(a, r->share, span, &r->offset);
    return rc == -ENOSPC && a->h->committed_pages < a->max_pages ? -EMLINK : rc;
}

/* Whether it is this request's turn, and whether its source may have so much. */
static int admit(srl_arena *a, srl_request *r, uint64_t span) {
    r->share = a->shares ? srl_share_of(a, r->tag, r->tag_len) : 0;
    r->borrows = a->shares && !srl_share_covers(a, r->share, span);
    if (r->spill)
        return 0;
    if (srl_load32_sc(&a->h->space_waiters) && !srl_queue_first(a, r->borrows))
        return -ENOSPC;
    return r->borrows && !srl_share_lends(a, r->share, span) ? -ENOSPC : 0;
}

static int reserve_locked(srl_arena *a, srl_request *r) {
    srl_drain(a);
    if (a->corrupt || !srl_counts_are_sane(a))
        return -EUCLEAN;
    uint64_t slot, span = r->spill ? 0 : srl_span_nbytes(r->nbytes + r->room);
    int rc = admit(a, r, span);
    if (!rc)
        rc = find_slot(a, &slot);
    if (!rc)
        rc = next_nonce(a, &r->nonce);
    if (!rc)
        rc = take_space(a, r, span);
    if (rc)
        return rc;
    take_slot(a, slot);
    srl_block *b = srl_at(a, (uint32_t)slot);
    r->slot = (uint32_t)slot;
    r->generation = SRL_GEN(srl_load_sc(&b->word));
    describe(b, r, span);
    srl_store_sc(&b->word, SRL_WORD(r->generation, SRL_WRITING, r->spill ? SRL_SPILLED : 0, a->self));
    srl_event_note(a, r->spill ? SRL_DID_SPILL : SRL_DID_RESERVE, r->slot, r->generation, r->nbytes);
    return 0;
}

int srl_reserve(srl_arena *a, srl_request *r, uint64_t deadline_ns) {
    int rc = srl_lock(a, deadline_ns);
    if (rc)
        return rc;
    rc = reserve_locked(a, r);
    srl_unlock(a);
    return rc;
}

int srl_abort(srl_arena *a, uint32_t slot, uint32_t gen) {
    srl_block *b = srl_at(a, slot);
    for (;;) {
        uint64_t w = srl_load_sc(&b->word);
        if (SRL_GEN(w) != gen || SRL_STATE(w) != SRL_WRITING)
            return -ESTALE;
        uint64_t freeing = SRL_WITH_STATE(w, SRL_FREEING);
        if (srl_cas_sc(&b->word, w, freeing)) {
            give_back(a, b, freeing);
            return 0;
        }
    }
}

static int publish(srl_arena *a, uint32_t slot, uint32_t gen, bool checked) {
    srl_block *b = srl_at(a, slot);
    for (;;) {
        uint64_t w = srl_load_sc(&b->word);
        if (SRL_GEN(w) != gen || SRL_STATE(w) != SRL_WRITING || SRL_OWNER(w) != a->self)
            return -ESTALE;
        if (SRL_FLAGS(w) & SRL_DISCARDED)
            return -ECANCELED;
        unsigned sealed = (SRL_FLAGS(w) & SRL_SPILLED) | (checked ? 0 : SRL_UNCHECKED);
        if (srl_cas_sc(&b->word, w, SRL_WORD(gen, SRL_READY, sealed, a->self))) {
            srl_event_note(a, SRL_DID_SEAL, slot, gen, srl_load_relaxed(&b->nbytes));
            return 0;
        }
    }
}

/* held: writable buffers live on, so the block is born held by this process. -ECANCELED: it was discarded; the caller
 * aborts it, once nobody can write to it any more. */
int srl_seal(srl_arena *a, uint32_t slot, uint32_t gen, uint32_t tail_nbytes, uint32_t crc, bool checked,
             bool held) {
    srl_block *b = srl_at(a, slot);
    srl_store32_relaxed(&b->tail_nbytes, tail_nbytes);
    srl_store32_relaxed(&b->crc, crc);
    if (!held)
        return publish(a, slot, gen, checked);
    srl_or_sc(word_of_bit(b->holders, a->self), mask_of_bit(a->self)); /* once READY, anybody may free it */
    srl_hold *hold = a->holds + slot;
    hold->count++;
    hold->generation = gen;
    int rc = publish(a, slot, gen, checked);
    if (rc)
        srl_release(a, slot);
    return rc;
}

/* ------------------------------------------------------------------------------------------------ reading */

static int readable(uint64_t w, uint32_t gen) {
    if (SRL_GEN(w) != gen)
        return -ESTALE;
    if (SRL_STATE(w) == SRL_WRITING)
        return -EBUSY;
    return SRL_STATE(w) == SRL_READY ? 0 : -ESTALE;
}

static void drop_bit(srl_arena *a, srl_block *b) {
    srl_and_sc(word_of_bit(b->holders, a->self), ~mask_of_bit(a->self));
    srl_finish(a, b);
}

int srl_acquire(srl_arena *a, uint32_t slot, uint32_t gen, uint64_t nonce) {
    if (slot >= a->max_blocks || slot >= srl_load_relaxed(&a->h->table_used))
        return -ESTALE;
    srl_block *b = srl_at(a, slot);
    srl_hold *hold = a->holds + slot;
    int rc = readable(srl_load_sc(&b->word), gen);
    if (rc)
        return rc;
    /* the private count decides alone: the shared bit protects a live view of this process */
    if (hold->count) {
        if (hold->generation != gen || srl_load_relaxed(&b->nonce) != nonce)
            return -ESTALE;
        hold->count++;
        return 0;
    }
    srl_or_sc(word_of_bit(b->holders, a->self), mask_of_bit(a->self));
    rc = readable(srl_load_sc(&b->word), gen);
    if (!rc && srl_load_relaxed(&b->nonce) != nonce)
        rc = -ESTALE;
    if (rc) {
        drop_bit(a, b); /* a full release: a freer may have seen our bit and left the block to us */
        return rc;
    }
    hold->count = 1;
    hold->generation = gen;
    return 0;
}

void srl_release(srl_arena *a, uint32_t slot) {
    if (--a->holds[slot].count == 0)
        drop_bit(a, srl_at(a, slot));
}

/* ---------------------------------------------------------------------------------------------- ownership */

/* The word of a READY block of this very handle, or why not. The nonce is stable if a CAS of this word succeeds. */
static int owned_word(srl_arena *a, uint32_t slot, uint32_t gen, uint64_t nonce, bool mine, uint64_t *w) {
    if (slot >= srl_table_used(a))
        return -ESTALE;
    *w = srl_load_sc(&srl_at(a, slot)->word);
    int rc = readable(*w, gen);
    if (rc)
        return rc;
    if (srl_load_relaxed(&srl_at(a, slot)->nonce) != nonce)
        return -ESTALE;
    return mine && (SRL_OWNER(*w) != a->self || SRL_FLAGS(*w) & SRL_ORPHAN) ? -EPERM : 0;
}

int srl_adopt(srl_arena *a, uint32_t slot, uint32_t gen, uint64_t nonce) {
    uint64_t w;
    for (;;) {
        int rc = owned_word(a, slot, gen, nonce, false, &w);
        if (rc)
            return rc;
        if (srl_cas_sc(&srl_at(a, slot)->word, w,
                       SRL_WORD(gen, SRL_READY, SRL_FLAGS(w) & ~SRL_ORPHAN, a->self))) {
            srl_event_note(a, SRL_DID_ADOPT, slot, gen, SRL_OWNER(w));
            return 0;
        }
    }
}

/* READY -> RETIRED if the word is still `w`. The caller finishes, or holds the block itself. kind: of the event. */
bool srl_retire(srl_arena *a, srl_block *b, uint64_t w, unsigned kind) {
    if (!srl_cas_sc(&b->word, w, SRL_WITH_STATE(w, SRL_RETIRED)))
        return false;
    srl_event_note(a, kind, (uint32_t)(b - a->blocks), SRL_GEN(w), srl_load_relaxed(&b->nbytes));
    return true;
}

int srl_free(srl_arena *a, uint32_t slot, uint32_t gen, uint64_t nonce) {
    uint64_t w;
    for (;;) {
        int rc = owned_word(a, slot, gen, nonce, true, &w);
        if (rc)
            return rc;
        if (srl_retire(a, srl_at(a, slot), w, SRL_DID_RETIRE)) {
            srl_finish(a, srl_at(a, slot));
            return 0;
        }
    }
}

/* ------------------------------------------------------------------------------------------ ship and done */

/* Readers before bits: ship() clears the bits before it stores the readers, so a mixed view is never complete. */
bool srl_done_complete(const srl_block *b) {
    uint32_t readers = srl_load32_sc(&b->readers), have = 0;
    for (int i = 0; i < 4; i++)
        have += (uint32_t)__builtin_popcountll(srl_load_sc(b->done + i));
    return readers && have >= readers;
}

static int ship_held(srl_arena *a, uint32_t slot, uint32_t gen, uint64_t nonce, uint32_t readers,
                     int64_t step) {
    srl_block *b = srl_at(a, slot);
    uint64_t w;
    for (;;) {
        int rc = owned_word(a, slot, gen, nonce, true, &w);
        if (rc)
            return rc;
        for (int i = 0; i < 4; i++)
            srl_and_sc(b->done + i, 0);
        srl_store32_sc(&b->readers, readers);
        srl_store_relaxed((uint64_t *)&b->step, (uint64_t)step);
        unsigned flags = SRL_FLAGS(w) | SRL_SHIPPED;
        flags = (flags + SRL_EPOCH_ONE) & 0xfff; /* the epoch is the top of the flags */
        if (srl_cas_sc(&b->word, w, SRL_WORD(gen, SRL_READY, flags, a->self))) {
            srl_event_note(a, SRL_DID_SHIP, slot, gen, readers);
            return 0;
        }
    }
}

int srl_ship(srl_arena *a, uint32_t slot, uint32_t gen, uint64_t nonce, uint32_t readers, int64_t step) {
    int rc = srl_acquire(a, slot, gen, nonce); /* or the fields may become another generation's */
    if (rc)
        return rc;
    rc = ship_held(a, slot, gen, nonce, readers, step);
    srl_release(a, slot);
    return rc;
}

static int done_held(srl_arena *a, srl_block *b, uint32_t gen, uint32_t reader) {
    uint64_t w = srl_load_sc(&b->word);
    if (!(SRL_FLAGS(w) & SRL_SHIPPED))
        return -ENODATA;
    srl_or_sc(word_of_bit(b->done, reader), mask_of_bit(reader));
    srl_event_note(a, SRL_DID_DONE, (uint32_t)(b - a->blocks), gen, reader);
    while (SRL_STATE(w) == SRL_READY && SRL_GEN(w) == gen && srl_done_complete(b)) {
        if (srl_retire(a, b, w, SRL_DID_RETIRE))
            break;
        w = srl_load_sc(&b->word);
    }
    return 0;
}

int srl_done(srl_arena *a, uint32_t slot, uint32_t gen, uint64_t nonce, uint32_t reader) {
    int rc = srl_acquire(a, slot, gen, nonce);
    if (rc)
        return rc == -ESTALE ? 0 : rc; /* freed already: nothing left to say */
    rc = done_held(a, srl_at(a, slot), gen, reader);
    srl_release(a, slot);
    return rc;
}

/* ------------------------------------------------------------------------------------------------ discard */

/* By path component: "run/e/g1" is a prefix of "run/e/g1" and "run/e/g1/x", not of "run/e/g10". */
static bool tag_under(const srl_block *b, const char *prefix, uint32_t len) {
    char tag[SRL_TAG_MAX + 8] = {0};
    srl_copy_relaxed(tag, b->tag, SRL_TAG_MAX);
    return memcmp(tag, prefix, len) == 0 && (tag[len] == 0 || tag[len] == '/');
}

static bool discard_one(srl_arena *a, srl_block *b, const char *prefix, uint32_t len) {
    for (;;) {
        uint64_t w = srl_load_sc(&b->word);
        bool ready = SRL_STATE(w) == SRL_READY;
        if (!ready && (SRL_STATE(w) != SRL_WRITING || SRL_FLAGS(w) & SRL_DISCARDED))
            return false;
        if (!tag_under(b, prefix, len)) /* the tag belongs to exactly this word if the CAS succeeds */
            return false;
        if (!ready && srl_cas_sc(&b->word, w, w | (uint64_t)SRL_DISCARDED << 16)) {
            srl_event_note(a, SRL_DID_DISCARD, (uint32_t)(b - a->blocks), SRL_GEN(w),
                           srl_load_relaxed(&b->nbytes));
            return true;
        }
        if (ready && srl_retire(a, b, w, SRL_DID_DISCARD)) {
            srl_finish(a, b);
            return true;
        }
    }
}

int64_t srl_discard(srl_arena *a, const char *prefix, uint32_t len) {
    int64_t n = 0;
    if (len > SRL_TAG_MAX)
        return 0;
    for (uint64_t i = 0; i < srl_table_used(a); i++)
        n += discard_one(a, srl_at(a, (uint32_t)i), prefix, len);
    return n;
}
