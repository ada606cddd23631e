/* The allocator's lock, its takeover and rebuild, and how a block's page comes back: every interleaving.
 *
 * Two pages, two descriptors, up to four processes. The operations have the names of csrc/arena_*.c and one step per
 * access there; who holds a block is word.c's matter. `map` stands for bins, cells, page records and the
 * counters of used bytes, in all and by share: a cache. SPILL reserves a block that has a file instead of a page.
 * Prints a line per protocol and scenario: "<protocol> | <scenario>: <states> states, <fault or ok>".
 */
#include "explore.h"

enum { FREE, WRITING, FREEING };
enum op { END, RESERVE, FREE_IT, SWEEP, CLAIM, SPILL };
enum {
    PAGES = 2,
    BLOCKS = 2,
    ALL_PAGES = 3,
    NO_FILE = 99,
    A_FILE = 8,
    A_LINK = 9
}; /* A_LINK: the offset field links free descriptors */
#define NOBODY (-1)

/* Steps: of the lock, of what is done with it, and of letting it go. */
enum {
    START,
    LOCK,
    TAKE_OVER,
    REBUILD,
    BODY = 10,
    PEND = 20,
    HINT,
    DRAIN = 30,
    MAP,
    DROP,
    WORD,
    LINK,
    UNLOCK = 40,
    AGAIN,
    OVER,
    MAKE_FILE
};

static struct {
    bool
        freeing_first; /* FREEING is won outside the lock, FREE comes under it; else FREE at once, the page later */
    bool counts_seq;    /* the takeover CAS compares the lock's sequence number too */
    bool needs_death;   /* only a lock whose owner's byte is free is taken over */
    bool file_first;    /* a spilled block's file goes before the word says FREE */
    bool rebuild_drops; /* and when a rebuild says so */
    bool link_last;     /* the word says FREE before the offset becomes a link */
    bool looks_again;   /* after pending, and after letting go, the pending blocks are looked for once more */
    bool sweep_has_lock; /* a sweep takes over the lock of its dead process before the slot can be claimed */
} rule, rule_of_core = {true, true, true, true, true, true, true, true};

typedef struct {
    uint8_t op, slot;
} instruction;

typedef struct {
    uint8_t word, owner, offset, generation;
} block;

typedef struct {
    uint8_t slot, at, step, then,
        last;                          /* then: the step after the lock is had; last: the one after a drain */
    uint8_t has, mine, page;           /* the block it may free */
    uint8_t victim, seq, i, map, todo; /* of a takeover, a rebuild, a drain */
    bool inside, waits;                /* in the critical section; whether it may wait for the lock */
} process;

struct state {
    block b[BLOCKS];
    uint8_t map, pending, hint, seq;
    uint8_t file[BLOCKS]; /* generation + 1 of the block's file, 0 = none */
    int8_t owner, live[4], sweeping[4];
    uint8_t used[4], dead, kills;
    process p[4];
};

static instruction program[4][4];
static int kills_allowed;

static bool alive(const state *s, int p) {
    return !(s->dead >> p & 1);
}
static void next(process *p) {
    *p = (process){.slot = p->slot, .at = (uint8_t)(p->at + 1), .has = p->has, .mine = p->has ? p->mine : 0};
}

/* ------------------------------------------------------------------------------------------------------- the lock */

static void enter(state *s, process *p) {
    s->owner = (int8_t)p->slot, s->seq++, p->inside = true;
    int inside = 0;
    for (int i = 0; i < processes; i++)
        inside += alive(s, i) && s->p[i].inside;
    if (inside > 1)
        fault = "two owners of the lock";
}

static void want_lock(process *p, int then, bool waits) {
    p->step = LOCK, p->then = (uint8_t)then, p->last = UNLOCK, p->waits = waits;
}

