/* What is in the arena's `ctl` file: the glossary of the whole C core, with its invariants.
 *
 * Owned by every attached process together; mapped read-write by all of them, read-only by the inspectors.
 *
 *   ctl  = header | processes[256] | events[4096] | pending bitmap | pages[] | blocks[]
 *   data = capacity bytes in pages of 64 KiB; all of its bookkeeping is in ctl
 *   A spilled block is a file of its own, <spill_dir>/<slot>-<generation>, and takes nothing from data.
 *
 * Names
 *   slot        index of a block's descriptor: 0 <= slot < table_used <= table_committed <= max_blocks
 *   process     index of an attached process: 0 <= process < max_processes <= 256. Byte `process` of the
 *               `live` file is locked while it lives, byte 256 + process while somebody sweeps or claims it
 *   generation  how often the descriptor was freed; one that reaches 2^32 - 1 is never used again
 *   span        bytes of `data` that a block owns: whole pages, one cell of a page cut into equal cells, none
 *   tail        columns table and checksums, behind the payload in the same span or file
 *   share       bytes of `data` that a source (second component of a tag) can count on; share 0 is that of every
 *               source without a name here. What goes beyond it is borrowed: see arena_share.c
 *   event       what happened to a block or process; the last 4,096 are kept for people, decisions ignore them
 *
 * Invariants (block b, process p)
 *   refcount(b)           = popcount(b.holders)
 *   bytes(p may read)     : p's bit in b.holders is set and state(b) in {READY, RETIRED}
 *   state(b) = FREEING   <=> exactly one CAS RETIRED|WRITING -> FREEING happened in this generation
 *   FREE <-> WRITING, FREEING -> FREE : only under the allocator's lock, by anyone
 *   b has a file          => state(b) != FREE and SPILLED, in this generation; then span(b) = 0
 *   spans of non-FREE blocks + free spans + free cells = committed_pages * 64 KiB, while the lock is free
 *   used(share s) = spans of non-FREE blocks with b.share = s, while the lock is free; sum over s = used_bytes
 *   sum of guaranteed(s) over all shares, share 0 among them = capacity
 *   created = sum(generation) + #(state != FREE);  freed = sum(generation) + #(state == FREEING)
 *   pages[], bins, cell lists, free descriptors, pending, used of shares: caches of blocks[]; srl_rebuild() makes
 *   them anew
 */
#ifndef SRL_ARENA_LAYOUT_H
#define SRL_ARENA_LAYOUT_H

#include <stddef.h>
#include <stdint.h>

#define SRL_MAGIC         UINT64_C(0x31616e6572616c72) /* "rlarena1" */
#define SRL_VERSION       6 /* any change below bumps it; attach refuses every other one */
#define SRL_MAX_PROCESSES 256
#define SRL_PAGE          65536u
#define SRL_TAG_MAX       112
#define SRL_TAIL_MAGIC    0x4c494154u /* "TAIL"; columns.py has the layout of a tail */
#define SRL_TAIL_HEADER   16
#define SRL_NONE          UINT32_MAX
#define SRL_BINS          256
#define SRL_CELL_CLASSES  29
#define SRL_CELL_MAX      32768u
#define SRL_EVENTS        4096u
#define SRL_SPILL_DIR_MAX 512
#define SRL_SHARES        16 /* at most, the unnamed one among them */
#define SRL_SHARE_NAME    48
#define SRL_BORROWS       (UINT64_C(1) << 63) /* of a ticket: it comes after every ticket without it */

enum srl_state { SRL_FREE = 0, SRL_WRITING = 1, SRL_READY = 2, SRL_RETIRED = 3, SRL_FREEING = 4 };

/* Flags of the word. EPOCH counts ships modulo 128, so that a CAS prepared before a ship fails after it. */
enum {
    SRL_ORPHAN = 1,
    SRL_SHIPPED = 2,
    SRL_DISCARDED = 4,
    SRL_SPILLED = 8,
    SRL_UNCHECKED = 16,
    SRL_EPOCH_ONE = 32
};

/* word = generation:32 | state:4 | flags:12 | owner:16 */
#define SRL_WORD(gen, state, flags, owner)                                                                   \
    ((uint64_t)(gen) << 32 | (uint64_t)(state) << 28 | (uint64_t)(flags) << 16 | (uint64_t)(owner))
#define SRL_GEN(w)               ((uint32_t)((w) >> 32))
#define SRL_STATE(w)             ((unsigned)((w) >> 28 & 15))
#define SRL_FLAGS(w)             ((unsigned)((w) >> 16 & 0xfff))
#define SRL_OWNER(w)             ((unsigned)((w) & 0xffff))
#define SRL_WITH_STATE(w, state) (((w) & ~(UINT64_C(15) << 28)) | (uint64_t)(state) << 28)

typedef struct {
    uint64_t word;     /* see above; every transition is a CAS of the whole word, or a store under the lock */
    uint64_t offset;   /* of the span in data; SPILLED: bytes of its file; FREE: next free descriptor + 1 */
    uint64_t nbytes;   /* payload */
    uint64_t nonce;    /* in the handle; makes it unguessable */
    uint64_t birth_ns; /* CLOCK_BOOTTIME at reserve */
    uint64_t span;     /* bytes owned in data: 0, a cell size, or a multiple of SRL_PAGE */
    uint32_t readers;  /* of the last ship */
    uint32_t tail_nbytes;
    uint32_t crc;        /* crc32c of the tail, or of the payload when there is no tail and it is checked */
    uint32_t share;      /* index into shares, 0 when there are none */
    uint64_t holders[4]; /* one bit per process; or-ed and and-ed, never stored */
    uint64_t done[4];    /* one bit per reader index */
    char tag[SRL_TAG_MAX];
    int64_t step;       /* of the last ship, -1 = none */
    uint64_t orphan_ns; /* CLOCK_BOOTTIME when its owner was swept */
} srl_block;

