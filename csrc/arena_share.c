/* Shares: what each source can count on, and when one may borrow what the others leave idle.
 *
 * Runs in every process that reserves or frees, under the allocator's lock, and only in an arena that was created
 * with shares. A request within its share is refused for want of room alone, and waits before every borrower. One
 * beyond it takes idle space, as long as afterwards so much stays free that a lender's next blocks need not wait for
 * the borrower's: the other shares' unused guarantees, at most an eighth of the capacity.
 *
 *   borrows(s, span)  <=>  used(s) + span > guaranteed(s)
 *   kept(s)            =   min(sum of max(0, guaranteed(t) - used(t)) over the other shares t, capacity / 8)
 *   admitted          <=>  !borrows or capacity - used_bytes - span >= kept(s)
 */
#include "arena_core.h"
#include "arena_atomics.h"
#include <string.h>

static uint64_t least(uint64_t a, uint64_t b) {
    return a < b ? a : b;
}

static uint64_t capacity(const srl_arena *a) {
    return (uint64_t)a->max_pages * SRL_PAGE;
}

const char *srl_source_of(const char *tag, uint32_t tag_len, uint32_t *len) {
    const char *end = tag + tag_len, *at = memchr(tag, '/', tag_len);
    if (!at++)
        return NULL;
    const char *slash = memchr(at, '/', (size_t)(end - at));
    *len = (uint32_t)((slash ? slash : end) - at);
    return at;
}

uint32_t srl_share_of(const srl_arena *a, const char *tag, uint32_t tag_len) {
    uint32_t len = 0;
    const char *source = srl_source_of(tag, tag_len, &len);
    if (!len || len >= SRL_SHARE_NAME)
        return 0;
    for (uint32_t i = 1; i < a->shares; i++) {
        const char *name = a->h->shares[i].name;
        if (memcmp(name, source, len) == 0 && name[len] == 0)
            return i;
    }
    return 0;
}

/* Of a block's descriptor; an arena without shares looks at none. */
bool srl_share_exists(const srl_arena *a, uint32_t share) {
    return !a->shares || share < a->shares;
}

static uint64_t unused(const srl_share *s) {
    uint64_t guaranteed = srl_load_relaxed(&s->guaranteed), used = srl_load_relaxed(&s->used);
    return guaranteed > used ? guaranteed - used : 0;
}

bool srl_share_covers(const srl_arena *a, uint32_t share, uint64_t span) {
    return span <= unused(a->h->shares + share);
}

/* What a borrower of this share leaves alone now. */
uint64_t srl_share_kept(const srl_arena *a, uint32_t share) {
    uint64_t kept = 0, most = capacity(a) / 8;
    for (uint32_t i = 0; i < a->shares; i++)
        kept += i == share ? 0 : least(unused(a->h->shares + i), most);
    return least(kept, most);
}

bool srl_share_lends(const srl_arena *a, uint32_t share, uint64_t span) {
    uint64_t taken = srl_load_relaxed(&a->h->used_bytes) + srl_share_kept(a, share);
    return taken <= capacity(a) && span <= capacity(a) - taken;
}

/* The largest span that this share can ever be granted: a larger one is not worth a wait. */
uint64_t srl_share_limit(const srl_arena *a, uint32_t share) {
    if (!a->shares)
        return capacity(a);
    uint64_t guaranteed = srl_load_relaxed(&a->h->shares[share].guaranteed),
             borrowing = capacity(a) - capacity(a) / 8;
    return guaranteed > borrowing ? guaranteed : borrowing;
}

void srl_share_count(srl_arena *a, uint32_t share, uint64_t delta) {
    if (share >= a->shares) {
        a->corrupt = true;
        return;
    }
    uint64_t *used = &a->h->shares[share].used;
    srl_store_relaxed(used, *used + delta);
}

void srl_share_clear(srl_arena *a) {
    for (uint32_t i = 0; i < a->shares; i++)
        srl_store_relaxed(&a->h->shares[i].used, 0);
}
