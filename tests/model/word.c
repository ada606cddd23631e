/* The word of a block, its holders, the sweep of the dead and the claim of their slots: every interleaving.
 *
 * One descriptor, holders in two words, up to four processes. The operations have the names of csrc/arena_*.c and
 * one step per atomic access there; RETIRED -> FREEING -> FREE is one step here, alloc.c has what is between.
 * Prints a line per protocol and scenario: "<protocol> | <scenario>: <states> states, <fault or ok>".
 */
#include "explore.h"

enum { FREE, WRITING, READY, RETIRED };
enum op { END, ACQUIRE, RELEASE, FREE_IT, RESERVE, SEAL, SWEEP, CLAIM, DONE };
enum { NEVER, OWN, ALL };
#define NOBODY (-1)
#define FINISH 100 /* steps of srl_finish(), within whichever operation */

/* What csrc/ does; each field the other way is a protocol that fails. */
static struct {
    bool undo_finishes;   /* a failed acquire is a full release */
    int sweep_finishes;   /* on ALL retired blocks, on those whose bit it cleared (OWN), NEVER */
    bool claim_sweeps;    /* a dirty slot is swept before it is used */
    bool counts_first;    /* the private count decides before the shared bit is touched, under a mutex */
    bool sweep_has_byte;  /* sweep and claim hold byte 256 + slot; else they only look at byte slot */
    bool sweep_does_done; /* a complete done set is retired */
    bool in_order;        /* the re-read of the word comes after the or, as seq_cst promises */
} rule, rule_of_core = {true, ALL, true, true, true, true, true};

typedef struct {
    uint8_t op, slot, generation; /* slot: of SWEEP and CLAIM; generation: of the handle */
} instruction;

typedef struct {
    uint8_t process, slot, at, step, hold; /* hold: generation + 1 of a live view */
    uint8_t seen, cleared;                 /* what an earlier step of the operation read */
} thread;

struct state {
    uint8_t generation, word, owner, readers, done, holders[2], frees[4];
    int8_t live[4], sweeping[4];   /* bytes S and 256 + S: the process that locks them */
    uint8_t used[4];               /* processes[S].used */
    uint8_t count[4], count_of[4]; /* private counts of each process, and of which generation */
    uint8_t dead, kills;
    thread t[4];
};

static instruction program[4][6];
static int kills_allowed;

static bool alive(const state *s, int p) {
    return !(s->dead >> p & 1);
}
static void next(thread *t) {
    t->at++, t->step = 0;
}
static bool complete(const state *s) {
    return s->readers && __builtin_popcount(s->done) >= s->readers;
}

static void give_back(state *s) {
    if (++s->frees[s->generation] > 1)
        fault = "double free";
    s->word = FREE, s->generation++, s->readers = 0, s->done = 0;
}

static bool set_bit(state *s, int slot) {
    return s->holders[slot & 1] |= (uint8_t)(1 << slot);
}
static bool clear_bit(state *s, int slot) {
    bool was = s->holders[slot & 1] >> slot & 1;
    s->holders[slot & 1] &= (uint8_t)~(1 << slot);
    return was;
}

/* srl_finish: word, bitmap word by word, CAS. True when it is through. */
static bool finish(state *s, thread *t) {
    switch (t->step++ - FINISH) {
    case 0:
        t->seen = s->generation;
        return s->word != RETIRED;
    case 1:
    case 2:
        return s->holders[t->step - FINISH - 2] != 0;
    default:
        if (s->word == RETIRED && s->generation == t->seen)
            give_back(s);
        return true;
    }
}

static void acquire(state *s, thread *t, instruction i) {
    uint8_t *count = s->count + t->process;
    bool good = s->generation == i.generation && s->word == READY;
    switch (t->step) {
    case 0:
        if (*count && (rule.counts_first || s->count_of[t->process] == i.generation)) {
            if (s->count_of[t->process] == i.generation)
                ++*count, t->hold = i.generation + 1;
            next(t);
        } else
            t->step = rule.in_order ? 1 : 5;
        return;
    case 1: /* srl_or_sc */
        set_bit(s, t->slot), t->step = 2;
        return;
    case 2: /* the word again */
        if (!good) {
            t->step = 3;
            return;
        }
        *count = 1, s->count_of[t->process] = i.generation, t->hold = i.generation + 1;
        next(t);
        return;
    case 3: /* drop_bit */
        clear_bit(s, t->slot);
        rule.undo_finishes ? (void)(t->step = FINISH) : next(t);
        return;
    case 5: /* the word read too early */
        t->seen = good, t->step = 6;
        return;
    case 6:
        set_bit(s, t->slot), t->step = 3;
        if (t->seen) {
            *count = 1, s->count_of[t->process] = i.generation, t->hold = i.generation + 1;
            next(t);
        }
        return;
    default:
        if (finish(s, t))
            next(t);
    }
}

