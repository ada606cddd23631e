/* The allocator's lock (with takeover from the dead) and the queue for space.
 *
 * Runs in every process that reserves or frees. lock = {seq, owner, waiters}: every acquisition bumps seq, so
 * a takeover CAS prepared against a dead owner cannot hit a later tenant of the same process slot. Only the
 * dead are robbed: a stopped holder keeps the lock, and its waiters name it at their deadline.
 */
#include "arena_core.h"
#include "arena_atomics.h"
#include <errno.h>
#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define WAITERS             UINT64_C(1)
#define OWNER(w)            ((unsigned)((w) >> 16 & 0xffff))
#define HELD(seq, p, flags) ((uint64_t)(uint32_t)(seq) << 32 | (uint64_t)((p) + 1) << 16 | (flags))
#define TICK_MIN_NS         1000000u
#define TICK_MAX_NS         4000000u
#define STALE_TICKET_NS     200000000u

/* Little endian, as x86-64 and aarch64 Linux are. */
static uint32_t *low_half(uint64_t *word) {
    return (uint32_t *)word;
}

static void futex_wait(uint32_t *word, uint32_t seen, uint64_t timeout_ns) {
    struct timespec t = {.tv_sec = (time_t)(timeout_ns / 1000000000u),
                         .tv_nsec = (long)(timeout_ns % 1000000000u)};
    syscall(SYS_futex, word, FUTEX_WAIT, seen, &t, NULL, 0);
}

static void futex_wake(uint32_t *word, int how_many) {
    syscall(SYS_futex, word, FUTEX_WAKE, how_many, NULL, NULL, 0);
}

unsigned srl_lock_owner(const srl_arena *a) {
    unsigned owner = OWNER(srl_load_sc(&a->h->lock));
    return owner ? owner - 1 : SRL_NONE;
}

/* 1: the lock is ours (rebuilt if its owner had died); 0: a live process has it; < 0: error. */
static int try_once(srl_arena *a, uint64_t flags, bool probe) {
    srl_header *h = a->h;
    uint64_t w = srl_load_sc(&h->lock);
    uint64_t seq = (w >> 32) + 1;
    if (!OWNER(w))
        return srl_cas_sc(&h->lock, w, HELD(seq, a->self, flags | (w & WAITERS)));
    unsigned owner = OWNER(w) - 1;
    if (owner >= a->max_processes)
        return -EUCLEAN;
    if (owner != a->self && (!probe || !a->is_dead(a->ctx, owner)))
        return 0;
    if (!srl_cas_sc(&h->lock, w, HELD(seq, a->self, flags | WAITERS)))
        return 0;
    int rc = srl_rebuild(a);
    if (rc < 0) {
        srl_store_sc(&h->lock, w); /* still the dead owner's: the next one meets the same contradiction */
        return rc;
    }
    srl_event_note(a, SRL_DID_TAKE_OVER, owner, 0, 0);
    return 1;
}

static int wait_for_it(srl_arena *a, uint64_t deadline_ns) {
    uint64_t tick = TICK_MIN_NS;
    for (;;) {
        int rc = try_once(a, WAITERS, true);
        if (rc)
            return rc;
        uint64_t now = srl_now_ns(CLOCK_MONOTONIC);
        if (now >= deadline_ns)
            return -ETIMEDOUT;
        uint64_t w = srl_load_sc(&a->h->lock);
        if (!OWNER(w) || (!(w & WAITERS) && !srl_cas_sc(&a->h->lock, w, w | WAITERS)))
            continue;
        uint64_t left = deadline_ns - now;
        futex_wait(low_half(&a->h->lock), (uint32_t)(w | WAITERS), left < tick ? left : tick);
        if (tick < TICK_MAX_NS)
            tick *= 2;
    }
}

static int private_lock(srl_arena *a, uint64_t deadline_ns) {
    if (pthread_mutex_trylock(&a->mutex) == 0)
        return 0;
    if (!deadline_ns)
        return -EAGAIN;
    uint64_t now = srl_now_ns(CLOCK_MONOTONIC), wall = srl_now_ns(CLOCK_REALTIME);
    uint64_t until = wall + (deadline_ns > now ? deadline_ns - now : 0);
    struct timespec t = {.tv_sec = (time_t)(until / 1000000000u), .tv_nsec = (long)(until % 1000000000u)};
    return pthread_mutex_timedlock(&a->mutex, &t) ? -ETIMEDOUT : 0;
}

static int shared_lock(srl_arena *a, uint64_t deadline_ns) {
    for (int spin = 0; spin < 64; spin++) {
        int rc = try_once(a, 0, false);
        if (rc)
            return rc;
    }
    return deadline_ns ? wait_for_it(a, deadline_ns) : -EAGAIN;
}

