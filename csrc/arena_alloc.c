/* Spans of the data file: pages by segregated good fit with coalescing, cells below 64 KiB, growth, and the rebuild
 * of all that.
 *
 * Everything here runs under the allocator's lock, in whichever process has it. Nothing here is the truth:
 * pages[], bins and cell lists are a cache of blocks[], so a holder that dies in the middle costs a rebuild
 * and nothing else. A bin holds free spans of nearly equal length (8 bins per doubling); a fit is looked for
 * in the own bin first, among spans this process wrote last, because its page tables still map them.
 */
#include "arena_core.h"
#include "arena_atomics.h"
#include <errno.h>
#include <string.h>

/* Spans of the own bin that are examined (nearly always all of it) before a longer one is cut. */
#define LOOKS 32

static unsigned bin_of(uint32_t n) {
    if (n < 8)
        return n;
    unsigned log = 31 - (unsigned)__builtin_clz(n);
    return 8 * (log - 2) + (n >> (log - 3) & 7);
}

static unsigned cells_of(unsigned cls) {
    return SRL_PAGE / srl_cell_nbytes(cls);
}

/* The least class whose cells have n bytes: four per doubling, all multiples of 64 bytes. */
static unsigned cell_class(uint64_t n) {
    if (n <= srl_cell_nbytes(0))
        return 0;
    unsigned above = (unsigned)(n - 1) / 64, doubling = 29 - (unsigned)__builtin_clz(above);
    return 4 * doubling + (above >> doubling) - 3;
}

uint64_t srl_span_nbytes(uint64_t total) {
    if (total == 0)
        return 0;
    if (total <= SRL_CELL_MAX)
        return srl_cell_nbytes(cell_class(total));
    return (total + SRL_PAGE - 1) / SRL_PAGE * SRL_PAGE;
}

/* The record of a page that a list, a bin or a length names. Where there is no such page, ctl contradicts itself:
 * what is stored goes nowhere, and nothing more is handed out. */
static srl_page *page_at(srl_arena *a, uint64_t p) {
    if (p < a->max_pages)
        return a->pages + p;
    a->corrupt = true;
    return &a->nowhere;
}

static void list_push(srl_arena *a, uint32_t *head, uint32_t p) {
    srl_page *r = page_at(a, p);
    SRL_SET(r->prev, SRL_NONE);
    SRL_SET(r->next, *head);
    if (*head != SRL_NONE)
        SRL_SET(page_at(a, *head)->prev, p);
    SRL_SET(*head, p);
}

static void list_remove(srl_arena *a, uint32_t *head, uint32_t p) {
    srl_page *r = page_at(a, p);
    if (r->prev == SRL_NONE)
        SRL_SET(*head, r->next);
    else
        SRL_SET(page_at(a, r->prev)->next, r->next);
    if (r->next != SRL_NONE)
        SRL_SET(page_at(a, r->next)->prev, r->prev);
}

static void mark_ends(srl_arena *a, uint32_t first, uint32_t n, unsigned kind, uint32_t writer) {
    srl_page *ends[2] = {page_at(a, first), page_at(a, (uint64_t)first + n - 1)};
    for (int i = 0; i < 2; i++) {
        SRL_SET(ends[i]->kind, (uint8_t)kind);
        SRL_SET(ends[i]->length, n);
        SRL_SET(ends[i]->last_writer, writer);
    }
}

static void bin_insert(srl_arena *a, uint32_t first, uint32_t n, uint32_t writer) {
    unsigned bin = bin_of(n);
    mark_ends(a, first, n, SRL_PAGE_FREE, writer);
    list_push(a, a->h->bins + bin, first);
    SRL_SET(a->h->bin_map[bin / 64], a->h->bin_map[bin / 64] | UINT64_C(1) << bin % 64);
}

static void bin_remove(srl_arena *a, uint32_t first) {
    unsigned bin = bin_of(page_at(a, first)->length);
    list_remove(a, a->h->bins + bin, first);
    if (a->h->bins[bin] == SRL_NONE)
        SRL_SET(a->h->bin_map[bin / 64], a->h->bin_map[bin / 64] & ~(UINT64_C(1) << bin % 64));
}

/* The first non-empty bin at or above `bin`, or SRL_BINS. */
static unsigned bin_from(const srl_arena *a, unsigned bin) {
    for (unsigned word = bin / 64; word < SRL_BINS / 64; word++) {
        uint64_t bits = a->h->bin_map[word];
        if (word == bin / 64)
            bits &= ~UINT64_C(0) << bin % 64;
        if (bits)
            return word * 64 + (unsigned)__builtin_ctzll(bits);
    }
    return SRL_BINS;
}

