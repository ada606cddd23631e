/* Where an extension built with SHMRL_CRASH_POINTS=1 dies: at the n-th crash point that this process comes to after
 * srl_die_at(n). Linked into that build alone; tests/arena/crashes.py arms it through ctypes. 0 counts and never dies.
 */
#include "arena_atomics.h"
#include <signal.h>
#include <unistd.h>

static uint64_t die_at, hits;
static bool armed;

void srl_die_at(uint64_t n) {
    hits = 0;
    die_at = n;
    armed = true;
}

void srl_at_point(const srl_point *here) {
    if (!armed || ++hits != die_at)
        return;
    kill(getpid(), SIGKILL);
    pause();
}