int srl_lock(srl_arena *a, uint64_t deadline_ns) {
    int rc = private_lock(a, deadline_ns);
    if (rc)
        return rc;
    rc = shared_lock(a, deadline_ns);
    if (rc < 0)
        pthread_mutex_unlock(&a->mutex);
    return rc < 0 ? rc : 0;
}

static void release(srl_arena *a) {
    srl_header *h = a->h;
    bool wake = a->freed;
    a->freed = false;
    uint64_t w = srl_load_sc(&h->lock);
    while (!srl_cas_sc(&h->lock, w, w & ~UINT64_C(0xffffffff)))
        w = srl_load_sc(&h->lock); /* a waiter set its flag meanwhile */
    if (w & WAITERS)
        futex_wake(low_half(&h->lock), 1);
    pthread_mutex_unlock(&a->mutex);
    if (wake)
        srl_space_wake(a);
}

/* A release that found the lock taken left its block pending after we drained: look again after letting go. */
void srl_unlock(srl_arena *a) {
    release(a);
    srl_drain_if_free(a);
}

void srl_drain_if_free(srl_arena *a) {
    while (srl_load_sc(&a->h->pending_hint) && srl_lock(a, 0) == 0) {
        srl_drain(a);
        release(a);
    }
}

void srl_queue_enter(srl_arena *a, bool borrows) {
    srl_process *me = a->processes + a->self;
    srl_add_sc(&a->h->waits, 1);
    /* before the ticket, and after it in leave: a kill can only leave it too high */
    srl_add32_sc(&a->h->space_waiters, 1);
    uint64_t now = srl_now_ns(CLOCK_MONOTONIC);
    srl_store_relaxed(&me->stamp_ns, now);
    srl_store_relaxed(&me->queue_ns, now);
    srl_store_sc(&me->ticket, srl_add_sc(&a->h->next_ticket, 1) | (borrows ? SRL_BORROWS : 0));
}

void srl_queue_class(srl_arena *a, bool borrows) {
    srl_process *me = a->processes + a->self;
    uint64_t had = srl_load_sc(&me->ticket), has = (had & ~SRL_BORROWS) | (borrows ? SRL_BORROWS : 0);
    if (had && has != had)
        srl_store_sc(&me->ticket, has);
}

void srl_queue_leave(srl_arena *a) {
    srl_store_sc(&a->processes[a->self].ticket, 0);
    srl_add32_sc(&a->h->space_waiters, UINT32_MAX);
    srl_space_wake(a); /* the next in line looks now instead of at its tick */
}

/* A waiter that stopped looking (dead, or SIGSTOP) is passed by. */
static bool still_looks(const srl_process *waiter, uint64_t now) {
    return srl_load_relaxed(&waiter->stamp_ns) + STALE_TICKET_NS > now;
}

/* Nobody who waits comes before this attempt: those within their shares first, then by age of the ticket; who has
 * none comes last among its kind. */
bool srl_queue_first(const srl_arena *a, bool borrows) {
    uint64_t ticket = srl_load_sc(&a->processes[a->self].ticket) & ~SRL_BORROWS;
    uint64_t mine = (ticket ? ticket : SRL_BORROWS - 1) | (borrows ? SRL_BORROWS : 0);
    uint64_t now = 0;
    for (unsigned p = 0; p < a->max_processes; p++) {
        uint64_t t = srl_load_sc(&a->processes[p].ticket);
        if (!t || p == a->self || t > mine)
            continue;
        if (!now)
            now = srl_now_ns(CLOCK_MONOTONIC);
        if (still_looks(a->processes + p, now))
            return false;
    }
    return true;
}

/* How many other processes wait for space; since_ns: when the first of them began
 * (CLOCK_MONOTONIC), UINT64_MAX if none does. */
unsigned srl_queue_others(const srl_arena *a, uint64_t *since_ns) {
    uint64_t now = srl_now_ns(CLOCK_MONOTONIC);
    unsigned n = 0;
    *since_ns = UINT64_MAX;
    for (unsigned p = 0; p < a->max_processes; p++) {
        const srl_process *one = a->processes + p;
        if (p == a->self || !srl_load_sc(&one->ticket) || !still_looks(one, now))
            continue;
        uint64_t began = srl_load_relaxed(&one->queue_ns);
        *since_ns = began < *since_ns ? began : *since_ns;
        n++;
    }
    return n;
}

void srl_space_wait(srl_arena *a, uint32_t seen, uint64_t timeout_ns) {
    futex_wait(&a->h->space_seq, seen, timeout_ns);
    srl_store_relaxed(&a->processes[a->self].stamp_ns, srl_now_ns(CLOCK_MONOTONIC));
}

void srl_space_wake(srl_arena *a) {
    if (!srl_load32_sc(&a->h->space_waiters))
        return;
    srl_add32_sc(&a->h->space_seq, 1);
    futex_wake(&a->h->space_seq, INT32_MAX);
}