static bool heads_free_span(const srl_arena *a, uint32_t p) {
    uint64_t end = srl_committed_pages(a);
    return p < end && a->pages[p].kind == SRL_PAGE_FREE && a->pages[p].length - 1u < end - p;
}

/* In the own bin: a span this process wrote last, else the shortest that fits, among the first `looks`. */
static uint32_t fit_in_bin(srl_arena *a, unsigned bin, uint32_t n, unsigned looks) {
    uint32_t best = SRL_NONE;
    for (uint32_t p = a->h->bins[bin]; p != SRL_NONE && looks; p = a->pages[p].next, looks--) {
        if (!heads_free_span(a, p)) {
            a->corrupt = true;
            return SRL_NONE;
        }
        const srl_page *r = a->pages + p;
        if (r->length < n)
            continue;
        if (r->last_writer == a->self)
            return p;
        if (best == SRL_NONE || r->length < a->pages[best].length)
            best = p;
    }
    return best;
}

static uint32_t find_span(srl_arena *a, uint32_t n) {
    unsigned own = bin_of(n);
    uint32_t p = fit_in_bin(a, own, n, LOOKS);
    if (p != SRL_NONE)
        return p;
    unsigned above = bin_from(a, own + 1);
    if (above < SRL_BINS)
        return fit_in_bin(a, above, n, LOOKS);
    return fit_in_bin(a, own, n, a->max_pages); /* the whole bin, before anybody is refused */
}

static uint32_t pages_take(srl_arena *a, uint32_t n) {
    uint32_t p = find_span(a, n);
    if (p == SRL_NONE)
        return SRL_NONE;
    uint32_t length = a->pages[p].length, writer = a->pages[p].last_writer;
    bin_remove(a, p);
    if (length > n)
        bin_insert(a, p + n, length - n, writer);
    mark_ends(a, p, n, SRL_PAGE_USED, a->self);
    return p;
}

static void pages_give(srl_arena *a, uint32_t first, uint32_t n, uint32_t writer) {
    uint64_t end = srl_committed_pages(a);
    if (first > 0 && a->pages[first - 1].kind == SRL_PAGE_FREE) {
        uint32_t left = a->pages[first - 1].length;
        if (left > first) {
            a->corrupt = true;
            return;
        }
        bin_remove(a, first - left);
        first -= left;
        n += left;
    }
    if (first + n < end && a->pages[first + n].kind == SRL_PAGE_FREE) {
        uint32_t right = a->pages[first + n].length;
        if (right > end - first - n) {
            a->corrupt = true;
            return;
        }
        bin_remove(a, first + n);
        n += right;
    }
    bin_insert(a, first, n, writer);
}

static uint32_t cells_page_new(srl_arena *a, unsigned cls) {
    uint32_t p = pages_take(a, 1);
    if (p == SRL_NONE)
        return p;
    srl_page *r = a->pages + p;
    SRL_SET(r->kind, SRL_PAGE_CELLS);
    SRL_SET(r->cell_class, (uint8_t)cls);
    SRL_SET(r->cells_used, 0);
    SRL_ZERO(r->cells, sizeof r->cells);
    list_push(a, a->h->cell_pages + cls, p);
    return p;
}

static unsigned first_clear(const uint64_t *bits) {
    for (unsigned word = 0; word < 4; word++)
        if (~bits[word])
            return word * 64 + (unsigned)__builtin_ctzll(~bits[word]);
    return 256;
}

/* Whether page p is cut into cells of this class, as the list, or the block that owns a cell, has it. */
static bool is_cut_into(const srl_arena *a, uint32_t p, unsigned cls) {
    return p < srl_committed_pages(a) && a->pages[p].kind == SRL_PAGE_CELLS && a->pages[p].cell_class == cls;
}

static int cell_take(srl_arena *a, unsigned cls, uint64_t *offset) {
    uint32_t p = a->h->cell_pages[cls];
    if (p == SRL_NONE)
        p = cells_page_new(a, cls);
    if (p == SRL_NONE)
        return a->corrupt ? -EUCLEAN : -ENOSPC;
    srl_page *r = page_at(a, p);
    unsigned cell = first_clear(r->cells);
    if (!is_cut_into(a, p, cls) || cell >= cells_of(cls)) {
        a->corrupt = true;
        return -EUCLEAN;
    }
    SRL_SET(r->cells[cell / 64], r->cells[cell / 64] | UINT64_C(1) << cell % 64);
    SRL_SET(r->cells_used, (uint16_t)(r->cells_used + 1));
    if (r->cells_used == cells_of(cls))
        list_remove(a, a->h->cell_pages + cls, p);
    *offset = (uint64_t)p * SRL_PAGE + (uint64_t)cell * srl_cell_nbytes(cls);
    return 0;
}