/* False: a live process has it, and this one waits. */
static bool try_once(state *s, process *p) {
    if (s->owner == NOBODY) {
        enter(s, p), p->step = p->then;
        return true;
    }
    bool own = s->owner == p->slot, dead = s->live[s->owner] == NOBODY || !rule.needs_death;
    if (own || (p->waits && dead)) {
        p->victim = (uint8_t)s->owner, p->seq = s->seq, p->step = TAKE_OVER;
        return true;
    }
    if (p->waits)
        return false;
    p->step = p->then == BODY ? PEND : OVER; /* busy: leave it to the owner */
    return true;
}

static void take_over(state *s, process *p) {
    p->step = LOCK;
    if (s->owner != p->victim || (rule.counts_seq && s->seq != p->seq))
        return;
    enter(s, p), p->i = 0, p->map = ALL_PAGES, p->step = REBUILD;
}

/* By name, so of this generation alone; twice does no harm. */
static void drop_file(state *s, int i, uint8_t generation) {
    if (s->file[i] == generation + 1)
        s->file[i] = 0;
}

static void rebuild(state *s, process *p) {
    if (p->i == BLOCKS) {
        s->map = p->map, p->step = p->then;
        return;
    }
    block *b = s->b + p->i++;
    if (b->word != FREE && b->offset == A_LINK)
        fault = "the rebuild finds a block without a page";
    if (b->word == FREEING) {
        if (rule.rebuild_drops)
            drop_file(s, p->i - 1, b->generation);
        b->word = FREE, b->generation++;
    }
    if (b->word == FREE)
        b->offset = A_LINK;
    else if (b->offset != A_FILE)
        p->map &= (uint8_t)~(1 << b->offset);
}

static void unlock(state *s, process *p) {
    if (p->step == UNLOCK) {
        p->inside = false;
        if (s->owner == p->slot)
            s->owner = NOBODY;
        p->step = rule.looks_again ? AGAIN : OVER;
    } else if (s->hint) /* srl_drain_if_free */
        want_lock(p, DRAIN, false);
    else
        p->step = OVER;
}

/* srl_drain: the hint, the bits, then free_locked() of each block: file, map, word, link. */
static void drain(state *s, process *p) {
    block *b = s->b + p->i;
    switch (p->step) {
    case DRAIN:
        p->todo = s->hint ? s->pending : 0, s->hint = 0, s->pending &= (uint8_t)~p->todo, p->i = 0,
        p->step = MAP;
        break;
    case MAP:
        if (p->i == BLOCKS)
            p->step = p->last;
        else if (p->todo >> p->i & 1 && b->word == FREEING && b->offset == A_FILE)
            p->page = b->generation, p->step = rule.file_first ? DROP : WORD;
        else if (p->todo >> p->i & 1 && b->word == FREEING)
            s->map |= (uint8_t)(1 << b->offset), p->page = NO_FILE, p->step = WORD;
        else
            p->i++;
        break;
    case DROP:
        drop_file(s, p->i, p->page), p->step = rule.file_first ? WORD : MAP;
        p->i += !rule.file_first;
        break;
    case WORD:
        rule.link_last ? (void)(b->word = FREE, b->generation++) : (void)(b->offset = A_LINK);
        p->step = LINK;
        break;
    default:
        rule.link_last ? (void)(b->offset = A_LINK) : (void)(b->word = FREE, b->generation++);
        if (!rule.file_first && p->page != NO_FILE)
            p->step = DROP;
        else
            p->i++, p->step = MAP;
    }
}

static void pend(state *s, process *p) {
    if (p->step == PEND)
        s->pending |= (uint8_t)(1 << p->mine), p->step = HINT;
    else
        s->hint = 1, p->step = rule.looks_again ? AGAIN : OVER;
}

/* ----------------------------------------------------------------------------------------------------- operations */

