/* Kills a process at every numbered crash point of every operation, in four roles, and looks at what is left.
 *
 * Built with -DSRL_CRASH_POINTS and run by test_crashes.py. One trial: the arena is put back to its first state,
 * children claim slots of their own over real byte locks, one of them is killed by SIGKILL at a point, the
 * survivor (this process) recovers, runs fsck, compares every payload byte, looks for files without a block, and takes
 * the whole arena in one piece.
 *
 *   owner    dies inside its operation          waiter   dies while it takes over a dead process's lock
 *   sweeper  dies while it recovers a dead one  claimer  dies while it claims the slot of a dead one
 *
 *   crash_driver kill SEED COUNT   kills; the owner's points all, the rest drawn until COUNT; prints a summary
 *   crash_driver one OPERATION     the owner's points of one
 *   crash_driver recover           the points of a takeover, a sweep and a claim alone
 *   crash_driver points            every point: number file:line function side
 *   crash_driver fork              a grandchild must not keep a dead process alive
 *   crash_driver undo              an acquire that comes too late must finish what its bit held up
 */
#include "crash_scene.h"

/* --------------------------------------------------------------------------------------------------- children */

static void arm(uint64_t at) {
    board->hits = 0;
    kill_at = at;
    armed = true;
}

/* Whether a process that has just claimed its slot already holds or owns something. */
static bool inherits(const srl_arena *a) {
    for (uint64_t i = 0; i < a->h->table_used; i++) {
        uint64_t w = srl_load_sc(&a->blocks[i].word);
        bool owns = SRL_STATE(w) != SRL_FREE && SRL_OWNER(w) == a->self && !(SRL_FLAGS(w) & SRL_ORPHAN);
        if (owns || srl_load_sc(&a->blocks[i].holders[a->self / 64]) >> a->self % 64 & 1)
            return true;
    }
    return false;
}

/* A child that does the operation, or, after `go`, what its role does instead. -> pid */
static pid_t start(const operation *o, enum role role, uint64_t at, bool wait) {
    pid_t pid = fork();
    if (pid)
        return pid;
    srl_arena a;
    srl_live live;
    if (role == CLAIMER)
        arm(at);
    claim(&a, &live);
    if (role == CLAIMER)
        _exit(inherits(&a));
    if (role == OWNER || role == WAITER)
        o->before(&a);
    if (wait) {
        sem_post(&board->ready);
        sem_wait(&board->go);
    }
    arm(at);
    if (role == OWNER || role == WAITER)
        o->run(&a);
    if (role == SWEEPER)
        srl_sweep_dead(&a, &live);
    _exit(0);
}

/* Waits for a child -> whether it was killed at its point (else it had come to the end). */
static bool gone(pid_t pid) {
    int status;
    waitpid(pid, &status, 0);
    if (WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL)
        return kills++, true;
    if (status)
        wrong("a child failed on its own");
    return false;
}

/* -------------------------------------------------------------------------------------------------- the checks */

static void check_free_list(void) {
    uint64_t listed = 0, free_slots = 0;
    for (uint64_t i = 0; i < me.h->table_used; i++) {
        uint64_t w = srl_load_sc(&me.blocks[i].word);
        free_slots += SRL_STATE(w) == SRL_FREE && SRL_GEN(w) != UINT32_MAX;
    }
    for (uint64_t at = me.h->free_slot; at && listed <= free_slots; at = me.blocks[at - 1].offset)
        listed++;
    if (listed != free_slots)
        wrong("the list of free descriptors is not the set of free descriptors");
}

static void check_fsck(void) {
    static char text[4096];
    if (srl_lock(&me, soon())) {
        wrong("the lock of a dead process was never taken over");
        return;
    }
    if (srl_fsck(&me, text, sizeof text))
        wrong(text);
    check_free_list();
    srl_unlock(&me);
}

static void check_block(uint32_t i) {
    const srl_block *b = srl_at(&me, i);
    uint64_t w = srl_load_sc(&b->word), held = 0;
    for (int k = 0; k < 4; k++)
        held |= srl_load_sc(b->holders + k);
    if (held)
        wrong("a holder's bit is left");
    if (SRL_STATE(w) != SRL_FREE && SRL_STATE(w) != SRL_READY)
        wrong("a block is neither free nor ready");
    if (SRL_STATE(w) == SRL_READY && !intact(b))
        wrong("wrong payload bytes");
    if (SRL_STATE(w) == SRL_READY && SRL_OWNER(w) != me.self && !(SRL_FLAGS(w) & SRL_ORPHAN))
        wrong("a dead process owns a block");
    if (SRL_STATE(w) == SRL_READY && SRL_FLAGS(w) & SRL_SHIPPED && srl_done_complete(b))
        wrong("every reader is done, and the block is still ready");
    if (i < SCENE && SRL_STATE(w) == SRL_FREE && SRL_GEN(w) == scene[i].gen)
        wrong("a block is free in the generation it was used in");
}

