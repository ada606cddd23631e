/* Walks over all blocks that change nothing: counters, who has how many bytes, and the consistency check.
 *
 * Runs in attached processes and in inspectors that only map ctl, beside writers, without the lock. Every block
 * is counted as it was at one moment: its fields are believed if the word is the same before and after they
 * were read. One walk makes the counters and every table, so the bytes of a table always sum to used_bytes.
 */
#include "arena_core.h"
#include "arena_atomics.h"
#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

#define RETRIES     8  /* of a block that changes while it is read; then it is counted as it was last seen */
#define COLUMNS_MAX 64 /* columns of one block that have names; the rest is counted with what is in none */

typedef struct {
    uint32_t len;
    char text[SRL_TAG_MAX];
    uint64_t bytes;
} key;

/* Acquire: what is read after these bytes, the word above all, is not older than they are. */
static void copy_acquire(void *to, const void *from, unsigned nbytes) {
    uint64_t words[sizeof(srl_block) / 8];
    for (unsigned i = 0; i < nbytes / 8; i++)
        words[i] = srl_load_acquire((const uint64_t *)from + i);
    memcpy(to, words, nbytes);
}

/* ----------------------------------------------------------------------------------------------- the keys */

static key number_key(uint64_t n, uint64_t bytes) {
    key out = {.len = sizeof n, .bytes = bytes};
    memcpy(out.text, &n, sizeof n);
    return out;
}

/* Second component of run/source/group/episode. */
static key source_key(const srl_block *b, uint64_t bytes) {
    key out = {.bytes = bytes};
    char tag[SRL_TAG_MAX];
    copy_acquire(tag, b->tag, sizeof tag);
    const char *source = srl_source_of(tag, (uint32_t)strnlen(tag, sizeof tag), &out.len);
    if (source)
        memcpy(out.text, source, out.len);
    return out;
}

/* One process per block: the first reader of a freed one, else the owner; an orphan has none. */
static uint64_t holder_of(const srl_block *b, uint64_t w) {
    for (unsigned i = 0; SRL_STATE(w) == SRL_RETIRED && i < 4; i++) {
        uint64_t bits = srl_load_acquire(b->holders + i);
        if (bits)
            return 64 * i + (unsigned)__builtin_ctzll(bits);
    }
    return SRL_FLAGS(w) & SRL_ORPHAN ? SRL_NONE : SRL_OWNER(w);
}

static uint64_t age_of(const srl_block *b, uint64_t now_ns) {
    static const uint64_t below_s[SRL_AGES - 1] = {10, 60, 600, 3600};
    uint64_t birth = srl_load_acquire(&b->birth_ns), age = now_ns > birth ? now_ns - birth : 0, i = 0;
    while (i < SRL_AGES - 1 && age >= below_s[i] * 1000000000u)
        i++;
    return i;
}

/* A column as the tail has it; columns.py writes these. */
typedef struct {
    char name[32];
    uint64_t offset, rows, row_nbytes;
    uint32_t first, rows_per_crc;
} column;

/* Columns of a sealed block in the arena by name, then what is in none (tail, rounding, all of a block without
 * columns) under "". Their bytes sum to the span. -> how many keys */
static unsigned field_keys(const srl_arena *a, const uint8_t *data, const srl_block *b, uint64_t w,
                           uint64_t span, key *out) {
    uint64_t offset = srl_load_acquire(&b->offset), n = srl_load_acquire(&b->nbytes), rest = span;
    uint32_t tail = srl_load32_sc(&b->tail_nbytes), header[4], found = 0;
    uint64_t at = srl_tail_at(n), end = srl_committed_pages(a) * SRL_PAGE;
    bool there = data && SRL_STATE(w) != SRL_WRITING && span && span <= end && offset <= end - span &&
                 n < span && at + tail <= span && tail >= sizeof header;
    if (there) {
        memcpy(header, data + offset + at, sizeof header);
        uint64_t columns = header[0] == SRL_TAIL_MAGIC ? header[1] : 0, fit = (tail - sizeof header) / 64;
        for (; found < columns && found < fit && found < COLUMNS_MAX; found++) {
            column c;
            memcpy(&c, data + offset + at + sizeof header + found * sizeof c, sizeof c);
            uint64_t nbytes = 0;
            if (__builtin_mul_overflow(c.rows, c.row_nbytes, &nbytes) || nbytes > rest)
                break;
            out[found] = (key){.len = (uint32_t)strnlen(c.name, sizeof c.name), .bytes = nbytes};
            memcpy(out[found].text, c.name, out[found].len);
            rest -= nbytes;
        }
    }
    out[found] = (key){.bytes = rest};
    return found + 1;
}

