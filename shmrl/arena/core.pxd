# What the bindings see of csrc/: structs and functions of arena_core.h and arena_live.h. For _arena.pyx and _ctl.pyx.
from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t


cdef extern from "errno.h":
    enum: EPROTO

cdef extern from "string.h" nogil:
    size_t strnlen(const char *text, size_t limit)

cdef extern from "arena_live.h" nogil:
    enum: SRL_BY_FIELD
    enum: SRL_BY_HOLDER
    enum: SRL_BY_SOURCE
    enum: SRL_EVENTS
    uint64_t SRL_MAGIC
    enum: SRL_DID_DISCARD
    enum: SRL_DID_EXPIRE
    enum: SRL_DID_FILL
    enum: SRL_NONE
    enum: SRL_ORPHAN
    enum: SRL_PAGE
    enum: SRL_RETIRED
    enum: SRL_SHARE_NAME
    enum: SRL_SPILL_DIR_MAX
    enum: SRL_SPILLED
    enum: SRL_TAG_MAX
    enum: SRL_UNCHECKED
    enum: SRL_VERSION

    ctypedef struct srl_block:
        uint64_t word, offset, nbytes, nonce, birth_ns, span
        uint32_t readers, tail_nbytes, crc, share
        uint64_t holders[4]
        uint64_t done[4]
        char tag[112]
        int64_t step
        uint64_t orphan_ns

    ctypedef struct srl_process:
        uint64_t used, ticket, stamp_ns, pid, since_ns, queue_ns
        char name[80]

    ctypedef struct srl_share:
        char name[48]
        uint64_t guaranteed, used

    ctypedef struct srl_page:
        uint32_t length

    ctypedef struct srl_event:
        uint64_t mark, at_ns, block, detail

    ctypedef struct srl_header:
        uint64_t magic
        uint32_t version, max_processes
        uint8_t id[16]
        uint32_t node, boot
        uint64_t capacity, ctl_size
        uint32_t max_pages, max_blocks, table_step, huge
        uint64_t pages_off, blocks_off, orphan_ttl_ns, created_ns
        char run_id[64]
        char spill_dir[512]
        uint64_t events, lock, used_bytes, committed_pages, table_committed, table_used
        uint32_t space_seq
        srl_share shares[16]
        uint32_t share_count

    ctypedef struct srl_hold:
        uint32_t count, generation

    ctypedef struct srl_arena:
        srl_header *h
        srl_process *processes
        srl_page *pages
        srl_block *blocks
        uint32_t max_pages, max_blocks, max_processes, shares, self
        srl_hold *holds

    ctypedef struct srl_request:
        uint64_t nbytes, room
        const char *tag
        uint32_t tag_len
        bint spill, borrows  # bool
        uint32_t share, slot, generation
        uint64_t nonce, offset

    ctypedef struct srl_stats:
        uint64_t blocks, used_bytes, peak_bytes, committed_bytes, capacity_bytes
        uint64_t created, freed, orphaned, orphaned_bytes, spilled, spilled_bytes, waits

    ctypedef struct srl_group:
        uint64_t blocks, bytes
        uint32_t taken, len
        char key[112]

    ctypedef struct srl_tally:
        uint32_t by, room, used, last
        srl_group *groups

    ctypedef struct srl_walk:
        const uint8_t *data
        uint64_t now_ns
        unsigned tallies
        srl_tally tally[5]

    ctypedef struct srl_live:
        int fd, spill, detached

    uint64_t srl_ctl_size(uint64_t capacity, uint32_t max_blocks)
    uint64_t srl_ctl_fixed_size(uint32_t max_blocks)
    uint32_t srl_max_blocks(uint64_t capacity)
    void srl_format(void *ctl, uint64_t capacity, const srl_header *given)
    int srl_open(srl_arena *a, void *ctl, uint64_t ctl_size)
    uint64_t srl_table_used(const srl_arena *a)
    bint srl_counts_are_sane(const srl_arena *a)
    uint64_t srl_now_ns(int clock)
    void srl_event_note(srl_arena *a, unsigned kind, uint32_t slot, uint32_t gen, uint64_t detail)
    unsigned srl_events_since(const srl_arena *a, uint64_t first, srl_event *out)
    bint srl_event_ending(const srl_arena *a, uint32_t slot, uint32_t gen, srl_event *out)
    int srl_lock(srl_arena *a, uint64_t deadline_ns)
    void srl_unlock(srl_arena *a)
    void srl_drain_if_free(srl_arena *a)
    uint32_t srl_lock_owner(const srl_arena *a)
    void srl_queue_enter(srl_arena *a, bint borrows)
    void srl_queue_class(srl_arena *a, bint borrows)
    void srl_queue_leave(srl_arena *a)
    uint32_t srl_queue_others(const srl_arena *a, uint64_t *since_ns)
    void srl_space_wait(srl_arena *a, uint32_t seen, uint64_t timeout_ns)
    uint64_t srl_span_nbytes(uint64_t total)
    uint32_t srl_share_of(const srl_arena *a, const char *tag, uint32_t tag_len)
    uint64_t srl_share_kept(const srl_arena *a, uint32_t share)
    uint64_t srl_share_limit(const srl_arena *a, uint32_t share)
    int srl_reserve(srl_arena *a, srl_request *r, uint64_t deadline_ns)
    int srl_seal(
        srl_arena *a, uint32_t slot, uint32_t gen, uint32_t tail_nbytes, uint32_t crc, bint checked, bint held)
    int srl_abort(srl_arena *a, uint32_t slot, uint32_t gen)
    int srl_acquire(srl_arena *a, uint32_t slot, uint32_t gen, uint64_t nonce)
    void srl_release(srl_arena *a, uint32_t slot)
    int srl_adopt(srl_arena *a, uint32_t slot, uint32_t gen, uint64_t nonce)
    int srl_free(srl_arena *a, uint32_t slot, uint32_t gen, uint64_t nonce)
    int srl_ship(srl_arena *a, uint32_t slot, uint32_t gen, uint64_t nonce, uint32_t readers, int64_t step)
    int srl_done(srl_arena *a, uint32_t slot, uint32_t gen, uint64_t nonce, uint32_t reader)
    int64_t srl_discard(srl_arena *a, const char *prefix, uint32_t length)
    int srl_commit_pages(srl_arena *a, uint64_t first, uint64_t end, uint64_t deadline_ns)
    int srl_commit_table(srl_arena *a, uint64_t first, uint64_t end, uint64_t deadline_ns)
    int srl_rebuild(srl_arena *a)
    void srl_sweep(srl_arena *a, uint32_t process)
    int srl_count(const srl_arena *a, srl_stats *out, srl_walk *walk)
    bint srl_look_at(const srl_arena *a, uint64_t slot, srl_block *out)
    int srl_fsck(const srl_arena *a, char *out, unsigned out_len)
    uint64_t srl_tail_at(uint64_t nbytes)
    uint64_t srl_plain_tail(uint64_t nbytes)
    uint32_t srl_fill(void *to, const void *source, uint64_t nbytes, bint hot, bint checksum, uint32_t *crc)
    uint32_t srl_crc32c(uint32_t crc, const void *data, size_t nbytes)
    void srl_crc_blocks(const void *data, size_t nbytes, size_t block, uint32_t *out)
    void srl_live_init(srl_live *live, int fd, int spill)
    void srl_live_watch_forks(srl_live *live)
    void srl_live_unwatch(srl_live *live)
    int srl_live_is_dead(void *live, unsigned process)
    int srl_claim(srl_arena *a, srl_live *live)
    int srl_sweep_dead(srl_arena *a, srl_live *live)
    int srl_others_alive(const srl_arena *a, srl_live *live)
    int srl_spill_make(int directory, uint32_t slot, uint32_t gen, uint64_t nbytes, uint8_t **at)
    int srl_spill_map(int directory, uint32_t slot, uint32_t gen, uint64_t nbytes, const uint8_t **at)


cdef inline str text_of(const char *words, size_t room):
    """A text field of ctl, which may have lost its end."""
    return words[:strnlen(words, room)].decode("utf-8", "replace")


cdef inline int open_ctl(srl_arena *a, void *ctl, uint64_t nbytes) except -1:
    """Believes a mapped ctl or says why not: ForeignArena (another version of the layout), ArenaCorrupt."""
    from shmrl.errors import ArenaCorrupt, ForeignArena
    cdef int rc = srl_open(a, ctl, nbytes)
    if rc == -EPROTO:
        raise ForeignArena(f"the arena has layout version {(<srl_header *> ctl).version}, this shmrl reads version "
                           f"{SRL_VERSION}: use the version that made it (or shmrl arena gc)")
    cdef srl_header *h = <srl_header *> ctl
    if rc and nbytes >= sizeof(srl_header) and h.magic == SRL_MAGIC and h.ctl_size > nbytes:
        raise ArenaCorrupt(f"the arena's ctl was cut: {nbytes} of {h.ctl_size} bytes are left")
    if rc:
        raise ArenaCorrupt("the arena's control words are not an arena's, or contradict each other")
    return 0