typedef struct {
    uint64_t used;     /* 0: empty and swept; else dirty: whoever finds it dead sweeps it */
    uint64_t ticket;   /* place in the queue for space, 0 = not waiting; SRL_BORROWS is in bit 63 */
    uint64_t stamp_ns; /* CLOCK_MONOTONIC of the waiter's last look; a stale ticket is skipped */
    uint64_t pid;      /* in its own pid namespace; for people, never for decisions */
    uint64_t since_ns; /* CLOCK_BOOTTIME at attach */
    uint64_t queue_ns; /* CLOCK_MONOTONIC when it took its ticket */
    char name[80];
} srl_process;

/* One record per 64 KiB page. Only the first and the last page of a span are kept true. */
enum srl_page_kind { SRL_PAGE_USED = 0, SRL_PAGE_FREE = 1, SRL_PAGE_CELLS = 2 };
typedef struct {
    uint32_t length;     /* pages in the span that starts or ends here */
    uint32_t prev, next; /* in the bin (FREE) or the class's list of pages with room (CELLS) */
    uint8_t kind, cell_class;
    uint16_t cells_used;
    uint32_t last_writer; /* process that last wrote the span: its page tables are warm */
    uint32_t reserved;
    uint64_t cells[4]; /* set = taken */
    uint64_t reserved2;
} srl_page;

enum srl_event_kind {
    SRL_DID_RESERVE = 1,
    SRL_DID_SEAL,
    SRL_DID_ADOPT,
    SRL_DID_SHIP,
    SRL_DID_DONE,
    SRL_DID_RETIRE,
    SRL_DID_FREE,
    SRL_DID_ORPHAN,
    SRL_DID_SWEEP,     /* slot: the dead process */
    SRL_DID_TAKE_OVER, /* slot: the dead owner of the lock */
    SRL_DID_FILL,      /* no room for nbytes: the asker waits or is refused */
    SRL_DID_SPILL,     /* reserved in a file instead of in data */
    SRL_DID_DISCARD,   /* retired by its tag; before it was sealed: will be, instead of being sealed */
    SRL_DID_EXPIRE,    /* retired as an orphan older than the ttl */
};

/* mark = number:48 | kind:8 | process:8, stored last; event `number` is in record number % SRL_EVENTS */
typedef struct {
    uint64_t mark;
    uint64_t at_ns;  /* CLOCK_MONOTONIC_COARSE: a few ms wide, the number has the order */
    uint64_t block;  /* generation:32 | slot:32 */
    uint64_t detail; /* nbytes; of SHIP: the readers; of DONE: the reader */
} srl_event;

typedef struct {
    char name[SRL_SHARE_NAME]; /* the source; of share 0 "" */
    uint64_t guaranteed;
    uint64_t used; /* under the lock */
} srl_share;

typedef struct {
    uint64_t magic; /* written last */
    uint32_t version, max_processes;
    uint8_t id[16];
    uint32_t node, boot; /* hashes: of boot id, hostname and device; of the boot id alone */
    uint64_t capacity, ctl_size;
    uint32_t max_pages, max_blocks, table_step, huge; /* huge: who commits makes huge pages of it */
    uint64_t events_off, pending_off, pages_off, blocks_off;
    uint64_t orphan_ttl_ns, created_ns;
    char run_id[64];

    /* {seq:32 | owner + 1:16 in bits 16..31 | waiters in bit 0}; the low half is the futex */
    _Alignas(64) uint64_t lock;

    /* under the lock */
    _Alignas(64) uint64_t used_bytes;
    uint64_t peak_bytes, free_slot; /* free_slot: first free descriptor + 1 */
    uint64_t committed_pages, table_committed, table_used;

    /* without the lock */
    _Alignas(64) uint64_t pending_hint; /* 1: some pending bit may be set */
    uint64_t next_ticket, waits;
    uint32_t space_seq, space_waiters; /* futex word bumped by every free while somebody waits */

    _Alignas(64) uint64_t events; /* how many there ever were */

    /* allocator, under the lock */
    _Alignas(64) uint64_t bin_map[SRL_BINS / 64];
    uint32_t bins[SRL_BINS];
    uint32_t cell_pages[SRL_CELL_CLASSES];

    _Alignas(64) char spill_dir[SRL_SPILL_DIR_MAX]; /* this arena's own, "" = none */

    _Alignas(64) srl_share shares[SRL_SHARES];
    uint32_t share_count; /* 0: none, everybody takes what is free */
} srl_header;

_Static_assert(sizeof(srl_block) == 256, "a descriptor is four cache lines");
_Static_assert(offsetof(srl_block, holders) == 64 && offsetof(srl_block, tag) == 128, "lines 0, 1, 2-3");
_Static_assert(sizeof(srl_process) == 128, "a process entry is two cache lines");
_Static_assert(sizeof(srl_page) == 64, "a page record is one cache line");
_Static_assert(sizeof(srl_share) == 64, "a share is one cache line");
_Static_assert(sizeof(srl_event) == 32, "two events are a cache line");
_Static_assert(sizeof(srl_header) <= 4096, "the header is one page");

#endif
