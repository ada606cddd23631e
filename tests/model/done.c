/* Who may say done(): every order of reads and dones of two ranks, and of their next life after a restart.
 *
 * A bit of the done set needs a name: the process slot changes with a restart, or is inherited by somebody else; the
 * reader index does not. Prints "<rule>: <orders> orders, <n> freed before a rank had read, <n> never freed".
 */
#include <stdbool.h>
#include <stdio.h>

enum { READ, DONE, COMMIT };
enum name { FRESH_SLOT, REUSED_SLOT, INDEX };
enum { LEDGER = 2 };

/* What csrc/ and the ledger do, or leave away: the shipper counts itself, and ships again after a restart. */
static enum name name;
static bool ledger_counts;
static long orders, early, leaks;

typedef struct {
    unsigned done; /* the bits */
    bool freed, lost;
    int at[2][2]; /* steps of each rank in each life: 0 nothing, 1 has read, 2 has said done */
    bool committed;
} world;

static int bit(int rank, int life) {
    if (name == INDEX)
        return rank;
    return name == FRESH_SLOT ? 3 + 2 * life + rank : 5 + (rank ^ life); /* REUSED: crosswise */
}

static void say_done(world *w, int which) {
    w->done |= w->freed ? 0 : 1u << which;
    w->freed |= __builtin_popcount(w->done) >= 2 + ledger_counts;
}

static void rank_steps(world *w, int rank, int life) {
    if (w->at[rank][life]++ == 0)
        w->lost |= w->freed;
    else
        say_done(w, bit(rank, life));
}

/* The second life: everybody reads and says done; the ledger when both have reported the step. */
static void second_life(world w) {
    bool moved = false;
    for (int rank = 0; rank < 2; rank++)
        if (w.at[rank][1] < 2) {
            world next = w;
            rank_steps(&next, rank, 1);
            second_life(next);
            moved = true;
        }
    if (ledger_counts && !w.committed && w.at[0][1] == 2 && w.at[1][1] == 2) {
        world next = w;
        next.committed = true;
        say_done(&next, LEDGER);
        second_life(next);
        moved = true;
    }
    if (!moved)
        orders++, early += w.lost, leaks += !w.freed;
}

/* The first life, ended by a kill anywhere before the step was durable. */
static void first_life(world w) {
    if (ledger_counts || w.at[0][0] < 2 || w.at[1][0] < 2) {
        world next = w;
        next.lost |= w.freed;
        if (ledger_counts)
            next.done = 0; /* srl_ship again, as the old readers' bytes are free */
        second_life(next);
    }
    for (int rank = 0; rank < 2; rank++)
        if (w.at[rank][0] < 2) {
            world next = w;
            rank_steps(&next, rank, 0);
            first_life(next);
        }
}

static void run(const char *what, enum name which, bool counts) {
    name = which, ledger_counts = counts, orders = early = leaks = 0;
    first_life((world){0});
    printf("%s: %ld orders, %ld freed before a rank had read, %ld never freed\n", what, orders, early, leaks);
}

/* Without any restart: rank 0 is done and detaches, a late rank 1 gets its slot. */
static void late_rank(void) {
    world w = {0};
    ledger_counts = false;
    say_done(&w, 5);
    say_done(&w, 5);
    printf("process slot, a late rank in the one another left: %s\n", w.freed ? "freed" : "never freed");
}

int main(void) {
    run("as built: index, ledger counts, ships again", INDEX, true);
    run("process slot, a fresh one after the restart", FRESH_SLOT, false);
    run("process slot, reused crosswise", REUSED_SLOT, false);
    run("reader index alone", INDEX, false);
    late_rank();
    return 0;
}
