/* The C core alone, over malloc'd or anonymous shared memory: `threads` and `duel` for races, `takeover`
 * and `stopped` for the lock, `wrap` for the last generation, `publish` [rounds] for bytes that only the word hands over.
 *
 * Built and run by test_core.py. Every "process" of the core is a thread, or a forked child that is killed.
 * Prints "ok" or what is wrong.
 */
#include "arena_atomics.h"
#include "arena_core.h"
#include <errno.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define CAPACITY (8u << 20)
#define THREADS  4
#define ROUNDS   6000
#define DUELS    200000
#define BOARD    32

static uint8_t *ctl, *data;
static uint64_t ctl_size;
static uint64_t board[BOARD]; /* slot | generation << 32 of blocks that may exist */
static int faults, reads;
static long rounds = ROUNDS; /* of publish */

static int nobody_dies(void *ctx, unsigned p) {
    return 0;
}
static int everybody_died(void *ctx, unsigned p) {
    return 1;
}

static void attach(srl_arena *a, uint32_t self, srl_is_dead_fn is_dead) {
    if (srl_open(a, ctl, ctl_size))
        abort();
    a->self = self;
    a->holds = calloc(a->h->max_blocks, sizeof(srl_hold));
    a->is_dead = is_dead;
    srl_store_sc(&a->processes[self].used, 1);
}

static void make(void *(*memory)(size_t)) {
    ctl_size = srl_ctl_size(CAPACITY, srl_max_blocks(CAPACITY));
    ctl = memory(ctl_size);
    data = memory(CAPACITY);
    srl_header given = {.max_processes = 256, .table_step = 4096};
    srl_format(ctl, CAPACITY, &given);
    srl_arena a;
    attach(&a, 255, nobody_dies);
    srl_commit_table(&a, 0, 4096, srl_now_ns(CLOCK_MONOTONIC) + 1000000000u);
    srl_commit_pages(&a, 0, CAPACITY / SRL_PAGE, srl_now_ns(CLOCK_MONOTONIC) + 1000000000u);
    srl_sweep(&a, 255);
    free(a.holds);
}

static void wrong(const char *what) {
    printf("%s\n", what);
    __atomic_fetch_add(&faults, 1, __ATOMIC_RELAXED);
}

static uint64_t rnd(uint64_t *state) {
    return *state = *state * 6364136223846793005u + 1442695040888963407u, *state >> 33;
}

static void free_block(srl_arena *a, uint64_t at) {
    uint32_t slot = (uint32_t)at, gen = (uint32_t)(at >> 32);
    uint64_t nonce = srl_load_relaxed(&srl_at(a, slot)->nonce);
    if (srl_adopt(a, slot, gen, nonce) == 0)
        srl_free(a, slot, gen, nonce);
}

/* On the board for everybody; what was there before is freed, or the arena fills up with blocks nobody knows.
 */
static void write_block(srl_arena *a, uint64_t *state) {
    static const uint32_t sizes[] = {0, 40, 256, 1000, 5000, 33000, 65536, 200000};
    srl_request r = {.nbytes = sizes[rnd(state) % 8], .tag = "run/x", .tag_len = 5};
    if (srl_reserve(a, &r, srl_now_ns(CLOCK_MONOTONIC) + 1000000000u)) {
        wrong("no room");
        return;
    }
    memset(data + r.offset, (int)(r.nonce & 255), r.nbytes);
    if (rnd(state) % 8 == 0)
        srl_abort(a, r.slot, r.generation);
    else if (srl_seal(a, r.slot, r.generation, 0, 0, true, false) == 0)
        free_block(a, srl_swap_sc(board + rnd(state) % BOARD, (uint64_t)r.generation << 32 | r.slot));
}

static void read_block(srl_arena *a, uint32_t slot, uint32_t gen, uint64_t nonce) {
    if (srl_acquire(a, slot, gen, nonce))
        return;
    __atomic_fetch_add(&reads, 1, __ATOMIC_RELAXED);
    const srl_block *b = srl_at(a, slot);
    uint64_t n = srl_load_relaxed(&b->nbytes);
    for (uint64_t i = 0; i < n; i++)
        if (data[b->offset + i] != (nonce & 255)) {
            wrong("foreign bytes under a hold");
            break;
        }
    srl_release(a, slot);
}