static void release(state *s, thread *t) {
    if (t->step == 0) {
        bool last = t->hold && --s->count[t->process] == 0;
        t->hold = 0;
        last ? (void)(t->step = 1) : next(t);
    } else if (t->step == 1)
        clear_bit(s, t->slot), t->step = FINISH;
    else if (finish(s, t))
        next(t);
}

static void free_it(state *s, thread *t, instruction i) {
    if (t->step == 0 && s->generation == i.generation && s->word == READY)
        s->word = RETIRED, t->step = FINISH;
    else if (t->step == 0 || finish(s, t))
        next(t);
}

static void done(state *s, thread *t, instruction i) {
    if (t->step == 0) {
        if (s->word != READY || !s->readers || s->generation != i.generation)
            next(t);
        else
            s->done |= (uint8_t)(1 << t->slot), t->step = 1;
    } else if (t->step == 1) {
        complete(s) ? (void)(t->step = 2) : next(t);
    } else if (t->step == 2) {
        if (s->word == READY && s->generation == i.generation)
            s->word = RETIRED, t->step = FINISH;
        else
            next(t);
    } else if (finish(s, t))
        next(t);
}

/* srl_sweep of one slot: steps 1.., then finish; true when it is through. */
static bool sweep_slot(state *s, thread *t, int z) {
    switch (t->step) {
    case 1:
        if (s->word == WRITING && s->owner == z)
            give_back(s);
        t->step = 2;
        return false;
    case 2:
        t->cleared = clear_bit(s, z);
        t->step = 3;
        return rule.sweep_finishes == NEVER || (rule.sweep_finishes == OWN && !t->cleared);
    case 3:
        if (rule.sweep_does_done && s->word == READY && complete(s))
            s->word = RETIRED;
        t->step = FINISH;
        return false;
    default:
        return finish(s, t);
    }
}

static void sweep(state *s, thread *t, int z) {
    bool taken = s->live[z] != NOBODY || !s->used[z];
    if (t->step == 0) { /* byte 256 + z, then byte z */
        if (rule.sweep_has_byte ? s->sweeping[z] != NOBODY : taken) {
            next(t);
            return;
        }
        t->step = rule.sweep_has_byte ? 50 : 1;
        if (rule.sweep_has_byte)
            s->sweeping[z] = (int8_t)t->process;
    } else if (t->step == 50) {
        t->step = taken ? 52 : 1;
    } else if (t->step == 51) {
        s->used[z] = 0, t->step = 52;
    } else if (t->step == 52) {
        if (s->sweeping[z] == t->process)
            s->sweeping[z] = NOBODY;
        next(t);
    } else if (sweep_slot(s, t, z))
        t->step = 51;
}

static bool claim(state *s, thread *t, int z) {
    if (t->step == 0) {
        if (rule.sweep_has_byte && s->sweeping[z] != NOBODY)
            return false;
        if (rule.sweep_has_byte)
            s->sweeping[z] = (int8_t)t->process;
        t->step = 50;
    } else if (t->step == 50) {
        if (s->live[z] != NOBODY) { /* let go and try again later */
            if (s->sweeping[z] == t->process)
                s->sweeping[z] = NOBODY;
            t->step = 53;
            return true;
        }
        s->live[z] = (int8_t)t->process;
        t->step = rule.claim_sweeps && s->used[z] ? 1 : 51;
    } else if (t->step == 51) {
        t->slot = (uint8_t)z, s->used[z] = 1, t->step = 52;
    } else if (t->step == 52) {
        if (s->sweeping[z] == t->process)
            s->sweeping[z] = NOBODY;
        next(t);
    } else if (t->step == 53) {
        if (s->live[z] != NOBODY)
            return false;
        t->step = 0;
    } else if (sweep_slot(s, t, z))
        t->step = 51;
    return true;
}

