/* The arena of the crash driver, its first state, and every operation that is killed in it. Included by
 * crash_driver.c alone, in the survivor and in the children it forks.
 */
#ifndef CRASH_SCENE_H
#define CRASH_SCENE_H

#include "arena_live.h"
#include "arena_atomics.h"
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <semaphore.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define PAGES     32u
#define COMMITTED 24u
#define SLOTS     64u
#define SCENE     10u /* blocks of the survivor: 0, 1, 8 nobody touches, 2-7, 9 the operations do */
#define SPILLED   8u  /* from here on they are in files */
#define SECOND    1000000000u
#define MAX_POINT 2048

extern const srl_point __start_srl_points[], __stop_srl_points[];

typedef struct {
    uint32_t slot, gen;
    uint64_t nonce;
} block;

enum role { OWNER, WAITER, SWEEPER, CLAIMER };
static const char *role_names[] = {"owner", "waiter", "sweeper", "claimer"};

static struct {
    uint64_t hits, died_at; /* of the child that is armed */
    sem_t ready, go;
    uint64_t reached[MAX_POINT], killed[MAX_POINT];
} *board;

static char *ctl, *first_state;
static uint8_t *data;
static uint64_t ctl_size, kills, rounds;
static int live_fd, faults;
static char spill_path[] = "/tmp/shmrl-crash-XXXXXX";
static bool lock_was_dead; /* in the last trial the victim died with the lock */
static srl_arena me;
static srl_live my_live;
static block scene[SCENE];
static const char *trial = "";

/* of this process */
static bool armed;
static uint64_t kill_at;
static void (*between)(void); /* what another process does after the next store of srl_acquire */

void srl_at_point(const srl_point *here) {
    if (between && here->after && !strcmp(here->function, "srl_acquire")) {
        void (*step)(void) = between;
        between = NULL;
        step();
    }
    if (!armed)
        return;
    size_t number = (size_t)(here - __start_srl_points);
    board->reached[number]++;
    if (++board->hits != kill_at)
        return;
    board->died_at = number;
    board->killed[number]++;
    kill(getpid(), SIGKILL);
    pause();
}

static uint64_t soon(void) {
    return srl_now_ns(CLOCK_MONOTONIC) + SECOND;
}