static void *worker(void *arg) {
    srl_arena a;
    uint64_t state = (uint64_t)(size_t)arg * 977 + 5;
    attach(&a, (uint32_t)(size_t)arg, nobody_dies);
    for (int i = 0; i < ROUNDS; i++) {
        uint64_t at = srl_load_sc(board + rnd(&state) % BOARD);
        uint32_t slot = (uint32_t)at, gen = (uint32_t)(at >> 32);
        uint64_t nonce = srl_load_relaxed(&srl_at(&a, slot)->nonce);
        switch (rnd(&state) % 7) {
        case 0:
        case 1:
            write_block(&a, &state);
            break;
        case 2:
            free_block(&a, at);
            break;
        case 3:
            if (srl_adopt(&a, slot, gen, nonce) == 0 && srl_ship(&a, slot, gen, nonce, 2, 1) == 0)
                srl_done(&a, slot, gen, nonce, a.self);
            break;
        case 4:
            srl_done(&a, slot, gen, nonce, a.self);
            break;
        default:
            read_block(&a, slot, gen, nonce);
        }
    }
    srl_sweep(&a, a.self);
    free(a.holds);
    return NULL;
}

static void check_clean(uint64_t blocks) {
    static char text[4096];
    srl_arena a;
    attach(&a, 200, nobody_dies);
    srl_discard(&a, "run", 3);
    srl_stats s;
    srl_count(&a, &s, &(srl_walk){0});
    if (s.blocks != blocks || s.created < blocks)
        wrong("blocks left");
    if (srl_lock(&a, srl_now_ns(CLOCK_MONOTONIC) + 1000000000u))
        wrong("no lock");
    else if (srl_fsck(&a, text, sizeof text))
        wrong(text);
    srl_unlock(&a);
}

static void *zeroed(size_t n) {
    return calloc(1, n);
}

static void threads(void) {
    pthread_t t[THREADS];
    make(zeroed);
    for (size_t i = 0; i < THREADS; i++)
        pthread_create(t + i, NULL, worker, (void *)i);
    for (size_t i = 0; i < THREADS; i++)
        pthread_join(t[i], NULL);
    if (reads < ROUNDS / 10)
        wrong("hardly a read found its block");
    check_clean(0);
}

static void *owner(void *arg) {
    srl_arena *a = arg;
    for (int i = 0; i < DUELS; i++) {
        srl_request r = {.tag = "run/d", .tag_len = 5};
        if (srl_reserve(a, &r, srl_now_ns(CLOCK_MONOTONIC) + 1000000000u) ||
            srl_seal(a, r.slot, r.generation, 0, 0, true, false))
            i = DUELS, wrong("no block");
        srl_store_sc(board, (uint64_t)r.generation << 32 | r.slot);
        if (i < DUELS && srl_free(a, r.slot, r.generation, r.nonce))
            wrong("not freed");
    }
    srl_store_sc(board, UINT64_MAX);
    return NULL;
}

/* A freer and a reader over one slot: every acquire meets a block that is being freed, or its next
 * generation. */
static void duel(void) {
    pthread_t t;
    srl_arena a, b;
    make(zeroed);
    attach(&a, 0, nobody_dies);
    attach(&b, 1, nobody_dies);
    pthread_create(&t, NULL, owner, &a);
    for (uint64_t at; (at = srl_load_sc(board)) != UINT64_MAX;) {
        uint32_t slot = (uint32_t)at, gen = (uint32_t)(at >> 32);
        if (srl_acquire(&b, slot, gen, srl_load_relaxed(&srl_at(&b, slot)->nonce)))
            continue;
        uint64_t w = srl_load_sc(&srl_at(&b, slot)->word);
        if (SRL_GEN(w) != gen || (SRL_STATE(w) != SRL_READY && SRL_STATE(w) != SRL_RETIRED))
            wrong("a hold on a freed block");
        srl_release(&b, slot);
    }
    pthread_join(t, NULL);
    check_clean(0);
}

/* Reads the one block as soon as its word says so: nothing else orders the bytes. */
static void *publisher(void *arg) {
    srl_arena *a = arg;
    for (long i = 0; i < rounds; i++) {
        srl_request r = {.nbytes = 64, .tag = "run/p", .tag_len = 5};
        if (srl_reserve(a, &r, srl_now_ns(CLOCK_MONOTONIC) + 1000000000u))
            return wrong("no block"), NULL;
        memset(data + r.offset, (int)(r.nonce & 255), r.nbytes);
        srl_seal(a, r.slot, r.generation, 0, 0, true, false);
        sched_yield();
        srl_free(a, r.slot, r.generation, r.nonce);
    }
    srl_store_sc(board, UINT64_MAX);
    return NULL;
}