/* The mutex around the private counts (the interpreter's lock): threads of one process take turns. */
static bool other_has_mutex(const state *s, int i) {
    for (int j = 0; j < threads; j++) {
        const thread *o = s->t + j;
        uint8_t op = program[j][o->at].op;
        if (j != i && o->process == s->t[i].process && o->step && (op == ACQUIRE || op == RELEASE))
            return true;
    }
    return false;
}

static void check_views(const state *s) {
    for (int i = 0; i < threads; i++) {
        const thread *t = s->t + i;
        bool there = s->generation + 1 == t->hold && (s->word == READY || s->word == RETIRED);
        if (t->hold && alive(s, t->process) && !there)
            fault = "use after free";
    }
}

static bool move(state *s, int number) {
    thread *t = s->t + number;
    instruction i = program[number][t->at];
    if (!alive(s, t->process) || i.op == END)
        return false;
    if (rule.counts_first && (i.op == ACQUIRE || i.op == RELEASE) && other_has_mutex(s, number))
        return false;
    switch (i.op) {
    case ACQUIRE:
        acquire(s, t, i);
        break;
    case RELEASE:
        release(s, t);
        break;
    case FREE_IT:
        free_it(s, t, i);
        break;
    case RESERVE:
        if (s->word != FREE)
            return false;
        s->word = WRITING, s->owner = t->slot, next(t);
        break;
    case SEAL:
        if (s->word == WRITING && s->owner == t->slot)
            s->word = READY;
        next(t);
        break;
    case SWEEP:
        sweep(s, t, i.slot);
        break;
    case CLAIM:
        if (!claim(s, t, i.slot))
            return false;
        break;
    case DONE:
        done(s, t, i);
        break;
    }
    check_views(s);
    return true;
}

static bool can_be_killed(const state *s, int p) {
    return alive(s, p) && s->kills < kills_allowed;
}

static void kill_process(state *s, int p) {
    s->dead |= (uint8_t)(1 << p), s->kills++, s->count[p] = 0;
    for (int z = 0; z < 4; z++) {
        s->live[z] = s->live[z] == p ? NOBODY : s->live[z];
        s->sweeping[z] = s->sweeping[z] == p ? NOBODY : s->sweeping[z];
    }
    for (int i = 0; i < threads; i++)
        if (s->t[i].process == p)
            s->t[i].hold = 0, s->t[i].step = 0, s->t[i].at = 5;
}

static void at_rest(state *s) {
    bool held = false;
    for (int z = 0; z < 4; z++) {
        thread t = {.step = 1};
        while (s->live[z] == NOBODY && s->used[z] && !sweep_slot(s, &t, z))
            ;
    }
    for (int i = 0; i < threads; i++)
        held |= s->t[i].hold && alive(s, s->t[i].process);
    if (s->word == WRITING && s->live[s->owner] == NOBODY)
        fault = "leak: an unsealed block of a dead owner";
    if (held)
        return;
    if (s->word == RETIRED)
        fault = "leak: a retired block without a holder";
    else if (s->holders[0] || s->holders[1])
        fault = "leak: a bit without a holder";
    else if (s->word == READY && complete(s))
        fault = "leak: every reader is done";
}

/* -------------------------------------------------------------------------------------------------- scenarios */

#define ACQ(g) {ACQUIRE, 0, g}
#define FRE(g) {FREE_IT, 0, g}
#define REL    {RELEASE, 0, 0}
#define RES    {RESERVE, 0, 0}
#define SEA    {SEAL, 0, 0}
#define SWE(z) {SWEEP, z, 0}
#define CLA(z) {CLAIM, z, 0}
#define DON    {DONE, 0, 0}

typedef struct {
    const char *name;
    int kills, word, readers, threads;
    int process[4], slot[4]; /* slot 9: none yet */
    instruction program[4][6];
} scenario;