static void *shared(size_t n) {
    return mmap(NULL, n, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
}

static void wrong(const char *what) {
    const srl_point *p = __start_srl_points + board->died_at;
    printf("FAULT %s, killed %s %s:%ld (%s): %s\n", trial, p->after ? "after" : "before", p->file, p->line,
           p->function, what);
    faults++;
}

/* -------------------------------------------------------------------------------------------------- the scene */

static void open_arena(srl_arena *a) {
    if (srl_open(a, ctl, ctl_size))
        abort();
    a->holds = calloc(a->h->max_blocks, sizeof(srl_hold));
}

static void claim(srl_arena *a, srl_live *live) {
    open_arena(a);
    char path[64];
    snprintf(path, sizeof path, "/proc/self/fd/%d", live_fd);
    memset(live, 0, sizeof *live);
    srl_live_init(live, open(path, O_RDWR | O_CLOEXEC), open(spill_path, O_DIRECTORY | O_CLOEXEC));
    if (srl_claim(a, live) < 0)
        abort();
}

static bool is_spilled(const srl_block *b) {
    return SRL_FLAGS(srl_load_sc(&b->word)) & SRL_SPILLED;
}

/* A payload is its own proof: the lowest byte of its nonce, everywhere. */
static bool intact(const srl_block *b) {
    const uint8_t *p = data + b->offset;
    uint32_t slot = (uint32_t)(b - me.blocks);
    if (b->nbytes == 0)
        return true;
    if (is_spilled(b) && srl_spill_map(my_live.spill, slot, SRL_GEN(b->word), b->nbytes, &p))
        return false;
    bool same = *p == (b->nonce & 255) && !memcmp(p, p + 1, b->nbytes - 1);
    if (is_spilled(b))
        munmap((void *)p, b->nbytes);
    return same;
}

static int reserve_in(srl_arena *a, uint64_t nbytes, bool spill, block *out) {
    /* small blocks are of a source without a name: both shares are in use */
    srl_request r = {.nbytes = nbytes, .tag = nbytes < 2000 ? "run/y" : "run/x", .tag_len = 5, .spill = spill};
    int rc = srl_reserve(a, &r, soon());
    if (rc)
        return rc;
    uint8_t *at = data + r.offset;
    *out = (block){r.slot, r.generation, r.nonce};
    if (spill && srl_spill_make(((srl_live *)a->ctx)->spill, r.slot, r.generation, nbytes, &at))
        abort();
    memset(at, (int)(r.nonce & 255), nbytes);
    if (spill)
        munmap(at, nbytes);
    return 0;
}

static int reserve(srl_arena *a, uint64_t nbytes, block *out) {
    return reserve_in(a, nbytes, false, out);
}

static void put_in(srl_arena *a, uint64_t nbytes, bool spill, block *out) {
    if (reserve_in(a, nbytes, spill, out) == 0)
        srl_seal(a, out->slot, out->gen, 0, 0, true, false);
}

static void put(srl_arena *a, uint64_t nbytes, block *out) {
    put_in(a, nbytes, false, out);
}

/* Every file belongs to a spilled block that is not free; with `none`, there is no file. */
static void check_files(bool none) {
    DIR *directory = opendir(spill_path);
    for (struct dirent *e; (e = readdir(directory));) {
        unsigned slot, gen;
        if (sscanf(e->d_name, "%u-%u", &slot, &gen) != 2)
            continue;
        uint64_t w = srl_load_sc(&srl_at(&me, slot)->word);
        if (none || SRL_GEN(w) != gen || SRL_STATE(w) == SRL_FREE || !(SRL_FLAGS(w) & SRL_SPILLED))
            wrong("a file without its block");
    }
    closedir(directory);
}

static void remove_files(void) {
    DIR *directory = opendir(spill_path);
    for (struct dirent *e; (e = readdir(directory));)
        if (*e->d_name != '.')
            unlinkat(dirfd(directory), e->d_name, 0);
    closedir(directory);
}

static void make(void) {
    static const uint32_t sizes[SCENE] = {1000, 70000, 1000, 140000, 200, 70000, 140000, 0, 5000, 5000};
    uint64_t capacity = PAGES * SRL_PAGE;
    ctl_size = srl_ctl_size(capacity, srl_max_blocks(capacity));
    ctl = shared(ctl_size);
    first_state = calloc(1, ctl_size);
    data = shared(capacity);
    board = shared(sizeof *board);
    sem_init(&board->ready, 1, 0);
    sem_init(&board->go, 1, 0);
    live_fd = memfd_create("live", MFD_CLOEXEC);
    if (!mkdtemp(spill_path))
        abort();
    srl_header given = {.max_processes = 8, .table_step = SLOTS, .share_count = 2};
    given.shares[1] = (srl_share){.name = "x", .guaranteed = capacity};
    srl_format(ctl, capacity, &given);
    claim(&me, &my_live);
    srl_commit_table(&me, 0, SLOTS, soon());
    srl_commit_pages(&me, 0, COMMITTED, soon());
    for (unsigned i = 0; i < SCENE; i++)
        put_in(&me, sizes[i], i >= SPILLED, scene + i);
}

/* What a trial may change of ctl, but for the ring. */
static void copy_state(char *to, const char *from) {
    const srl_header *h = me.h;
    uint64_t pages = h->pages_off, blocks = h->blocks_off;
    memcpy(to, from, h->events_off);
    memcpy(to + h->pending_off, from + h->pending_off, pages - h->pending_off);
    memcpy(to + pages, from + pages, PAGES * sizeof(srl_page));
    memcpy(to + blocks, from + blocks, 2 * SLOTS * sizeof(srl_block));
}

static void reset(void) {
    copy_state(ctl, first_state);
    remove_files();
    for (unsigned i = 0; i < SCENE; i++) {
        const srl_block *b = srl_at(&me, scene[i].slot);
        uint8_t *at = data + b->offset;
        if (i >= SPILLED && srl_spill_make(my_live.spill, scene[i].slot, scene[i].gen, b->nbytes, &at))
            abort();
        memset(at, (int)(b->nonce & 255), b->nbytes);
        if (i >= SPILLED)
            munmap(at, b->nbytes);
    }
}

/* ------------------------------------------------------------------------------------------------- operations */

static block mine, mine_too; /* of the child: what its operation is about */

#define ON(b) (b).slot, (b).gen, (b).nonce

static void adopt_2(srl_arena *a) {
    srl_adopt(a, ON(scene[2]));
}
static void adopt_3(srl_arena *a) {
    srl_adopt(a, ON(scene[3]));
}
static void hold_2(srl_arena *a) {
    srl_acquire(a, ON(scene[2]));
}
static void last_holder(srl_arena *a) {
    hold_2(a);
    srl_free(&me, ON(scene[2])); /* as the survivor would: retired, and held by this child alone */
}
static void adopted_and_held(srl_arena *a) {
    adopt_3(a), srl_acquire(a, ON(scene[3]));
}
static void reserved(srl_arena *a) {
    reserve(a, 70000, &mine);
}
static void discarded(srl_arena *a) {
    reserved(a), srl_discard(&me, "run", 3);
}
static void shipped_to_2(srl_arena *a) {
    srl_ship(&me, ON(scene[4]), 2, 7);
}
static void shipped_to_1(srl_arena *a) {
    srl_ship(&me, ON(scene[5]), 1, 7);
}
static void freed_by_its_reader(srl_arena *a) { /* its descriptor is the next to be taken, and has the reader's bit */
    shipped_to_1(a), srl_done(&me, ON(scene[5]), 3);
}
static void orphaned(srl_arena *a) {
    a->h->orphan_ttl_ns = 1;
    srl_arena gone = me;
    gone.self = 7;
    srl_adopt(&gone, ON(scene[2]));
    srl_sweep(&me, 7);
}
static void reserved_file(srl_arena *a) {
    reserve_in(a, 5000, true, &mine);
}
static void discarded_file(srl_arena *a) {
    reserved_file(a), srl_discard(&me, "run", 3);
}
static void adopted_file(srl_arena *a) {
    srl_adopt(a, ON(scene[9]));
}
static void last_holder_of_file(srl_arena *a) {
    srl_acquire(a, ON(scene[9])), srl_free(&me, ON(scene[9]));
}
static void everything(srl_arena *a) {
    reserve_in(a, 3000, true, &mine_too), adopted_file(a), adopt_2(a), adopted_and_held(a), reserved(a), shipped_to_2(a), last_holder(a), srl_queue_enter(a, false);
}
static void freeing(srl_arena *a) { /* as a release leaves it that died before it said so */
    for (int i = 6; i < 10; i += 3) {
        srl_block *b = srl_at(a, scene[i].slot);
        b->word = SRL_WITH_STATE(b->word, SRL_FREEING);
    }
}
static void pending(srl_arena *a) {
    freeing(a), srl_pend(a, scene[6].slot), srl_pend(a, scene[9].slot);
} /* one that met a busy lock */
static void adopted_and_queued(srl_arena *a) {
    adopt_2(a), srl_queue_enter(a, false);
}
static void nothing(srl_arena *a) {}

static void do_put(srl_arena *a) {
    put(a, 1000, &mine);
}
static void do_put_pages(srl_arena *a) {
    put(a, 140000, &mine);
}
static void do_put_new_class(srl_arena *a) {
    put(a, 20000, &mine), put(a, 20000, &mine), put(a, 20000, &mine), put(a, 20000, &mine);
}
static void do_put_empty(srl_arena *a) {
    put(a, 0, &mine);
}
static void do_cycle(srl_arena *a) {
    static const uint32_t sizes[] = {20000, 300, 70000, 20000, 200000};
    block b[5];
    for (int i = 0; i < 5; i++)
        put(a, sizes[i], b + i);
    for (int i = 0; i < 5; i++)
        srl_free(a, ON(b[i * 3 % 5]));
}
static void do_fragments(srl_arena *a) { /* free spans and cell pages side by side, then joined */
    block b[8];
    for (int i = 0; i < 8; i++)
        put(a, i < 5 ? 65536 : 30000, b + i);
    for (int i = 0; i < 8; i++)
        srl_free(a, ON(b[i * 2 % 8 + i / 4]));
}
static void seal(srl_arena *a, bool held) {
    int rc = srl_seal(a, mine.slot, mine.gen, 0, 0, true, held);
    if (rc)
        srl_abort(a, mine.slot, mine.gen);
    else if (held)
        srl_release(a, mine.slot);
}
static void do_seal(srl_arena *a) {
    seal(a, false);
}
static void do_seal_held(srl_arena *a) {
    seal(a, true);
}
static void do_wait_for_lock(srl_arena *a) {
    srl_request r = {.nbytes = 10, .tag = "run", .tag_len = 3};
    srl_reserve(a, &r, srl_now_ns(CLOCK_MONOTONIC) + SECOND / 50);
}
static void do_abort(srl_arena *a) {
    srl_abort(a, mine.slot, mine.gen);
}
static void do_acquire(srl_arena *a) {
    hold_2(a);
}
static void do_release(srl_arena *a) {
    srl_release(a, scene[2].slot);
}
static void do_adopt(srl_arena *a) {
    adopt_2(a);
}
static void do_free_2(srl_arena *a) {
    srl_free(a, ON(scene[2]));
}
static void do_free_3(srl_arena *a) {
    srl_free(a, ON(scene[3]));
}
static void do_free_held(srl_arena *a) {
    do_free_3(a), srl_release(a, scene[3].slot);
}
static void do_ship(srl_arena *a) {
    srl_ship(a, ON(scene[2]), 2, 3);
}
static void do_done(srl_arena *a) {
    srl_done(a, ON(scene[4]), 0), srl_done(a, ON(scene[4]), 200);
}
static void do_done_last(srl_arena *a) {
    srl_done(a, ON(scene[5]), 3);
}
static void do_discard(srl_arena *a) {
    srl_discard(a, "run", 3);
}
static void do_expire(srl_arena *a) {
    srl_expire_orphans(a);
}
static void do_drain(srl_arena *a) {
    srl_drain_if_free(a);
}
static void do_close(srl_arena *a) {
    srl_sweep(a, a->self);
}
static void do_commit_pages(srl_arena *a) {
    srl_commit_pages(a, COMMITTED, PAGES, soon());
}
static void do_commit_table(srl_arena *a) {
    srl_commit_table(a, SLOTS, 2 * SLOTS, soon());
}
static void do_queue(srl_arena *a) {
    srl_queue_enter(a, false);
    srl_queue_class(a, true);
    srl_space_wait(a, srl_load32_sc(&a->h->space_seq), 1000);
    srl_queue_leave(a);
}
static void do_put_file(srl_arena *a) {
    put_in(a, 5000, true, &mine);
}
static void do_free_file(srl_arena *a) {
    srl_free(a, ON(scene[9]));
}
static void do_release_file(srl_arena *a) {
    srl_release(a, scene[9].slot);
}
static void do_pick_up(srl_arena *a) {
    put(a, 140000, &mine), srl_free(a, ON(mine)), srl_adopt(a, ON(scene[4])), srl_free(a, ON(scene[4]));
}

typedef struct {
    const char *name;
    void (*before)(srl_arena *), (*run)(srl_arena *);
    bool busy; /* the survivor has the lock meanwhile */
} operation;

static const operation operations[] = {
    {"put", nothing, do_put, false},
    {"put-pages", nothing, do_put_pages, false},
    {"put-new-class", nothing, do_put_new_class, false},
    {"put-empty", nothing, do_put_empty, false},
    {"put-where-one-was-read", freed_by_its_reader, do_put, false},
    {"put-free-cycle", nothing, do_cycle, false},
    {"put-free-adopted", freeing, do_pick_up, false},
    {"fragments", nothing, do_fragments, false},
    {"wait-for-lock", nothing, do_wait_for_lock, true},
    {"seal", reserved, do_seal, false},
    {"seal-discarded", discarded, do_seal, false},
    {"seal-held", reserved, do_seal_held, false},
    {"seal-held-discarded", discarded, do_seal_held, false},
    {"abort", reserved, do_abort, false},
    {"acquire", nothing, do_acquire, false},
    {"release", hold_2, do_release, false},
    {"release-last", last_holder, do_release, false},
    {"adopt", nothing, do_adopt, false},
    {"free", adopt_2, do_free_2, false},
    {"free-pages", adopt_3, do_free_3, false},
    {"free-held", adopted_and_held, do_free_held, false},
    {"free-busy", adopt_3, do_free_3, true},
    {"abort-busy", reserved, do_abort, true},
    {"ship", adopt_2, do_ship, false},
    {"done", shipped_to_2, do_done, false},
    {"done-last", shipped_to_1, do_done_last, false},
    {"discard", nothing, do_discard, false},
    {"discard-unsealed", reserved, do_discard, false},
    {"free-queued", adopted_and_queued, do_free_2, false},
    {"expire", orphaned, do_expire, false},
    {"drain", pending, do_drain, false},
    {"queue", nothing, do_queue, false},
    {"put-file", nothing, do_put_file, false},
    {"seal-file", reserved_file, do_seal, false},
    {"seal-discarded-file", discarded_file, do_seal, false},
    {"abort-file", reserved_file, do_abort, false},
    {"free-file", adopted_file, do_free_file, false},
    {"free-file-busy", adopted_file, do_free_file, true},
    {"release-last-file", last_holder_of_file, do_release_file, false},
    {"commit-pages", nothing, do_commit_pages, false},
    {"commit-table", nothing, do_commit_table, false},
    {"close", everything, do_close, false},
};
#define OPERATIONS (sizeof operations / sizeof *operations)

#endif