static void reserve(state *s, process *p, bool spills) {
    switch (p->step) {
    case START:
        want_lock(p, DRAIN, true);
        p->last = BODY;
        break;
    case BODY: /* find_slot, srl_span_take */
        p->mine = s->b[0].word == FREE ? 0 : s->b[1].word == FREE ? 1 : BLOCKS;
        p->page = spills ? A_FILE : s->map & 1 ? 0 : s->map & 2 ? 1 : PAGES;
        p->step = p->mine == BLOCKS || p->page == PAGES ? UNLOCK : BODY + 1;
        if (p->step == BODY + 1 && !spills)
            s->map &= (uint8_t)~(1 << p->page);
        break;
    case BODY + 1: /* describe */
        s->b[p->mine].offset = p->page, p->step++;
        break;
    case BODY + 2:
        s->b[p->mine].word = WRITING, s->b[p->mine].owner = p->slot, p->has = 1, p->step = UNLOCK;
        break;
    case MAKE_FILE: /* after letting go of the lock */
        if (s->file[p->mine])
            fault = "a file of an earlier generation";
        s->file[p->mine] = s->b[p->mine].generation + 1, p->step = OVER;
        break;
    }
}

static void free_it(state *s, process *p) {
    block *b = s->b + p->mine;
    if (p->step == START && !p->has)
        next(p);
    else if (p->step == START) {
        p->has = 0, p->page = b->offset;
        b->word = rule.freeing_first ? FREEING : FREE;
        b->generation += !rule.freeing_first;
        want_lock(p, BODY, !rule.freeing_first);
    } else if (p->step == BODY && !rule.freeing_first)
        s->map |= (uint8_t)(1 << p->page), p->step = UNLOCK;
    else if (p->step == BODY) /* free_locked of this one */
        p->todo = (uint8_t)(1 << p->mine), p->i = 0, p->step = MAP;
}

/* srl_sweep of slot z, from step BODY + 2 on; ends at OVER. */
static void sweep_slot(state *s, process *p, int z) {
    if (p->step < BODY + 2 + BLOCKS) {
        block *b = s->b + (p->step - BODY - 2);
        if (b->word == WRITING && b->owner == z)
            b->word = FREEING;
        if (b->word == FREEING) /* its winner may have died before it could say so */
            s->pending |= (uint8_t)(1 << (p->step - BODY - 2)), s->hint = 1;
        p->step++;
    } else if (rule.sweep_has_lock && s->owner == z)
        want_lock(p, DRAIN, true);
    else
        p->step = AGAIN;
}

static bool sweep(state *s, process *p, int number, instruction i) {
    int z = i.slot;
    if (p->step == START) {
        bool wanted = s->live[z] == NOBODY && s->used[z] && s->sweeping[z] == NOBODY;
        if (!wanted && i.op == CLAIM)
            return false;
        if (!wanted) {
            next(p);
            return true;
        }
        s->sweeping[z] = (int8_t)number; /* and, with it held, byte z */
        if (i.op == CLAIM)
            s->live[z] = (int8_t)number, p->slot = (uint8_t)z;
        p->step = BODY + 2;
    } else
        sweep_slot(s, p, z);
    return true;
}

static void over(state *s, process *p, int number, instruction i) {
    if (i.op == SWEEP)
        s->used[i.slot] = 0;
    if ((i.op == SWEEP || i.op == CLAIM) && s->sweeping[i.slot] == number)
        s->sweeping[i.slot] = NOBODY;
    next(p);
}

static void check(const state *s) {
    const block *a = s->b, *b = s->b + 1;
    if (a->word != FREE && b->word != FREE && a->offset == b->offset && a->offset < PAGES)
        fault = "two blocks own one page";
    for (int i = 0; i < BLOCKS && s->owner == NOBODY; i++)
        if (s->b[i].word == WRITING && s->b[i].offset < PAGES && s->map >> s->b[i].offset & 1)
            fault = "the page of a block is in the map";
}