static const scenario scenarios[] = {
    {"free, reader", 0, READY, 0, 2, {0, 1}, {0, 1}, {{FRE(0)}, {ACQ(0), REL}}},
    {"stale handle, slot used again",
     0,
     READY,
     0,
     2,
     {0, 1},
     {0, 1},
     {{FRE(0), RES, SEA, FRE(1)}, {ACQ(0), REL}}},
    {"free, two readers, sweeps, 1 kill",
     1,
     READY,
     0,
     3,
     {0, 1, 2},
     {0, 1, 2},
     {{FRE(0), SWE(1), SWE(2)}, {ACQ(0), REL, SWE(0)}, {ACQ(0), REL, SWE(0), SWE(1)}}},
    {"slot used again, two readers, sweeps, 2 kills",
     2,
     READY,
     0,
     3,
     {0, 1, 2},
     {0, 1, 2},
     {{FRE(0), RES, SEA, FRE(1)}, {ACQ(0), REL, SWE(0)}, {ACQ(0), REL, SWE(1), SWE(0)}}},
    {"a reader dies, its slot is claimed, 1 kill",
     1,
     READY,
     0,
     3,
     {0, 1, 2},
     {0, 1, 9},
     {{FRE(0), SWE(1)}, {ACQ(0), REL}, {CLA(1), ACQ(0), REL}}},
    {"two threads, stale handle beside a live view",
     0,
     READY,
     0,
     3,
     {0, 1, 1},
     {0, 1, 1},
     {{FRE(0), RES, SEA, FRE(1)}, {ACQ(1), REL}, {ACQ(0), REL}}},
    {"a slow sweeper, the slot is claimed, 1 kill",
     1,
     READY,
     0,
     4,
     {0, 1, 2, 3},
     {0, 1, 9, 3},
     {{SWE(1)}, {ACQ(0), REL}, {CLA(1), ACQ(0), REL}, {FRE(0)}}},
    {"two done, 1 kill",
     1,
     READY,
     2,
     3,
     {0, 1, 2},
     {0, 1, 2},
     {{SWE(1), SWE(2)}, {ACQ(0), REL, DON}, {ACQ(0), REL, DON}}},
    {"a reader dies, who claims its slot reads nothing, 1 kill",
     1,
     READY,
     0,
     3,
     {0, 1, 2},
     {0, 1, 9},
     {{FRE(0), SWE(1)}, {ACQ(0), REL}, {CLA(1)}}},
    {"reserve to free, sweeps, 2 kills",
     2,
     FREE,
     0,
     3,
     {0, 1, 2},
     {0, 1, 2},
     {{RES, SEA, FRE(0)}, {SWE(0), ACQ(0), REL}, {SWE(0), SWE(1), FRE(0)}}},
};
#define SCENARIOS (int)(sizeof scenarios / sizeof *scenarios)

static void run(const char *protocol, int number) {
    const scenario *c = scenarios + number;
    state s;
    memset(&s, 0, sizeof s);
    memcpy(program, c->program, sizeof program);
    threads = c->threads, processes = 0, kills_allowed = c->kills;
    s.word = (uint8_t)c->word, s.readers = (uint8_t)c->readers;
    memset(s.live, NOBODY, sizeof s.live);
    memset(s.sweeping, NOBODY, sizeof s.sweeping);
    for (int i = 0; i < threads; i++) {
        int p = c->process[i], slot = c->slot[i];
        processes = p >= processes ? p + 1 : processes;
        s.t[i].process = (uint8_t)p, s.t[i].slot = (uint8_t)slot;
        if (slot < 4)
            s.live[slot] = (int8_t)p, s.used[slot] = 1;
    }
    size_t states = explore(&s, sizeof s);
    printf("%s | %s: %zu states, %s\n", protocol, c->name, states, fault ? fault : "ok");
}

int main(void) {
    rule = rule_of_core;
    for (int i = 0; i < SCENARIOS; i++)
        run("as built", i);
#define BROKEN(what, protocol, number)                                                                       \
    rule = rule_of_core;                                                                                     \
    rule.what;                                                                                               \
    run(protocol, number)
    BROKEN(undo_finishes = false, "undo only clears the bit", 0);
    BROKEN(undo_finishes = false, "undo only clears the bit", 1);
    BROKEN(sweep_finishes = NEVER, "sweep only clears bits", 2);
    BROKEN(sweep_finishes = OWN, "sweep finishes what it cleared", 2);
    BROKEN(claim_sweeps = false, "claim without sweep", 8);
    BROKEN(counts_first = false, "shared bit before the private count", 5);
    BROKEN(sweep_has_byte = false, "sweeper without a byte of its own", 6);
    BROKEN(sweep_does_done = false, "sweep leaves done to the readers", 7);
    BROKEN(in_order = false, "the word read before the bit is set", 0);
    return 0;
}
