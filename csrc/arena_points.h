/* Crash points: with -DSRL_CRASH_POINTS one before and one after every store, CAS and fetch-op on shared memory.
 *
 * Included by arena_atomics.h alone. A point's number is its index in the section `srl_points`, so that the
 * driver (tests/arena/crash_driver.c) can list them all and die at any of them; tests/arena/stores.py fails for
 * a store that has none. Without the flag nothing is compiled: SRL_SET and SRL_ZERO are a store and a memset.
 */
#ifndef SRL_ARENA_POINTS_H
#define SRL_ARENA_POINTS_H

#include <string.h>

#ifndef SRL_CRASH_POINTS

#define SRL_SET(lvalue, value) ((lvalue) = (value)) /* a plain store to shared memory, under the lock */
#define SRL_ZERO(at, nbytes)   memset(at, 0, nbytes)
#define SRL_OUTSIDE(call)      (call) /* a change that others see, but not in shared memory: a file */

#else

typedef struct {
    const char *file, *function;
    long line, after; /* after: 0 before the store, 1 after it */
} srl_point;

void srl_at_point(const srl_point *here); /* the driver's; may not return */

#define SRL_POINT(after)                                                                                     \
    do {                                                                                                     \
        static const srl_point here_                                                                         \
            __attribute__((section("srl_points"), used)) = {__FILE__, __func__, __LINE__, after};            \
        srl_at_point(&here_);                                                                                \
    } while (0)
#define SRL_POINTED(store)                                                                                   \
    ({                                                                                                       \
        SRL_POINT(0);                                                                                        \
        store;                                                                                               \
        SRL_POINT(1);                                                                                        \
    })
#define SRL_POINTED_VALUE(op)                                                                                \
    ({                                                                                                       \
        SRL_POINT(0);                                                                                        \
        __auto_type value_ = op;                                                                             \
        SRL_POINT(1);                                                                                        \
        value_;                                                                                              \
    })

#define SRL_SET(lvalue, value)         SRL_POINTED((lvalue) = (value))
#define SRL_ZERO(at, nbytes)           SRL_POINTED(memset(at, 0, nbytes))
#define SRL_OUTSIDE(call)              SRL_POINTED_VALUE(call)
#define srl_store_relaxed(p, v)        SRL_POINTED(srl_store_relaxed(p, v))
#define srl_store_release(p, v)        SRL_POINTED(srl_store_release(p, v))
#define srl_store_sc(p, v)             SRL_POINTED(srl_store_sc(p, v))
#define srl_store32_relaxed(p, v)      SRL_POINTED(srl_store32_relaxed(p, v))
#define srl_store32_sc(p, v)           SRL_POINTED(srl_store32_sc(p, v))
#define srl_or_sc(p, v)                SRL_POINTED_VALUE(srl_or_sc(p, v))
#define srl_and_sc(p, v)               SRL_POINTED_VALUE(srl_and_sc(p, v))
#define srl_add_sc(p, v)               SRL_POINTED_VALUE(srl_add_sc(p, v))
#define srl_add32_sc(p, v)             SRL_POINTED_VALUE(srl_add32_sc(p, v))
#define srl_swap_sc(p, v)              SRL_POINTED_VALUE(srl_swap_sc(p, v))
#define srl_cas_sc(p, expected, value) SRL_POINTED_VALUE(srl_cas_sc(p, expected, value))

#endif
#endif
