/* The C core of the arena: the operations, over (base address, size) alone.
 *
 * Called by shmrl/arena/_arena.pyx in every attached process, and by tests/arena/core_driver.c in threads.
 * No names, no descriptors, no allocation, no Python: what a death or a file is, callbacks know. Every function
 * returns 0 (or a count) or -errno:
 *   -ESTALE  freed, or another generation    -EBUSY      still being written
 *   -EPERM   not the owner                   -ENODATA    never shipped
 *   -ENOSPC  no space                        -ECANCELED  discarded meanwhile
 *   -EMLINK  more committed pages wanted     -EXFULL     more descriptors wanted
 *   -EAGAIN  the lock was busy               -ETIMEDOUT  the lock's live holder kept it
 *   -EUCLEAN control words contradict          -EPROTO    another SRL_VERSION
 *   -ENOBUFS more groups than a table has room for
 *
 * Concurrency inside a process: srl_acquire, srl_release, srl_ship and srl_done use the private counts, so
 * the caller holds one mutex around them (the GIL). Everything else may run in any thread. The allocator's
 * lock has a private mutex in front.
 */
#ifndef SRL_ARENA_CORE_H
#define SRL_ARENA_CORE_H

#include "arena_layout.h"
#include <pthread.h>
#include <stdbool.h>

/* 1: process `p` is dead, proved by the kernel; 0: alive or not known. Never asked about the caller's own. */
typedef int (*srl_is_dead_fn)(void *ctx, unsigned p);

/* Removes the file of a spilled block, if it is there. May be called twice, and under the lock. */
typedef void (*srl_drop_file_fn)(void *ctx, uint32_t slot, uint32_t gen);

typedef struct {
    uint32_t count, generation; /* holds of this process on a slot, and of which generation */
} srl_hold;

typedef struct {
    srl_header *h;
    srl_process *processes;
    srl_event *events;
    uint64_t *pending;
    srl_page *pages;
    srl_block *blocks;
    /* of the header as it was checked: every index and count read from ctl later is bounded by these */
    uint32_t max_pages, max_blocks, max_processes, shares;
    uint32_t self;   /* own process index, SRL_NONE for an inspector */
    srl_hold *holds; /* [max_blocks], zeroed, private to this process */
    srl_is_dead_fn is_dead;
    srl_drop_file_fn drop_file; /* NULL: no spill directory */
    void *ctx;
    pthread_mutex_t mutex; /* in front of the shared lock: owner == self then means a dead predecessor */
    bool freed;            /* under the lock: space came back, wake the queue after letting go */
    bool corrupt;          /* under the lock: an index in ctl led nowhere; this process reserves no more */
    srl_page nowhere;      /* where such an index leads instead */
    unsigned nonces_left;  /* under the lock: random words not yet used */
    uint64_t nonces[128];
} srl_arena;

typedef struct {
    uint64_t nbytes, room; /* payload; bytes wanted behind it for the tail */
    const char *tag;
    uint32_t tag_len;
    bool spill;                /* a file, which the caller makes, instead of a span */
    bool borrows;              /* out, also of a refusal: beyond the share of its source */
    uint32_t share;            /* out */
    uint32_t slot, generation; /* out */
    uint64_t nonce, offset;    /* out; SPILLED: bytes of its file */
} srl_request;

typedef struct {
    uint64_t blocks, used_bytes, peak_bytes, committed_bytes, capacity_bytes, created, freed, orphaned,
        orphaned_bytes, spilled, spilled_bytes, waits;
} srl_stats;

/* What bytes are added up by. A key is text, or 8 bytes: step (-1 none), process (SRL_NONE: an orphan), age. */
enum srl_by { SRL_BY_SOURCE, SRL_BY_STEP, SRL_BY_HOLDER, SRL_BY_AGE, SRL_BY_FIELD, SRL_BYS };
#define SRL_AGES 5 /* under 10 s, 1 min, 10 min, 1 h; older */

typedef struct {
    uint64_t blocks, bytes;
    uint32_t taken, len;
    char key[SRL_TAG_MAX];
} srl_group;

typedef struct {
    uint32_t by, room, used, last; /* groups[room], zeroed; room is a power of two */
    srl_group *groups;
} srl_tally;