/* The sequence number matters only to who is about to take over: without one all numbers are the same state. */
static void forget_seq(state *s) {
    for (int i = 0; i < processes; i++)
        if (alive(s, i) && s->p[i].step == TAKE_OVER)
            return;
    s->seq = 0;
    for (int i = 0; i < processes; i++)
        s->p[i].seq = s->p[i].victim = 0;
}

static bool move(state *s, int number) {
    process *p = s->p + number;
    instruction i = program[number][p->at];
    bool moved = true;
    if (!alive(s, number) || i.op == END)
        return false;
    if (p->step == LOCK)
        moved = try_once(s, p);
    else if (p->step == TAKE_OVER)
        take_over(s, p);
    else if (p->step == REBUILD)
        rebuild(s, p);
    else if (p->step == PEND || p->step == HINT)
        pend(s, p);
    else if (p->step >= DRAIN && p->step <= LINK)
        drain(s, p);
    else if (p->step == UNLOCK || p->step == AGAIN)
        unlock(s, p);
    else if (p->step == OVER && i.op == SPILL && p->has && !s->file[p->mine])
        p->step = MAKE_FILE;
    else if (p->step == OVER)
        over(s, p, number, i);
    else if (i.op == RESERVE || i.op == SPILL)
        reserve(s, p, i.op == SPILL);
    else if (i.op == FREE_IT)
        free_it(s, p);
    else
        moved = sweep(s, p, number, i);
    check(s);
    forget_seq(s);
    return moved;
}

static bool can_be_killed(const state *s, int p) {
    return alive(s, p) && s->kills < kills_allowed && program[p][s->p[p].at].op != END;
}

static void kill_process(state *s, int p) {
    s->dead |= (uint8_t)(1 << p), s->kills++;
    for (int z = 0; z < 4; z++) {
        s->live[z] = s->live[z] == p ? NOBODY : s->live[z];
        s->sweeping[z] = s->sweeping[z] == p ? NOBODY : s->sweeping[z];
    }
    memset(s->p + p, 0, sizeof s->p[p]);
    s->p[p].at = 3;
}

/* A fresh process sweeps the dead, takes their lock over and drains. */
static void recover(state *s) {
    bool dead_lock = s->owner != NOBODY && s->live[s->owner] == NOBODY;
    for (int i = 0; i < BLOCKS; i++) {
        block *b = s->b + i;
        bool orphaned = b->word == WRITING && s->live[b->owner] == NOBODY;
        if (!orphaned && b->word != FREEING)
            continue;
        if (!dead_lock && b->offset < PAGES)
            s->map |= (uint8_t)(1 << b->offset);
        drop_file(s, i, b->generation);
        b->word = FREE;
    }
    if (!dead_lock)
        return;
    s->map = ALL_PAGES;
    for (int i = 0; i < BLOCKS; i++)
        if (s->b[i].word != FREE && s->b[i].offset < PAGES)
            s->map &= (uint8_t)~(1 << s->b[i].offset);
}

static void at_rest(state *s) {
    for (int p = 0; p < processes; p++)
        if (alive(s, p) && s->p[p].step == LOCK)
            fault = "a live process waits for the lock for ever";
    for (int i = 0; i < BLOCKS && !s->kills; i++)
        if (s->b[i].word == FREEING)
            fault = "leak: a freed block that nobody returns";
    if (s->owner != NOBODY && s->live[s->owner] != NOBODY)
        return; /* its next tenant will find it */
    recover(s);
    int used = 0;
    for (int i = 0; i < BLOCKS; i++)
        used |= s->b[i].word != FREE && s->b[i].offset < PAGES ? 1 << s->b[i].offset : 0;
    for (int i = 0; i < BLOCKS; i++)
        if (s->file[i] && (s->b[i].word == FREE || s->file[i] != s->b[i].generation + 1))
            fault = "leak: a file without its block";
    if ((s->map | used) != ALL_PAGES)
        fault = "leak: a page neither free nor a block's";
    if (s->map & used)
        fault = "a page both free and a block's";
}