static unsigned keys_of(const srl_arena *a, const srl_walk *walk, unsigned by, const srl_block *b, uint64_t w,
                        uint64_t span, key *out) {
    switch (by) {
    case SRL_BY_SOURCE:
        *out = source_key(b, span);
        return 1;
    case SRL_BY_STEP:
        *out = number_key(srl_load_acquire((const uint64_t *)&b->step), span);
        return 1;
    case SRL_BY_HOLDER:
        *out = number_key(holder_of(b, w), span);
        return 1;
    case SRL_BY_AGE:
        *out = number_key(age_of(b, walk->now_ns), span);
        return 1;
    default:
        return field_keys(a, walk->data, b, w, span, out);
    }
}

/* -------------------------------------------------------------------------------------------- the tables */

/* FNV-1a */
static uint32_t hash_of(const key *k) {
    uint32_t h = 2166136261u;
    for (uint32_t i = 0; i < k->len; i++)
        h = (h ^ (uint8_t)k->text[i]) * 16777619u;
    return h ^ h >> 15;
}

/* The group of a key, found or made; NULL when the table is half full. Neighbours often share one, so the last
 * is tried first. */
static srl_group *group_of(srl_tally *t, const key *k) {
    srl_group *g = t->groups + t->last;
    if (g->taken && g->len == k->len && memcmp(g->key, k->text, k->len) == 0)
        return g;
    for (uint32_t i = hash_of(k);; i++) {
        g = t->groups + (t->last = i & (t->room - 1));
        if (!g->taken)
            break;
        if (g->len == k->len && memcmp(g->key, k->text, k->len) == 0)
            return g;
    }
    if (t->used >= t->room / 2)
        return NULL;
    t->used++;
    *g = (srl_group){.taken = 1, .len = k->len};
    memcpy(g->key, k->text, k->len);
    return g;
}

/* What one walk takes from one block. */
typedef struct {
    uint64_t word, span;
    unsigned n[SRL_BYS]; /* keys of each table, one after the other in `keys` */
    key keys[COLUMNS_MAX + SRL_BYS];
} seen;

static void look(const srl_arena *a, const srl_walk *walk, const srl_block *b, seen *s) {
    for (unsigned left = RETRIES;; left--) {
        uint64_t w = s->word = srl_load_acquire(&b->word);
        if (SRL_STATE(w) == SRL_FREE)
            return;
        key *at = s->keys;
        s->span = srl_load_acquire(&b->span);
        for (unsigned t = 0; t < walk->tallies; t++)
            at += s->n[t] = keys_of(a, walk, walk->tally[t].by, b, w, s->span, at);
        if (!left || srl_load_acquire(&b->word) == w)
            return;
    }
}

static int count_groups(srl_walk *walk, const seen *s) {
    const key *at = s->keys;
    for (unsigned t = 0; t < walk->tallies; at += s->n[t++])
        for (unsigned i = 0; i < s->n[t]; i++) {
            srl_group *g = group_of(walk->tally + t, at + i);
            if (!g)
                return -ENOBUFS;
            g->blocks += SRL_STATE(s->word) != SRL_FREEING;
            g->bytes += at[i].bytes;
        }
    return 0;
}

static void count_block(srl_stats *out, const srl_block *b, uint64_t w, uint64_t span) {
    unsigned state = SRL_STATE(w);
    out->blocks += state != SRL_FREEING;
    out->used_bytes += span;
    if (state == SRL_READY && SRL_FLAGS(w) & SRL_ORPHAN) {
        out->orphaned++;
        out->orphaned_bytes += span;
    }
    if (SRL_FLAGS(w) & SRL_SPILLED) {
        out->spilled++;
        out->spilled_bytes += srl_load_relaxed(&b->offset);
    }
}