typedef struct {
    const uint8_t *data; /* for SRL_BY_FIELD; may be NULL */
    uint64_t now_ns;     /* out */
    unsigned tallies;
    srl_tally tally[SRL_BYS];
} srl_walk;

/* layout, arena_open.c */
uint64_t srl_ctl_size(uint64_t capacity, uint32_t max_blocks);
uint64_t srl_ctl_fixed_size(uint32_t max_blocks); /* what must be committed before srl_format */
uint32_t srl_max_blocks(uint64_t capacity);
void srl_format(void *ctl, uint64_t capacity, const srl_header *given); /* the magic last */
int srl_open(srl_arena *a, void *ctl, uint64_t ctl_size);
uint64_t srl_table_used(const srl_arena *a); /* at most what there can be, as is the next */
uint64_t srl_committed_pages(const srl_arena *a);
bool srl_counts_are_sane(const srl_arena *a);
uint64_t srl_now_ns(int clock);

/* events, arena_events.c: any thread, no lock, never waits */
void srl_event_note(srl_arena *a, unsigned kind, uint32_t slot, uint32_t gen, uint64_t detail);
/* out[SRL_EVENTS], oldest first */
unsigned srl_events_since(const srl_arena *a, uint64_t first, srl_event *out);
bool srl_event_ending(const srl_arena *a, uint32_t slot, uint32_t gen, srl_event *out);

/* the allocator's lock and the queue for space, arena_lock.c. deadline_ns: CLOCK_MONOTONIC, 0 = no wait */
int srl_lock(srl_arena *a, uint64_t deadline_ns);
void srl_unlock(srl_arena *a);
void srl_drain_if_free(srl_arena *a); /* returns pending blocks if the lock is free; never waits */
unsigned srl_lock_owner(const srl_arena *a);
void srl_queue_enter(srl_arena *a, bool borrows);
void srl_queue_class(srl_arena *a, bool borrows); /* of the ticket that it has, if it has one */
void srl_queue_leave(srl_arena *a);
bool srl_queue_first(const srl_arena *a, bool borrows);
unsigned srl_queue_others(const srl_arena *a, uint64_t *since_ns);
void srl_space_wait(srl_arena *a, uint32_t seen, uint64_t timeout_ns);
void srl_space_wake(srl_arena *a);

/* spans, under the lock, arena_alloc.c */
uint64_t srl_span_nbytes(uint64_t total);
int srl_span_take(srl_arena *a, uint32_t share, uint64_t span, uint64_t *offset);
int srl_span_give(srl_arena *a, const srl_block *b, uint32_t last_writer);
int srl_rebuild(srl_arena *a);

/* growth, arena_alloc.c: takes the lock; the caller has committed the bytes already */
int srl_commit_pages(srl_arena *a, uint64_t from, uint64_t to, uint64_t deadline_ns);
int srl_commit_table(srl_arena *a, uint64_t from, uint64_t to, uint64_t deadline_ns);

/* shares, under the lock, arena_share.c */
const char *srl_source_of(const char *tag, uint32_t tag_len, uint32_t *len); /* NULL: the tag has none */
uint32_t srl_share_of(const srl_arena *a, const char *tag, uint32_t tag_len);
bool srl_share_exists(const srl_arena *a, uint32_t share);
bool srl_share_covers(const srl_arena *a, uint32_t share, uint64_t span);
bool srl_share_lends(const srl_arena *a, uint32_t share, uint64_t span);
uint64_t srl_share_kept(const srl_arena *a, uint32_t share);
uint64_t srl_share_limit(const srl_arena *a, uint32_t share);
void srl_share_count(srl_arena *a, uint32_t share, uint64_t delta);
void srl_share_clear(srl_arena *a);

/* blocks, arena_block.c */
int srl_reserve(srl_arena *a, srl_request *r, uint64_t deadline_ns);
int srl_seal(srl_arena *a, uint32_t slot, uint32_t gen, uint32_t tail_nbytes, uint32_t crc, bool checked,
             bool held);
