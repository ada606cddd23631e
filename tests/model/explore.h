/* Every interleaving of a small system, and every SIGKILL between two of its steps, breadth first.
 *
 * A model defines `struct state` (bytes, zeroed before use) and the four functions below, and calls `explore()`.
 * One step is one atomic access to shared memory, as in csrc/. The first fault found is the shortest one.
 */
#ifndef EXPLORE_H
#define EXPLORE_H

#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct state state;
static bool move(state *s, int thread);                 /* one step of a thread; false: it cannot move now */
static bool can_be_killed(const state *s, int process); /* and that may still happen in this scenario */
static void kill_process(state *s, int process);
static void at_rest(state *s); /* nobody can move: recover as the protocol says, then look for what is left */

static const char *fault; /* set by whoever sees one */
static int threads, processes;
static size_t state_size;

static struct {
    char *states;
    uint32_t *table;
    size_t count, room, slots;
} seen;

static state *seen_at(size_t i) {
    return (state *)(seen.states + i * state_size);
}

static uint64_t hash(const void *bytes) {
    uint64_t h = 1469598103934665603u;
    for (size_t i = 0; i < state_size; i++)
        h = (h ^ ((const uint8_t *)bytes)[i]) * 1099511628211u;
    return h ^ h >> 32;
}

static void insert(size_t i) {
    size_t at = hash(seen_at(i)) % seen.slots;
    while (seen.table[at])
        at = (at + 1) % seen.slots;
    seen.table[at] = (uint32_t)i + 1;
}

static bool known(const state *s) {
    size_t at = hash(s) % seen.slots;
    for (; seen.table[at]; at = (at + 1) % seen.slots)
        if (!memcmp(seen_at(seen.table[at] - 1), s, state_size))
            return true;
    return false;
}

static void add(const state *s) {
    if (seen.count && known(s))
        return;
    if (seen.count == seen.room) {
        seen.room = seen.room ? 2 * seen.room : 4096;
        seen.states = realloc(seen.states, seen.room * state_size);
        seen.slots = 4 * seen.room;
        free(seen.table);
        seen.table = calloc(seen.slots, sizeof *seen.table);
        for (size_t i = 0; i < seen.count; i++)
            insert(i);
    }
    memcpy(seen_at(seen.count), s, state_size);
    insert(seen.count++);
}

static void step_from(const state *s, state *next) {
    bool moved = false;
    for (int t = 0; t < threads && !fault; t++) {
        memcpy(next, s, state_size);
        if (!move(next, t))
            continue;
        moved = true;
        if (!fault)
            add(next);
    }
    for (int p = 0; p < processes && moved && !fault; p++)
        if (can_be_killed(s, p)) {
            memcpy(next, s, state_size);
            kill_process(next, p);
            add(next);
        }
    if (!moved) {
        memcpy(next, s, state_size);
        at_rest(next);
    }
}

/* -> how many states were looked at until the first fault, or in all. */
static size_t explore(const state *first, size_t size) {
    state *s = malloc(size), *next = malloc(size);
    free(seen.states);
    free(seen.table);
    memset(&seen, 0, sizeof seen);
    state_size = size;
    fault = NULL;
    add(first);
    size_t i = 0;
    for (; i < seen.count && !fault; i++) {
        memcpy(s, seen_at(i), size);
        step_from(s, next);
    }
    free(s);
    free(next);
    return i;
}

#endif
