/* How full the arena is when its allocator must refuse: an RL-shaped stream through the real allocator.
 *
 * Built and run by test_occupancy.py, which draws the stream and writes it to stdin: one line per rollout, "a b c drop
 * key" (three payload sizes in bytes, whether it is dropped at once, its place in the order of leaving). On a refusal
 * the live bytes over the capacity are noted, once per payload, and the rollouts that leave first are freed until it
 * fits. No data is touched, so 8 GiB of it need no memory. Prints one occupancy per line.
 */
#include "arena_core.h"
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#define CAPACITY (UINT64_C(8) << 30)
#define PARTS    3
#define MOST     100000

typedef struct {
    long key, number;
    uint64_t sizes[PARTS];
    srl_request at[PARTS];
} rollout;

static srl_arena arena;
static rollout *heap[MOST];
static size_t waiting;
static uint64_t live;

static int nobody_dies(void *ctx, unsigned p) {
    return 0;
}

static uint64_t soon(void) {
    return srl_now_ns(CLOCK_MONOTONIC) + 1000000000u;
}

static void make(void) {
    uint64_t size = srl_ctl_size(CAPACITY, srl_max_blocks(CAPACITY));
    void *ctl = calloc(1, size);
    srl_header given = {.max_processes = 1, .table_step = 65536};
    srl_format(ctl, CAPACITY, &given);
    if (srl_open(&arena, ctl, size))
        abort();
    arena.self = 0;
    arena.is_dead = nobody_dies;
    arena.holds = calloc(65536, sizeof(srl_hold));
    if (srl_commit_table(&arena, 0, 65536, soon()) ||
        srl_commit_pages(&arena, 0, CAPACITY / SRL_PAGE, soon()))
        abort();
}

static bool leaves_before(const rollout *a, const rollout *b) {
    return a->key != b->key ? a->key < b->key : a->number < b->number;
}

static void push(rollout *r) {
    size_t i = waiting++;
    for (; i && leaves_before(r, heap[(i - 1) / 2]); i = (i - 1) / 2)
        heap[i] = heap[(i - 1) / 2];
    heap[i] = r;
}

static rollout *pop(void) {
    rollout *first = heap[0], *last = heap[--waiting];
    size_t i = 0, child;
    while ((child = 2 * i + 1) < waiting) {
        child += child + 1 < waiting && leaves_before(heap[child + 1], heap[child]);
        if (!leaves_before(heap[child], last))
            break;
        heap[i] = heap[child];
        i = child;
    }
    heap[i] = last;
    return first;
}

static void drop(void) {
    rollout *r = pop();
    for (int i = 0; i < PARTS; i++) {
        if (srl_abort(&arena, r->at[i].slot, r->at[i].generation))
            abort();
        live -= r->sizes[i];
    }
    free(r);
}

/* -> 0, or -1 when nothing is left to free and it still does not fit. */
static int place(srl_request *q, bool noting) {
    for (bool first = true;; first = false) {
        int rc = srl_reserve(&arena, q, soon());
        if (rc == 0)
            return 0;
        if (rc != -ENOSPC)
            abort();
        if (first && noting)
            printf("%.6f\n", (double)live / (double)CAPACITY);
        if (!waiting)
            return -1;
        drop();
    }
}

int main(int argc, char **argv) {
    long note_from = argc > 1 ? atol(argv[1]) : 0, number = 0;
    make();
    for (;;) {
        rollout *r = calloc(1, sizeof *r);
        int dropped;
        if (scanf("%lu %lu %lu %d %ld", r->sizes, r->sizes + 1, r->sizes + 2, &dropped, &r->key) != 5)
            return 0;
        r->number = ++number;
        for (int i = 0; i < PARTS; i++) {
            r->at[i] = (srl_request){.nbytes = r->sizes[i], .tag = "run", .tag_len = 3};
            if (place(r->at + i, number > note_from))
                return 1;
            live += r->sizes[i];
        }
        push(r);
        if (dropped && heap[0] == r)
            drop();
    }
}