int srl_abort(srl_arena *a, uint32_t slot, uint32_t gen);
int srl_acquire(srl_arena *a, uint32_t slot, uint32_t gen, uint64_t nonce);
void srl_release(srl_arena *a, uint32_t slot);
int srl_adopt(srl_arena *a, uint32_t slot, uint32_t gen, uint64_t nonce);
int srl_free(srl_arena *a, uint32_t slot, uint32_t gen, uint64_t nonce);
int srl_ship(srl_arena *a, uint32_t slot, uint32_t gen, uint64_t nonce, uint32_t readers, int64_t step);
int srl_done(srl_arena *a, uint32_t slot, uint32_t gen, uint64_t nonce, uint32_t reader);
int64_t srl_discard(srl_arena *a, const char *prefix, uint32_t len);
bool srl_retire(srl_arena *a, srl_block *b, uint64_t w, unsigned kind);
void srl_finish(srl_arena *a, srl_block *b);
void srl_drain(srl_arena *a); /* under the lock: returns every pending block */
bool srl_done_complete(const srl_block *b);
void srl_pend(srl_arena *a, uint32_t slot);
void srl_drop_spilled(srl_arena *a, const srl_block *b, uint64_t w);

/* recovery, arena_sweep.c */
void srl_sweep(srl_arena *a, uint32_t process); /* the caller holds byte 256 + process */
int64_t srl_expire_orphans(srl_arena *a);

/* inspection, without the lock, arena_walk.c */
int srl_count(const srl_arena *a, srl_stats *out, srl_walk *walk);
bool srl_look_at(const srl_arena *a, uint64_t slot, srl_block *out);
int srl_fsck(const srl_arena *a, char *out, unsigned out_len);

/* bytes: copy.c, crc32c.c, avx512.c */
uint64_t srl_plain_tail(uint64_t nbytes); /* room behind a payload without columns */
uint32_t srl_fill(void *to, const void *from, uint64_t nbytes, bool hot, bool checksum, uint32_t *crc);
uint32_t srl_crc32c(uint32_t crc, const void *bytes, size_t nbytes);
/* Continues crc[0..2] over the n bytes at bytes, bytes + block and bytes + 2 * block. */
void srl_crc_three(uint32_t *crc, const void *bytes, size_t block, size_t n);
void srl_crc_blocks(const void *bytes, size_t nbytes, size_t block, uint32_t *out); /* one crc per block */
/* Copies, with a crc for each `block` bytes; what is large goes around the caches, on several cores. */
void srl_copy_blocks(void *to, const void *from, uint64_t nbytes, uint64_t block, uint32_t *crcs);
void srl_copy_around(void *to, const void *from, uint64_t nbytes); /* the same without */
bool srl_wide(void);                                             /* the machine has what the next six need */
void srl_wide_stream(void *to, const void *from, size_t nbytes); /* around the caches; to: aligned to 64 */
uint32_t srl_wide_crc(uint32_t crc, const void *bytes, size_t nbytes);
/* Copies -> crc32c, continued; streaming: around the caches, to aligned to 64 then, and srl_wide_fence() behind it. */
uint32_t srl_wide_copy(uint32_t crc, void *to, const void *from, size_t nbytes, bool streaming);
/* Three blocks of a multiple of 512 bytes side by side, around the caches; to: aligned to 64; srl_wide_fence() behind. */
void srl_wide_stream_three(void *to, const void *from, size_t block);
void srl_wide_copy_three(void *to, const void *from, size_t block, uint32_t *crcs);
void srl_wide_fence(void);

/* work on several cores, parts.c */
#define SRL_MOST_PARTS 4
/* How many parts are worth it for so many bytes, now: 1 below 4 MiB, or on a busy machine. */
size_t srl_parts(uint64_t nbytes);
/* work(part) for each of `count` <= SRL_MOST_PARTS parts of nbytes, at once; returns when all are done. */
void srl_each(void *(*work)(void *), void *parts, size_t nbytes, size_t count);

/* Of a class of cells: 256 * {1, 1.25, 1.5, 1.75} * 2^k up to 32 KiB; all are multiples of a cache line. */
static inline uint32_t srl_cell_nbytes(unsigned cls) {
    return (256u << (cls / 4)) / 4 * (4 + cls % 4);
}

/* Where the tail of a payload begins. */
static inline uint64_t srl_tail_at(uint64_t nbytes) {
    return (nbytes + 7) & ~UINT64_C(7);
}

static inline srl_block *srl_at(const srl_arena *a, uint32_t slot) {
    return a->blocks + slot;
}

#endif