static int cell_give(srl_arena *a, uint64_t offset, unsigned cls, uint32_t writer) {
    uint32_t p = (uint32_t)(offset / SRL_PAGE);
    srl_page *r = page_at(a, p);
    unsigned cell = (unsigned)(offset % SRL_PAGE / srl_cell_nbytes(cls));
    if (!is_cut_into(a, p, cls) || !(r->cells[cell / 64] >> cell % 64 & 1)) {
        a->corrupt = true;
        return -EUCLEAN;
    }
    SRL_SET(r->cells[cell / 64], r->cells[cell / 64] & ~(UINT64_C(1) << cell % 64));
    SRL_SET(r->cells_used, (uint16_t)(r->cells_used - 1));
    if (r->cells_used + 1u == cells_of(cls))
        list_push(a, a->h->cell_pages + cls, p);
    if (r->cells_used)
        return 0;
    list_remove(a, a->h->cell_pages + cls, p);
    pages_give(a, p, 1, writer);
    return 0;
}

/* Bytes that a block of this share takes; what it gives back as their two's complement. */
static void count_used(srl_arena *a, uint32_t share, uint64_t delta) {
    srl_store_relaxed(&a->h->used_bytes, a->h->used_bytes + delta);
    if (a->shares)
        srl_share_count(a, share, delta);
}

/* Whole pages, or one cell, inside what is committed. */
static bool span_fits(const srl_arena *a, uint64_t offset, uint64_t span) {
    uint64_t end = srl_committed_pages(a) * SRL_PAGE;
    if (span > end || offset > end - span || span != srl_span_nbytes(span))
        return false;
    if (span < SRL_PAGE)
        return span == 0 || offset % SRL_PAGE % span == 0;
    return offset % SRL_PAGE == 0;
}

int srl_span_take(srl_arena *a, uint32_t share, uint64_t span, uint64_t *offset) {
    *offset = 0;
    if (span == 0)
        return 0;
    if (span < SRL_PAGE) {
        int rc = cell_take(a, cell_class(span), offset);
        if (rc)
            return rc;
    } else {
        uint32_t p = span / SRL_PAGE < SRL_NONE ? pages_take(a, (uint32_t)(span / SRL_PAGE)) : SRL_NONE;
        if (p == SRL_NONE)
            return a->corrupt ? -EUCLEAN : -ENOSPC;
        *offset = (uint64_t)p * SRL_PAGE;
    }
    if (a->corrupt)
        return -EUCLEAN;
    count_used(a, share, span);
    if (a->h->used_bytes > a->h->peak_bytes)
        srl_store_relaxed(&a->h->peak_bytes, a->h->used_bytes);
    return 0;
}

int srl_span_give(srl_arena *a, const srl_block *b, uint32_t writer) {
    uint64_t offset = b->offset, span = b->span;
    uint32_t share = b->share;
    if (span == 0)
        return 0;
    if (!span_fits(a, offset, span) || !srl_share_exists(a, share)) {
        a->corrupt = true;
        return -EUCLEAN;
    }
    count_used(a, share, -span);
    if (span < SRL_PAGE)
        return cell_give(a, offset, cell_class(span), writer);
    pages_give(a, (uint32_t)(offset / SRL_PAGE), (uint32_t)(span / SRL_PAGE), writer);
    return 0;
}

/* ------------------------------------------------------------------------------------------------- growth */

int srl_commit_pages(srl_arena *a, uint64_t from, uint64_t to, uint64_t deadline_ns) {
    int rc = srl_lock(a, deadline_ns);
    if (rc)
        return rc;
    if (a->h->committed_pages == from && to <= a->max_pages) { /* else somebody committed the same step */
        pages_give(a, (uint32_t)from, (uint32_t)(to - from), SRL_NONE);
        srl_store_relaxed(&a->h->committed_pages, to);
        a->freed = true;
    }
    srl_unlock(a);
    return 0;
}

int srl_commit_table(srl_arena *a, uint64_t from, uint64_t to, uint64_t deadline_ns) {
    int rc = srl_lock(a, deadline_ns);
    if (rc)
        return rc;
    if (a->h->table_committed == from && to <= a->max_blocks)
        srl_store_relaxed(&a->h->table_committed, to);
    srl_unlock(a);
    return 0;
}

/* ------------------------------------------------------------------------------------------------ rebuild */