/* ----------------------------------------------------------------------------------------------------- scenarios */

#define RES    {RESERVE, 0}
#define SPI    {SPILL, 0}
#define FRE    {FREE_IT, 0}
#define SWE(z) {SWEEP, z}
#define CLA(z) {CLAIM, z}

typedef struct {
    const char *name;
    int kills, processes, blocks; /* blocks: that many processes begin with one */
    instruction program[4][4];
} scenario;

static const scenario scenarios[] = {
    {"free, two that reserve and free, 1 kill", 1, 3, 1, {{FRE}, {RES, FRE}, {RES, FRE}}},
    {"free, reserve, sweeps, 1 kill", 1, 3, 1, {{FRE}, {RES}, {SWE(0), SWE(1), RES}}},
    {"two that reserve, one claims a dead slot, 1 kill",
     1,
     3,
     0,
     {{RES, FRE}, {RES, FRE}, {CLA(0), RES, FRE}}},
    {"two takers, who claims the slot takes nothing, 1 kill", 1, 4, 0, {{RES}, {RES}, {RES}, {CLA(0)}}},
    {"two that reserve and free, sweeps, 2 kills", 2, 3, 0, {{RES, FRE}, {RES, FRE}, {SWE(0), RES, SWE(1)}}},
    {"two that free at once, no kill", 0, 3, 2, {{FRE}, {FRE}, {RES, FRE}}},
    {"two that spill and free, sweeps, 2 kills", 2, 3, 0, {{SPI, FRE}, {SPI, FRE}, {SWE(0), RES, SWE(1)}}},
};
#define SCENARIOS (int)(sizeof scenarios / sizeof *scenarios)

static void run(const char *protocol, int number, bool killing) {
    const scenario *c = scenarios + number;
    state s;
    memset(&s, 0, sizeof s);
    memcpy(program, c->program, sizeof program);
    threads = processes = c->processes, kills_allowed = killing ? c->kills : 0;
    memset(s.live, NOBODY, sizeof s.live);
    memset(s.sweeping, NOBODY, sizeof s.sweeping);
    s.owner = NOBODY, s.map = ALL_PAGES;
    s.b[0].offset = s.b[1].offset = A_LINK;
    for (int i = 0; i < processes; i++) {
        bool claims = program[i][0].op == CLAIM;
        s.p[i].slot = (uint8_t)(claims ? 9 : i);
        if (!claims)
            s.live[i] = (int8_t)i, s.used[i] = 1;
        if (i < c->blocks) {
            s.b[i] = (block){WRITING, (uint8_t)i, (uint8_t)i, 0};
            s.map &= (uint8_t)~(1 << i), s.p[i].has = 1, s.p[i].mine = (uint8_t)i;
        }
    }
    size_t states = explore(&s, sizeof s);
    printf("%s | %s: %zu states, %s\n", protocol, c->name, states, fault ? fault : "ok");
}

int main(void) {
    rule = rule_of_core;
    for (int i = 0; i < SCENARIOS; i++)
        run("as built", i, true);
#define BROKEN(what, protocol, number, killing)                                                              \
    rule = rule_of_core;                                                                                     \
    rule.what = false;                                                                                       \
    run(protocol, number, killing)
    BROKEN(freeing_first, "free at once, the page later", 0, true);
    BROKEN(counts_seq, "takeover without a sequence", 2, true);
    BROKEN(needs_death, "takeover by timeout", 4, false);
    BROKEN(file_first, "the word before the file", 6, true);
    BROKEN(rebuild_drops, "a rebuild leaves the file", 6, true);
    BROKEN(link_last, "the link before the word", 0, true);
    BROKEN(looks_again, "pending without a second look", 5, true);
    BROKEN(sweep_has_lock, "sweep leaves the lock", 3, true);
    return 0;
}