/* Nobody but a discard may have touched these. */
static void check_bystanders(const operation *o) {
    static const int bystanders[] = {0, 1, SPILLED};
    if (o->run == do_discard || o->before == discarded || o->before == discarded_file)
        return;
    for (int i = 0; i < 3; i++) {
        const block *b = scene + bystanders[i];
        unsigned flags = bystanders[i] == SPILLED ? SRL_SPILLED : 0;
        if (srl_load_sc(&srl_at(&me, b->slot)->word) != SRL_WORD(b->gen, SRL_READY, flags, me.self))
            wrong("somebody else's block was changed");
    }
}

static void check_empty(void) {
    srl_stats s;
    srl_discard(&me, "run", 3);
    srl_count(&me, &s, &(srl_walk){0});
    if (s.blocks || s.used_bytes || me.h->used_bytes || s.created != s.freed)
        wrong("bytes leaked");
    srl_request all = {.nbytes = me.h->committed_pages * SRL_PAGE, .tag = "run/x", .tag_len = 5};
    if (srl_reserve(&me, &all, soon()))
        wrong("the arena is no longer one piece");
    else
        memset(data, 0xee, all.nbytes), srl_abort(&me, all.slot, all.generation);
}

static void recover_and_check(const operation *o) {
    srl_sweep_dead(&me, &my_live);
    for (unsigned p = 1; p < me.h->max_processes; p++)
        if (srl_load_sc(&me.processes[p].used) || srl_load_sc(&me.processes[p].ticket))
            wrong("a dead process was not swept");
    check_fsck();
    if (faults)
        return;
    for (uint32_t i = 0; i < me.h->table_used; i++)
        check_block(i);
    check_bystanders(o);
    check_files(false);
    check_empty();
    check_files(true);
    check_fsck();
}

/* ---------------------------------------------------------------------------------------------------- a trial */

static const operation holder = {"holder", nothing, do_cycle, false};

/* The victim that comes first in the roles that recover it: killed at hit `first` of `o`. -> whether it was. */
static bool victim(const operation *o, uint64_t first) {
    pid_t pid = start(o, OWNER, first, false);
    return gone(pid);
}

/* Kills at hit `at`; before that, in the other roles, a victim at hit `first`. -> whether the kill happened. */
static bool try_one(const operation *o, enum role role, uint64_t first, uint64_t at) {
    static char name[128];
    snprintf(name, sizeof name, "%s %s victim=%lu hit=%lu", role_names[role], o->name, first, at);
    trial = name;
    reset();
    rounds++;
    pid_t pid = 0;
    bool waits = role == WAITER || role == SWEEPER, locked = o->busy && role == OWNER;
    if (waits || role == OWNER)
        pid = start(o, role, at, true), sem_wait(&board->ready);
    if (role != OWNER)
        victim(role == WAITER ? &holder : o, first);
    lock_was_dead = srl_lock_owner(&me) != SRL_NONE;
    if (locked && srl_lock(&me, soon()))
        wrong("no lock");
    if (pid)
        sem_post(&board->go);
    else
        pid = start(o, role, at, false);
    bool killed = gone(pid);
    if (locked)
        srl_unlock(&me);
    recover_and_check(o);
    return killed;
}

/* Hits until the end of a trial's armed part, in this role behind this victim. */
static uint64_t count_hits(const operation *o, enum role role, uint64_t first) {
    try_one(o, role, first, 0);
    return board->hits;
}

static uint64_t rnd(uint64_t *state) {
    return *state = *state * 6364136223846793005u + 1442695040888963407u, *state >> 33;
}

static void kill_at_every_hit(const operation *o, enum role role, uint64_t first) {
    for (uint64_t at = 1; try_one(o, role, first, at) && !faults; at++)
        ;
}

static const operation *named(const char *name) {
    const operation *o = operations;
    while (strcmp(o->name, name))
        o++;
    return o;
}

/* A takeover and its rebuild at every hit, with blocks in every state; a recovery and a claim likewise. */
static void kill_recovery(uint64_t *seed) {
    const operation *takes = named("put-free-adopted"), *left = named("close");
    uint64_t hits = count_hits(&holder, OWNER, 0);
    uint64_t first;
    do {
        first = 1 + rnd(seed) % hits;
        count_hits(takes, WAITER, first);
    } while (!lock_was_dead && !faults);
    kill_at_every_hit(takes, WAITER, first);
    kill_at_every_hit(left, SWEEPER, 1);
    kill_at_every_hit(left, CLAIMER, 1);
}