/* Fills the counters and the walk's tables, each `by` at most once. -ENOBUFS: a table has more groups than half
 * its room. */
int srl_count(const srl_arena *a, srl_stats *out, srl_walk *walk) {
    const srl_header *h = a->h;
    *out = (srl_stats){.capacity_bytes = (uint64_t)a->max_pages * SRL_PAGE};
    out->committed_bytes = srl_committed_pages(a) * SRL_PAGE;
    out->peak_bytes = srl_load_relaxed(&h->peak_bytes);
    out->waits = srl_load_relaxed(&h->waits);
    walk->now_ns = srl_now_ns(CLOCK_BOOTTIME);
    uint64_t generations = 0, freeing = 0, n = srl_table_used(a);
    seen s;
    for (uint64_t i = 0; i < n; i++) {
        look(a, walk, a->blocks + i, &s);
        generations += SRL_GEN(s.word);
        if (SRL_STATE(s.word) == SRL_FREE)
            continue;
        freeing += SRL_STATE(s.word) == SRL_FREEING;
        count_block(out, a->blocks + i, s.word, s.span);
        if (count_groups(walk, &s))
            return -ENOBUFS;
    }
    out->freed = generations + freeing;
    out->created = out->freed + out->blocks;
    return 0;
}

/* One block as it was at one moment, all of its descriptor; false: it is free, or never stood still. */
bool srl_look_at(const srl_arena *a, uint64_t slot, srl_block *out) {
    const srl_block *b = a->blocks + slot;
    if (slot >= srl_table_used(a))
        return false;
    for (unsigned left = RETRIES; left; left--) {
        uint64_t w = srl_load_acquire(&b->word);
        if (SRL_STATE(w) == SRL_FREE || SRL_STATE(w) >= SRL_FREEING)
            return false;
        copy_acquire(out, b, sizeof *out);
        if (out->word == w && srl_load_acquire(&b->word) == w)
            return true;
    }
    return false;
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

static bool bit_of(const uint64_t *bits, unsigned i) {
    return bits[i / 64] >> i % 64 & 1;
}

static void attached_processes(const srl_arena *a, uint64_t *out) {
    memset(out, 0, SRL_MAX_PROCESSES / 8);
    for (unsigned p = 0; p < a->max_processes; p++)
        out[p / 64] |= (uint64_t)(srl_load_relaxed(&a->processes[p].used) != 0) << p % 64;
}

static void check_block(const srl_arena *a, uint32_t i, uint64_t w, const uint64_t *attached, report *r) {
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
    if (!srl_share_exists(a, b->share))
        BLOCK_FAULT("share %u of %u", b->share, a->shares);
    if (owner >= a->max_processes)
        BLOCK_FAULT("owner %u of %u processes", owner, a->max_processes);
    else if (state == SRL_WRITING && !bit_of(attached, owner))
        BLOCK_FAULT("being written by process %u, which is not attached", owner);
    else if (state == SRL_READY && !(SRL_FLAGS(w) & SRL_ORPHAN) && !bit_of(attached, owner))
        BLOCK_FAULT("owned by process %u, which is not attached, and no orphan", owner);
    uint64_t any = 0;
    for (unsigned word = 0; word < 4; word++) {
        uint64_t bits = srl_load_sc(b->holders + word);
        any |= bits;
        for (bits &= ~attached[word]; bits; bits &= bits - 1)
            BLOCK_FAULT("held by process %u, which is not attached",
                        64 * word + (unsigned)__builtin_ctzll(bits));
    }
    if (state == SRL_RETIRED && !any)
        BLOCK_FAULT("retired, held by nobody, and not freed");
}

static uint64_t free_page_bytes(const srl_arena *a, report *r) {
    uint64_t total = 0, committed = srl_committed_pages(a), guard = committed + 1;
    for (unsigned bin = 0; bin < SRL_BINS; bin++)
        for (uint32_t p = a->h->bins[bin]; p != SRL_NONE; p = a->pages[p].next) {
            if (p >= committed || a->pages[p].kind != SRL_PAGE_FREE || !guard--) {
                FAULT(r, "bin %u: page %u is not the head of a free span\n", bin, p);
                return total;
            }
            total += (uint64_t)a->pages[p].length * SRL_PAGE;
        }
    return total;
}

/* Bytes of free cells in the pages cut into cells, from the page records. */
static uint64_t free_cell_bytes(const srl_arena *a, report *r) {
    uint64_t total = 0, committed = srl_committed_pages(a);
    for (uint64_t p = 0; p < committed;) {
        const srl_page *g = a->pages + p;
        unsigned cls = g->cell_class;
        bool cells = g->kind == SRL_PAGE_CELLS;
        if (cells && cls >= SRL_CELL_CLASSES)
            FAULT(r, "page %lu: cells of class %u\n", p, cls);
        else if (cells)
            total += SRL_PAGE - (uint64_t)g->cells_used * srl_cell_nbytes(cls);
        p += cells || !g->length ? 1 : g->length;
    }
    return total;
}

/* What the blocks own, in all and by share. */
typedef struct {
    uint64_t used, share[SRL_SHARES];
} owned;

/* The faults of one block; none of a moment at which its word was changing. */
static void check_slot(const srl_arena *a, uint32_t i, const uint64_t *attached, owned *sum, report *r) {
    for (unsigned left = RETRIES;; left--) {
        report before = *r;
        uint64_t w = srl_load_acquire(&a->blocks[i].word), span = 0;
        uint32_t share = 0;
        if (SRL_STATE(w) != SRL_FREE) {
            span = srl_load_acquire(&a->blocks[i].span);
            share = srl_load32_sc(&a->blocks[i].share);
            check_block(a, i, w, attached, r);
        }
        if (!left || srl_load_acquire(&a->blocks[i].word) == w) {
            sum->used += span;
            if (share < a->shares)
                sum->share[share] += span;
            return;
        }
        *r = before;
    }
}

static void check_shares(const srl_arena *a, const owned *sum, report *r) {
    for (uint32_t i = 0; i < a->shares; i++) {
        const srl_share *s = a->h->shares + i;
        uint64_t counts = srl_load_relaxed(&s->used);
        if (counts != sum->share[i])
            FAULT(r, "share %u (%.*s) counts %lu bytes, its blocks own %lu\n", i, SRL_SHARE_NAME - 1,
                  i ? s->name : "unnamed", counts, sum->share[i]);
    }
}

/* Every fault found, one line each, into `out`; -> how many. The allocator's totals are faults only if nobody
 * had its lock meanwhile: the caller has it, or looks at the lock's word before and after. */
int srl_fsck(const srl_arena *a, char *out, unsigned out_len) {
    report r = {out, out_len, 0};
    uint64_t attached[SRL_MAX_PROCESSES / 64], n = srl_table_used(a);
    owned sum = {0};
    if (out_len)
        *out = 0;
    if (!srl_counts_are_sane(a))
        FAULT(&r, "%lu descriptors used of %lu committed of %u, %lu pages committed of %u\n",
              a->h->table_used, a->h->table_committed, a->max_blocks, a->h->committed_pages, a->max_pages);
    attached_processes(a, attached);
    for (uint64_t i = 0; i < n; i++)
        check_slot(a, (uint32_t)i, attached, &sum, &r);
    uint64_t free_pages = free_page_bytes(a, &r), free_cells = free_cell_bytes(a, &r);
    uint64_t counted = srl_load_relaxed(&a->h->used_bytes), committed = srl_committed_pages(a) * SRL_PAGE;
    if (sum.used != counted)
        FAULT(&r, "blocks own %lu bytes, the allocator counts %lu\n", sum.used, counted);
    if (sum.used + free_pages + free_cells != committed)
        FAULT(&r, "used %lu + free pages %lu + free cells %lu != committed %lu\n", sum.used, free_pages,
              free_cells, committed);
    check_shares(a, &sum, &r);
    return (int)r.found;
}
