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

/* One per attached arena; a forked child finds its descriptors closed and `detached` set. */
typedef struct srl_live {
    int fd;
    int spill; /* directory of spilled blocks, -1 = none; its flock says that somebody needs it */
    int detached;
    pthread_mutex_t sweeping; /* threads share the description, so byte 256 + p does not keep them apart */
    struct srl_live *next;
} srl_live;

int srl_live_try(int fd, unsigned byte, unsigned nbytes); /* 1 locked, 0 somebody else has it, -errno */
void srl_live_let_go(int fd, unsigned byte);
/* 1 another description locks one of them, 0 none, -errno */
int srl_live_taken(int fd, unsigned byte, unsigned nbytes);
int srl_live_is_dead(void *live, unsigned process);
void srl_live_init(srl_live *live, int fd, int spill);
void srl_live_watch_forks(srl_live *live);
void srl_live_unwatch(srl_live *live);
int srl_claim(srl_arena *a, srl_live *live);      /* -> process index, or -EUSERS */
int srl_sweep_dead(srl_arena *a, srl_live *live); /* -> how many dead processes were swept */
int srl_others_alive(const srl_arena *a, srl_live *live);

/* files of spilled blocks, arena_spill.c */
int srl_spill_make(int dir, uint32_t slot, uint32_t gen, uint64_t nbytes, uint8_t **at);
int srl_spill_map(int dir, uint32_t slot, uint32_t gen, uint64_t nbytes, const uint8_t **at);
void srl_spill_drop(void *live, uint32_t slot, uint32_t gen);

#endif
