/* OFD byte locks, what a fork does to them, and the slots of processes: claimed and swept under them. */
#include "arena_live.h"
#include "arena_atomics.h"
#include <errno.h>
#include <fcntl.h>
#include <time.h>
#include <unistd.h>

static struct flock lock_of(short type, unsigned byte, unsigned nbytes) {
    return (struct flock){.l_type = type, .l_whence = SEEK_SET, .l_start = byte, .l_len = nbytes};
}

int srl_live_try(int fd, unsigned byte, unsigned nbytes) {
    struct flock l = lock_of(F_WRLCK, byte, nbytes);
    if (fcntl(fd, F_OFD_SETLK, &l) == 0)
        return 1;
    return errno == EAGAIN || errno == EACCES ? 0 : -errno;
}

void srl_live_let_go(int fd, unsigned byte) {
    struct flock l = lock_of(F_UNLCK, byte, 1);
    fcntl(fd, F_OFD_SETLK, &l);
}

int srl_live_taken(int fd, unsigned byte, unsigned nbytes) {
    struct flock l = lock_of(F_WRLCK, byte, nbytes);
    if (fcntl(fd, F_OFD_GETLK, &l))
        return -errno;
    return l.l_type != F_UNLCK;
}

int srl_live_is_dead(void *live, unsigned process) {
    return srl_live_taken(((srl_live *)live)->fd, process, 1) == 0;
}

/* --------------------------------------------------------------------------------------------------- fork */

static srl_live *watched; /* changed under the interpreter's lock */

/* A child that kept the description would keep a dead parent alive. */
static void in_child(void) {
    for (srl_live *live = watched; live; live = live->next) {
        close(live->fd);
        if (live->spill >= 0)
            close(live->spill);
        live->fd = live->spill = -1;
        live->detached = 1;
    }
    watched = NULL;
}

void srl_live_init(srl_live *live, int fd, int spill) {
    live->fd = fd;
    live->spill = spill;
    pthread_mutex_init(&live->sweeping, NULL);
}

void srl_live_watch_forks(srl_live *live) {
    static int registered;
    if (!registered)
        registered = pthread_atfork(NULL, NULL, in_child) == 0;
    live->next = watched;
    watched = live;
}

void srl_live_unwatch(srl_live *live) {
    srl_live **at = &watched;
    while (*at && *at != live)
        at = &(*at)->next;
    if (*at)
        *at = live->next;
}

/* ------------------------------------------------------------------------------------- slots of processes */

static int claim_one(srl_arena *a, srl_live *live, unsigned p) {
    if (srl_live_try(live->fd, 256 + p, 1) != 1)
        return 0;
    int mine = srl_live_try(live->fd, p, 1) == 1;
    if (mine) {
        a->self = p;
        if (srl_load_sc(&a->processes[p].used)) /* dirty: else its new tenant inherits dead bits */
            srl_sweep(a, p);
        srl_store_sc(&a->processes[p].used, 1);
    }
    srl_live_let_go(live->fd, 256 + p);
    return mine;
}

int srl_claim(srl_arena *a, srl_live *live) {
    a->is_dead = srl_live_is_dead;
    a->drop_file = live->spill < 0 ? NULL : srl_spill_drop;
    a->ctx = live;
    for (unsigned p = 0; p < a->max_processes; p++)
        if (claim_one(a, live, p))
            return (int)p;
    return -EUSERS;
}

static int sweep_if_dead(srl_arena *a, srl_live *live, unsigned p) {
    if (srl_live_taken(live->fd, p, 1) != 0 || srl_live_try(live->fd, 256 + p, 1) != 1)
        return 0;
    int dead = srl_live_taken(live->fd, p, 1) == 0 && srl_load_sc(&a->processes[p].used);
    if (dead)
        srl_sweep(a, p);
    srl_live_let_go(live->fd, 256 + p);
    return dead;
}

int srl_sweep_dead(srl_arena *a, srl_live *live) {
    int n = 0;
    pthread_mutex_lock(&live->sweeping);
    for (unsigned p = 0; p < a->max_processes; p++)
        if (p != a->self && srl_load_sc(&a->processes[p].used))
            n += sweep_if_dead(a, live, p);
    srl_expire_orphans(a);
    pthread_mutex_unlock(&live->sweeping);
    return n;
}

int srl_others_alive(const srl_arena *a, srl_live *live) {
    for (unsigned p = 0; p < a->max_processes; p++)
        if (p != a->self && srl_live_taken(live->fd, p, 1) != 0)
            return 1;
    return 0;
}