/* Whether a descriptor that is not FREE can be believed. A spilled block owns no bytes of data. */
static bool block_fits(const srl_arena *a, const srl_block *b, uint64_t w) {
    if (SRL_FLAGS(w) & SRL_SPILLED)
        return b->span == 0 && b->nbytes <= b->offset;
    return b->nbytes <= b->span && span_fits(a, b->offset, b->span) && srl_share_exists(a, b->share);
}

static void clear_caches(srl_arena *a) {
    srl_header *h = a->h;
    SRL_ZERO(a->pages, srl_committed_pages(a) * sizeof *a->pages);
    SRL_ZERO(h->bin_map, sizeof h->bin_map);
    for (unsigned i = 0; i < SRL_BINS; i++)
        SRL_SET(h->bins[i], SRL_NONE);
    for (unsigned i = 0; i < SRL_CELL_CLASSES; i++)
        SRL_SET(h->cell_pages[i], SRL_NONE);
    SRL_SET(h->free_slot, 0);
    srl_store_relaxed(&h->used_bytes, 0);
    srl_share_clear(a);
}

static int place_block(srl_arena *a, const srl_block *b) {
    if (b->span == 0)
        return 0;
    srl_page *r = page_at(a, b->offset / SRL_PAGE);
    count_used(a, b->share, b->span);
    if (b->span >= SRL_PAGE) {
        if (r->length)
            return -EUCLEAN; /* two blocks begin on one page */
        mark_ends(a, (uint32_t)(b->offset / SRL_PAGE), (uint32_t)(b->span / SRL_PAGE), SRL_PAGE_USED,
                  SRL_NONE);
        return 0;
    }
    unsigned cls = cell_class(b->span), cell = (unsigned)(b->offset % SRL_PAGE / b->span);
    uint64_t bit = UINT64_C(1) << cell % 64;
    if (r->length && (r->kind != SRL_PAGE_CELLS || r->cell_class != cls || r->cells[cell / 64] & bit))
        return -EUCLEAN;
    SRL_SET(r->length, 1);
    SRL_SET(r->kind, SRL_PAGE_CELLS);
    SRL_SET(r->cell_class, (uint8_t)cls);
    SRL_SET(r->cells[cell / 64], r->cells[cell / 64] | bit);
    SRL_SET(r->cells_used, (uint16_t)(r->cells_used + 1));
    return 0;
}

static void link_what_is_free(srl_arena *a) {
    uint64_t end = srl_committed_pages(a);
    for (uint64_t p = 0; p < end;) {
        srl_page *r = a->pages + p;
        if (r->length) {
            if (r->kind == SRL_PAGE_CELLS && r->cells_used < cells_of(r->cell_class))
                list_push(a, a->h->cell_pages + r->cell_class, (uint32_t)p);
            p += r->length;
            continue;
        }
        uint64_t q = p;
        while (q < end && !a->pages[q].length)
            q++;
        bin_insert(a, (uint32_t)p, (uint32_t)(q - p), SRL_NONE);
        p = q;
    }
}

static int check_all(const srl_arena *a) {
    for (uint64_t i = 0; i < srl_table_used(a); i++) {
        const srl_block *b = a->blocks + i;
        uint64_t w = srl_load_sc(&b->word);
        if (SRL_STATE(w) > SRL_FREEING || (SRL_STATE(w) != SRL_FREE && !block_fits(a, b, w)))
            return -EUCLEAN;
    }
    return 0;
}

/* After a takeover: FREEING becomes FREE, and every cache is made anew from the descriptors. */
int srl_rebuild(srl_arena *a) {
    srl_header *h = a->h;
    if (!srl_counts_are_sane(a))
        return -EUCLEAN;
    int rc = check_all(a);
    if (rc)
        return rc; /* before anything is changed */
    clear_caches(a);
    for (uint64_t i = srl_table_used(a); i-- > 0;) {
        srl_block *b = a->blocks + i;
        uint64_t w = srl_load_sc(&b->word);
        if (SRL_STATE(w) == SRL_FREEING) {
            srl_drop_spilled(a, b, w);
            w = SRL_WORD(SRL_GEN(w) + 1, SRL_FREE, 0, 0);
            srl_store_sc(&b->word, w);
        }
        if (SRL_STATE(w) == SRL_FREE) {
            if (SRL_GEN(w) == UINT32_MAX)
                continue;
            SRL_SET(b->offset, h->free_slot);
            SRL_SET(h->free_slot, i + 1);
        } else if ((rc = place_block(a, b)) != 0)
            return rc;
    }
    a->corrupt = false;
    link_what_is_free(a);
    return a->corrupt ? -EUCLEAN : 0;
}
