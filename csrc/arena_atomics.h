/* Atomic helpers of the arena: the ordering is in the helper's name, and nothing else in csrc/ spells one.
 * Every store to shared memory is one of these, or SRL_SET or SRL_ZERO of arena_points.h.
 *
 * Used by every arena_*.c, in every attached process (or thread, over malloc'd memory). The four accesses of
 * the holder protocol (set bit, re-read word; retire word, read bitmap) are Dekker's pattern, so they are
 * seq_cst operations and no fences: a fence would be invisible to ThreadSanitizer.
 */
#ifndef SRL_ARENA_ATOMICS_H
#define SRL_ARENA_ATOMICS_H

#include <stdbool.h>
#include <stdint.h>

static inline uint64_t srl_load_sc(const uint64_t *p) {
    return __atomic_load_n(p, __ATOMIC_SEQ_CST);
}
static inline uint64_t srl_load_acquire(const uint64_t *p) {
    return __atomic_load_n(p, __ATOMIC_ACQUIRE);
}
static inline uint64_t srl_load_relaxed(const uint64_t *p) {
    return __atomic_load_n(p, __ATOMIC_RELAXED);
}
static inline void srl_store_relaxed(uint64_t *p, uint64_t v) {
    __atomic_store_n(p, v, __ATOMIC_RELAXED);
}
static inline void srl_store_release(uint64_t *p, uint64_t v) {
    __atomic_store_n(p, v, __ATOMIC_RELEASE);
}
static inline void srl_store_sc(uint64_t *p, uint64_t v) {
    __atomic_store_n(p, v, __ATOMIC_SEQ_CST);
}
static inline uint64_t srl_or_sc(uint64_t *p, uint64_t v) {
    return __atomic_fetch_or(p, v, __ATOMIC_SEQ_CST);
}
static inline uint64_t srl_and_sc(uint64_t *p, uint64_t v) {
    return __atomic_fetch_and(p, v, __ATOMIC_SEQ_CST);
}
static inline uint64_t srl_add_sc(uint64_t *p, uint64_t v) {
    return __atomic_fetch_add(p, v, __ATOMIC_SEQ_CST);
}
static inline uint64_t srl_swap_sc(uint64_t *p, uint64_t v) {
    return __atomic_exchange_n(p, v, __ATOMIC_SEQ_CST);
}

static inline bool srl_cas_sc(uint64_t *p, uint64_t expected, uint64_t wanted) {
    return __atomic_compare_exchange_n(p, &expected, wanted, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);
}

static inline uint32_t srl_load32_sc(const uint32_t *p) {
    return __atomic_load_n(p, __ATOMIC_SEQ_CST);
}
static inline void srl_store32_relaxed(uint32_t *p, uint32_t v) {
    __atomic_store_n(p, v, __ATOMIC_RELAXED);
}
static inline void srl_store32_sc(uint32_t *p, uint32_t v) {
    __atomic_store_n(p, v, __ATOMIC_SEQ_CST);
}
static inline uint32_t srl_add32_sc(uint32_t *p, uint32_t v) {
    return __atomic_fetch_add(p, v, __ATOMIC_SEQ_CST);
}

#include "arena_points.h"

/* Bytes that a reader without a hold may look at while they change (tags): a relaxed copy, word by word. */
static inline void srl_copy_relaxed(void *to, const void *from, unsigned nbytes) {
    uint64_t *t = to;
    const uint64_t *f = from;
    for (unsigned i = 0; i < nbytes / 8; i++)
        srl_store_relaxed(t + i, srl_load_relaxed(f + i));
}

#endif
