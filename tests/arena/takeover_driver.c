/* How long a waiter behind a dead holder of the allocator's lock waits, from the release of the holder's byte.
 *
 *   takeover_driver ROUNDS BLOCKS   over an arena of so many blocks; prints microseconds, one line per round
 *
 * Each round a child takes the lock and is killed by a thread once the survivor waits for it. The survivor asks the
 * kernel at every tick whether the holder lives; the byte was released after the last time it did, so the time since
 * then is an upper bound. Built by test_core.py and benches/bench_takeover.py.
 */
#include "arena_atomics.h"
#include "arena_live.h"
#include <fcntl.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define CAPACITY (UINT64_C(256) << 20)
#define TABLE    131072u
#define SECOND   UINT64_C(1000000000)

static void *ctl;
static uint64_t ctl_size, seen_alive;
static int live_fd;

static uint64_t now(void) {
    return srl_now_ns(CLOCK_MONOTONIC);
}

static void *shared(size_t n) {
    return mmap(NULL, n, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
}

static int noted_is_dead(void *live, unsigned p) {
    uint64_t asked = now();
    int dead = srl_live_is_dead(live, p);
    if (!dead)
        seen_alive = asked;
    return dead;
}

static void claim(srl_arena *a, srl_live *live) {
    char path[64];
    snprintf(path, sizeof path, "/proc/self/fd/%d", live_fd);
    if (srl_open(a, ctl, ctl_size))
        abort();
    a->holds = calloc(a->h->max_blocks, sizeof(srl_hold));
    srl_live_init(live, open(path, O_RDWR | O_CLOEXEC), -1);
    if (srl_claim(a, live) < 0)
        abort();
}

static void make(srl_arena *a, srl_live *live, long blocks) {
    ctl_size = srl_ctl_size(CAPACITY, srl_max_blocks(CAPACITY));
    ctl = shared(ctl_size);
    live_fd = memfd_create("live", MFD_CLOEXEC);
    srl_header given = {.max_processes = 8, .table_step = TABLE};
    srl_format(ctl, CAPACITY, &given);
    claim(a, live);
    a->is_dead = noted_is_dead;
    if (srl_commit_table(a, 0, TABLE, now() + SECOND) ||
        srl_commit_pages(a, 0, CAPACITY / SRL_PAGE, now() + SECOND))
        abort();
    for (long i = 0; i < blocks; i++) {
        srl_request r = {.nbytes = 200, .tag = "run", .tag_len = 3};
        if (srl_reserve(a, &r, now() + SECOND))
            abort();
    }
}

static pid_t holder(void) {
    int said[2];
    if (pipe(said))
        abort();
    pid_t pid = fork();
    if (!pid) {
        srl_arena a;
        srl_live live;
        claim(&a, &live);
        if (srl_lock(&a, now() + SECOND) || write(said[1], "!", 1) != 1)
            abort();
        pause();
    }
    char byte;
    if (read(said[0], &byte, 1) != 1)
        abort();
    close(said[0]), close(said[1]);
    return pid;
}

/* Kills the holder once somebody waits, at any moment of the waiter's tick. */
static void *killer(void *pid) {
    const srl_header *h = ctl;
    while (!(srl_load_sc(&h->lock) & 1))
        sched_yield();
    nanosleep(&(struct timespec){.tv_nsec = 10000000 + rand() % 20000000}, NULL);
    kill(*(pid_t *)pid, SIGKILL);
    return NULL;
}

int main(int argc, char **argv) {
    long rounds = argc > 1 ? atol(argv[1]) : 100, blocks = argc > 2 ? atol(argv[2]) : 1000;
    srl_arena a;
    srl_live live;
    make(&a, &live, blocks);
    while (rounds--) {
        pid_t pid = holder();
        pthread_t thread;
        pthread_create(&thread, NULL, killer, &pid);
        if (srl_lock(&a, now() + 10 * SECOND))
            return 1;
        printf("%lu\n", (now() - seen_alive) / 1000);
        srl_unlock(&a);
        pthread_join(thread, NULL);
        waitpid(pid, NULL, 0);
        srl_sweep_dead(&a, &live);
    }
    return 0;
}
