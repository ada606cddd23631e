/* Who is alive: OFD byte locks on the arena's `live` file. The operating system's side of the arena, not part
 * of the core.
 *
 * Byte p is locked by process p while it lives, byte 256 + p by whoever sweeps or claims slot p. The kernel
 * drops a lock once the address space of its holder is gone; SIGSTOP keeps it, pid reuse and pid namespaces
 * do not matter.
 */
#ifndef SRL_ARENA_LIVE_H
#define SRL_ARENA_LIVE_H

#include "arena_core.h"

/* One per attached arena; a forked child finds its descriptor closed and `detached` set. */
typedef struct srl_live {
    int fd;
    int detached;
    pthread_mutex_t sweeping; /* threads share the description, so byte 256 + p does not keep them apart */
    struct srl_live *next;
} srl_live;

int srl_live_try(int fd, unsigned byte, unsigned nbytes); /* 1 locked, 0 somebody else has it, -errno */
void srl_live_let_go(int fd, unsigned byte);
int srl_live_taken(int fd, unsigned byte,
                   unsigned nbytes); /* 1 another description locks one of them, 0 none, -errno */
int srl_live_is_dead(void *live, unsigned process);
void srl_live_init(srl_live *live, int fd);
void srl_live_watch_forks(srl_live *live);
void srl_live_unwatch(srl_live *live);
int srl_claim(srl_arena *a, srl_live *live);      /* -> process index, or -EUSERS */
int srl_sweep_dead(srl_arena *a, srl_live *live); /* -> how many dead processes were swept */
int srl_others_alive(const srl_arena *a, srl_live *live);

#endif
