/* The layout of a ctl file: how large it is, how it is made, and whether a mapped one can be believed. */
#include "arena_core.h"
#include "arena_atomics.h"
#include <errno.h>
#include <string.h>
#include <time.h>

#define ALIGN(n, to) (((n) + (to) - 1) / (to) * (to))

static uint64_t pages_of(uint64_t capacity) {
    return capacity / SRL_PAGE;
}
static uint64_t processes_off(void) {
    return 4096;
}
static uint64_t events_off(void) {
    return processes_off() + SRL_MAX_PROCESSES * sizeof(srl_process);
}
static uint64_t pending_off(void) {
    return events_off() + SRL_EVENTS * sizeof(srl_event);
}
static uint64_t pages_off(uint32_t max_blocks) {
    return pending_off() + ALIGN(max_blocks / 8, 4096);
}

static uint64_t blocks_off(uint64_t capacity, uint32_t max_blocks) {
    return pages_off(max_blocks) + ALIGN(pages_of(capacity) * sizeof(srl_page), 65536);
}

uint64_t srl_now_ns(int clock) {
    struct timespec t;
    clock_gettime(clock, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

/* The smallest cell is 256 bytes, so this many descriptors are enough for any mix but empty payloads. */
uint32_t srl_max_blocks(uint64_t capacity) {
    uint64_t n = capacity / 256;
    if (n < 4096)
        n = 4096;
    if (n > (UINT64_C(8) << 20))
        n = UINT64_C(8) << 20;
    return (uint32_t)ALIGN(n, 4096);
}

uint64_t srl_ctl_size(uint64_t capacity, uint32_t max_blocks) {
    return blocks_off(capacity, max_blocks) + (uint64_t)max_blocks * sizeof(srl_block);
}

uint64_t srl_ctl_fixed_size(uint32_t max_blocks) {
    return pages_off(max_blocks);
}

void srl_format(void *ctl, uint64_t capacity, const srl_header *given) {
    srl_header *h = ctl, made = *given;
    made.magic = 0;
    made.version = SRL_VERSION;
    made.capacity = capacity;
    made.max_pages = (uint32_t)pages_of(capacity);
    made.max_blocks = srl_max_blocks(capacity);
    made.ctl_size = srl_ctl_size(capacity, made.max_blocks);
    made.events_off = events_off();
    made.pending_off = pending_off();
    made.pages_off = pages_off(made.max_blocks);
    made.blocks_off = blocks_off(capacity, made.max_blocks);
    made.created_ns = srl_now_ns(CLOCK_BOOTTIME);
    made.next_ticket = 1;
    for (unsigned i = 0; i < SRL_BINS; i++)
        made.bins[i] = SRL_NONE;
    for (unsigned i = 0; i < SRL_CELL_CLASSES; i++)
        made.cell_pages[i] = SRL_NONE;
    SRL_SET(*h, made);
    srl_store_release(&h->magic, SRL_MAGIC);
}

int srl_open(srl_arena *a, void *ctl, uint64_t ctl_size) {
    srl_header *h = ctl;
    if (ctl_size < processes_off())
        return -EUCLEAN;
    if (srl_load_acquire(&h->magic) != SRL_MAGIC)
        return -EUCLEAN;
    if (h->version != SRL_VERSION)
        return -EPROTO;                               /* before anything that a version may move */
    uint64_t used = srl_load_acquire(&h->table_used); /* before what it is compared with: both only grow */
    uint64_t table = srl_load_acquire(&h->table_committed), pages = srl_load_acquire(&h->committed_pages);
    uint64_t capacity = h->capacity;
    uint32_t processes = h->max_processes, shares = h->share_count;
    if (capacity == 0 || capacity % SRL_PAGE || capacity / SRL_PAGE >= SRL_NONE ||
        h->max_blocks != srl_max_blocks(capacity) || h->ctl_size != srl_ctl_size(capacity, h->max_blocks) ||
        h->ctl_size > ctl_size || h->max_pages != pages_of(capacity) || h->events_off != events_off() ||
        h->pending_off != pending_off() || h->pages_off != pages_off(h->max_blocks) ||
        h->blocks_off != blocks_off(capacity, h->max_blocks) || processes == 0 ||
        processes > SRL_MAX_PROCESSES || shares > SRL_SHARES || pages > h->max_pages ||
        table > h->max_blocks || used > table)
        return -EUCLEAN;
    memset(a, 0, sizeof *a);
    a->h = h;
    a->processes = (void *)((char *)ctl + processes_off());
    a->events = (void *)((char *)ctl + h->events_off);
    a->pending = (void *)((char *)ctl + h->pending_off);
    a->pages = (void *)((char *)ctl + h->pages_off);
    a->blocks = (void *)((char *)ctl + h->blocks_off);
    a->max_pages = (uint32_t)pages_of(capacity);
    a->max_blocks = srl_max_blocks(capacity);
    a->max_processes = processes;
    a->shares = shares;
    a->self = SRL_NONE;
    pthread_mutex_init(&a->mutex, NULL);
    return 0;
}

/* ---------------------------------------------------------------- counts that may change, or have been scribbled on */

static uint64_t at_most(uint64_t n, uint64_t limit) {
    return n < limit ? n : limit;
}

uint64_t srl_table_used(const srl_arena *a) {
    uint64_t used = srl_load_relaxed(&a->h->table_used);
    return at_most(used, at_most(srl_load_relaxed(&a->h->table_committed), a->max_blocks));
}

uint64_t srl_committed_pages(const srl_arena *a) {
    return at_most(srl_load_relaxed(&a->h->committed_pages), a->max_pages);
}

bool srl_counts_are_sane(const srl_arena *a) {
    uint64_t used = srl_load_acquire(&a->h->table_used); /* first: both only grow */
    uint64_t table = srl_load_relaxed(&a->h->table_committed);
    return used <= table && table <= a->max_blocks &&
           srl_load_relaxed(&a->h->committed_pages) <= a->max_pages;
}