static void kill_everywhere(uint64_t seed, uint64_t count) {
    for (size_t i = 0; i < OPERATIONS && !faults; i++)
        kill_at_every_hit(operations + i, OWNER, 0);
    if (!faults)
        kill_recovery(&seed);
    while (kills < count && !faults)
        for (size_t i = 0; i < OPERATIONS && !faults; i++) {
            enum role role = WAITER + rnd(&seed) % 3;
            const operation *o = operations + i, *dies = role == WAITER ? &holder : o;
            if (o->busy)
                continue;
            uint64_t first = 1 + rnd(&seed) % count_hits(dies, OWNER, 0);
            uint64_t hits = count_hits(o, role, first);
            for (int k = 0; k < 12 && hits && !faults; k++)
                try_one(o, role, first, 1 + rnd(&seed) % hits);
        }
}

static void summary(void) {
    printf("kills=%lu rounds=%lu faults=%d\n", kills, rounds, faults);
    for (const srl_point *p = __start_srl_points; p < __stop_srl_points; p++)
        if (!board->killed[p - __start_srl_points])
            printf("never %s %s %s:%ld\n", p->function, p->after ? "after" : "before", p->file, p->line);
}

static void list_points(void) {
    for (const srl_point *p = __start_srl_points; p < __stop_srl_points; p++)
        printf("%ld %s:%ld %s %s\n", (long)(p - __start_srl_points), p->file, p->line, p->function,
               p->after ? "after" : "before");
}

/* ------------------------------------------------------------------------------------------------------- fork */

static void fork_detaches(void) {
    int pipes[2];
    if (pipe(pipes))
        abort();
    pid_t pid = fork(), grandchild = 0;
    if (!pid) {
        srl_arena a;
        srl_live live;
        claim(&a, &live);
        srl_live_watch_forks(&live);
        if (fork())
            pause();
        grandchild = getpid(); /* says so itself: it has detached when fork() returns in it */
        if (write(pipes[1], &grandchild, sizeof grandchild) < 0)
            abort();
        pause();
    }
    if (read(pipes[0], &grandchild, sizeof grandchild) < 0)
        abort();
    kill(pid, SIGKILL);
    waitpid(pid, NULL, 0);
    if (srl_sweep_dead(&me, &my_live) != 1)
        printf("FAULT a grandchild keeps a dead process alive\n"), faults++;
    kill(grandchild, SIGKILL);
}

/* -------------------------------------------------------------------------------------------------- interleaved */

static void free_scene_2(void) {
    srl_free(&me, ON(scene[2]));
}

/* The owner frees between a reader's bit and its second look at the word: it saw the bit and left the block to the
 * reader, who has to free it with the bit. One thread is both, so every run is this interleaving. */
static void undo_finishes(void) {
    srl_arena reader;
    srl_live live;
    claim(&reader, &live);
    between = free_scene_2;
    int rc = srl_acquire(&reader, ON(scene[2]));
    uint64_t w = srl_load_sc(&srl_at(&me, scene[2].slot)->word);
    if (between || rc != -ESTALE)
        printf("FAULT the acquire of a block freed meanwhile says %d\n", rc), faults++;
    if (SRL_STATE(w) != SRL_FREE || SRL_GEN(w) != scene[2].gen + 1)
        printf("FAULT an acquire that came too late left the block in state %u\n", (unsigned)SRL_STATE(w)), faults++;
}

int main(int argc, char **argv) {
    if (argc > 1 && !strcmp(argv[1], "points"))
        return list_points(), 0;
    make();
    copy_state(first_state, ctl);
    if (argc == 4 && !strcmp(argv[1], "kill"))
        kill_everywhere(strtoull(argv[2], NULL, 10), strtoull(argv[3], NULL, 10)), summary();
    else if (argc == 3 && !strcmp(argv[1], "one"))
        kill_at_every_hit(named(argv[2]), OWNER, 0), summary();
    else if (argc == 2 && !strcmp(argv[1], "recover"))
        kill_recovery(&(uint64_t){1}), summary();
    else if (argc == 2 && !strcmp(argv[1], "fork"))
        fork_detaches();
    else if (argc == 2 && !strcmp(argv[1], "undo"))
        undo_finishes();
    remove_files();
    rmdir(spill_path);
    return faults != 0;
}
