/* The event ring: the last 4,096 things that happened, for `shmrl arena tail`. Nothing in the core reads it.
 *
 * Written by every attached process without a lock, read by inspectors. A writer takes a number, unmarks the
 * record, fills it and marks it; a reader believes a record whose mark is the number's before and after it
 * looked. Whoever dies in between leaves a number without a record. One that sleeps there for 4,096 events may
 * spoil the record of another: a line for people, not a decision.
 */
#include "arena_atomics.h"
#include "arena_core.h"
#include <time.h>

static uint64_t mark_of(uint64_t number, unsigned kind, uint32_t process) {
    return number << 16 | (uint64_t)kind << 8 | (process & 255);
}

void srl_event_note(srl_arena *a, unsigned kind, uint32_t slot, uint32_t gen, uint64_t detail) {
    uint64_t number = srl_add_sc(&a->h->events, 1);
    srl_event *e = a->events + number % SRL_EVENTS;
    srl_store_relaxed(&e->mark, 0);
    srl_store_release(&e->at_ns, srl_now_ns(CLOCK_MONOTONIC_COARSE)); /* not before the unmarking */
    srl_store_release(&e->block, (uint64_t)gen << 32 | slot);
    srl_store_release(&e->detail, detail);
    srl_store_release(&e->mark, mark_of(number, kind, a->self));
}

static bool read_one(const srl_event *e, uint64_t number, srl_event *out) {
    out->mark = srl_load_acquire(&e->mark);
    out->at_ns = srl_load_acquire(&e->at_ns);
    out->block = srl_load_acquire(&e->block);
    out->detail = srl_load_acquire(&e->detail);
    return out->mark && out->mark >> 16 == number && srl_load_relaxed(&e->mark) == out->mark;
}

/* Events number `first` and later, as far as they are still there -> how many. */
unsigned srl_events_since(const srl_arena *a, uint64_t first, srl_event *out) {
    uint64_t end = srl_load_acquire(&a->h->events);
    unsigned n = 0;
    if (end > SRL_EVENTS && first < end - SRL_EVENTS)
        first = end - SRL_EVENTS;
    for (; first < end; first++)
        n += read_one(a->events + first % SRL_EVENTS, first, out + n);
    return n;
}

static bool is_ending(uint64_t mark) {
    unsigned kind = mark >> 8 & 255;
    return kind == SRL_DID_RETIRE || kind == SRL_DID_DISCARD || kind == SRL_DID_EXPIRE;
}

/* How this generation of a block ended; false: it has not, or that event is no longer there. */
bool srl_event_ending(const srl_arena *a, uint32_t slot, uint32_t gen, srl_event *out) {
    uint64_t block = (uint64_t)gen << 32 | slot, number = srl_load_acquire(&a->h->events);
    for (unsigned left = SRL_EVENTS; number && left; left--) {
        number--;
        if (read_one(a->events + number % SRL_EVENTS, number, out) && out->block == block &&
            is_ending(out->mark))
            return true;
    }
    return false;
}