static void publish(void) {
    pthread_t t;
    srl_arena a, b;
    make(zeroed);
    attach(&a, 0, nobody_dies);
    attach(&b, 1, nobody_dies);
    pthread_create(&t, NULL, publisher, &a);
    while (srl_load_sc(board) != UINT64_MAX)
        for (uint32_t slot = 0; slot < 4; slot++) {
            srl_block *at = srl_at(&b, slot);
            read_block(&b, slot, SRL_GEN(srl_load_relaxed(&at->word)), srl_load_relaxed(&at->nonce));
        }
    pthread_join(t, NULL);
    if (!reads)
        wrong("no read found its block");
    check_clean(0);
}

static void *shared(size_t n) {
    return mmap(NULL, n, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
}

/* A child that reserves until it is killed; -> its pid. Most kills hit the lock, since it does little else.
 */
static pid_t busy_child(uint32_t self) {
    pid_t pid = fork();
    if (pid)
        return pid;
    srl_arena a;
    attach(&a, self, nobody_dies);
    for (;;) {
        srl_request r = {.nbytes = 70000, .tag = "run/c", .tag_len = 5};
        if (srl_reserve(&a, &r, 0) == 0)
            srl_abort(&a, r.slot, r.generation);
    }
}

static void takeover(void) {
    unsigned taken = 0;
    make(shared);
    srl_arena a;
    attach(&a, 1, everybody_died);
    for (int i = 0; i < 300; i++) {
        pid_t pid = busy_child(0);
        usleep(500 + (unsigned)(i * 7 % 1500));
        kill(pid, SIGKILL);
        waitpid(pid, NULL, 0);
        taken += srl_lock_owner(&a) == 0;
        srl_request r = {.nbytes = 300000, .tag = "run/p", .tag_len = 5};
        uint64_t began = srl_now_ns(CLOCK_MONOTONIC);
        if (srl_reserve(&a, &r, began + 2000000000u))
            wrong("the lock of a dead process was not taken over");
        else
            srl_abort(&a, r.slot, r.generation);
        srl_sweep(&a, 0);
    }
    if (taken < 10)
        wrong("hardly a kill hit the lock");
    srl_sweep(&a, 1);
    check_clean(0);
}

static void stopped(void) {
    make(shared);
    pid_t pid = fork();
    srl_arena a;
    if (!pid) {
        attach(&a, 0, nobody_dies);
        srl_lock(&a, 0);
        raise(SIGSTOP);
        srl_unlock(&a);
        _exit(0);
    }
    attach(&a, 1, nobody_dies);
    waitpid(pid, NULL, WUNTRACED);
    srl_request r = {.nbytes = 10, .tag = "run", .tag_len = 3};
    uint64_t began = srl_now_ns(CLOCK_MONOTONIC);
    if (srl_reserve(&a, &r, began + 100000000u) != -ETIMEDOUT || srl_lock_owner(&a) != 0)
        wrong("a live holder was robbed");
    if (srl_reserve(&a, &r, 0) != -EAGAIN)
        wrong("a lock that is held was waited for");
    kill(pid, SIGCONT);
    waitpid(pid, NULL, 0);
    if (srl_reserve(&a, &r, srl_now_ns(CLOCK_MONOTONIC) + 1000000000u))
        wrong("the lock was not passed on");
}

/* The generation before the last: used once more, then never again. */
static void wrap(void) {
    make(zeroed);
    srl_arena a;
    attach(&a, 0, nobody_dies);
    srl_request r = {.nbytes = 10, .tag = "run", .tag_len = 3};
    srl_reserve(&a, &r, 0);
    srl_abort(&a, r.slot, r.generation);
    uint32_t slot = r.slot;
    srl_store_sc(&srl_at(&a, slot)->word, SRL_WORD(UINT32_MAX - 1, SRL_FREE, 0, 0));
    if (srl_reserve(&a, &r, 0) || r.slot != slot || r.generation != UINT32_MAX - 1)
        wrong("the descriptor was not used in its last generation");
    srl_abort(&a, r.slot, r.generation);
    if (srl_reserve(&a, &r, 0) || r.slot == slot)
        wrong("a descriptor of generation 2^32 - 1 was used again");
}

int main(int argc, char **argv) {
    struct {
        const char *name;
        void (*run)(void);
    } modes[] = {
        {"threads", threads}, {"duel", duel}, {"publish", publish},
        {"takeover", takeover}, {"stopped", stopped}, {"wrap", wrap}};
    if (argc > 2)
        rounds = atol(argv[2]);
    for (size_t i = 0; i < sizeof modes / sizeof *modes; i++)
        if (argc > 1 && !strcmp(argv[1], modes[i].name))
            modes[i].run();
    printf(faults ? "%d faults\n" : "ok\n", faults);
    return faults != 0;
}
