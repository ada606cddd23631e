/* Large pieces of work in parts, on several cores at once: copies, and ids that are decoded and checked. One core has
 * a third to a tenth of a host's memory bandwidth.
 *
 * Threads live for one call: none is left for a fork to lose or an exit to wait for. They take no signals but those of
 * their own faults. Where one cannot be had (a limit of threads), the caller does its part.
 */
#include "arena_core.h"
#include <pthread.h>
#include <sched.h>
#include <signal.h>

#ifndef SRL_PART
#define SRL_PART                                                                                             \
    (2u << 20) /* bytes of a part, at least: starting a thread takes as long as copying 0.5 MiB */
#endif

static size_t cores(void) {
#ifdef SRL_CORES /* of a test, whatever machine it runs on */
    return SRL_CORES;
#else
    cpu_set_t ours;
    return sched_getaffinity(0, sizeof ours, &ours) ? 1 : (size_t)CPU_COUNT(&ours);
#endif
}

size_t srl_parts(uint64_t nbytes) {
    if (nbytes < 2 * SRL_PART)
        return 1;
    size_t n = nbytes / SRL_PART < SRL_PARTS ? nbytes / SRL_PART : SRL_PARTS, most = cores();
    return n < most ? n : most;
}

void srl_each(void *(*work)(void *), void *parts, size_t nbytes, size_t count) {
    pthread_t threads[SRL_PARTS];
    bool started[SRL_PARTS] = {false};
    char *at = parts;
    if (count > 1) {
        static const int faults[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP, SIGSYS};
        sigset_t others, before;
        sigfillset(&others);
        for (size_t i = 0; i < sizeof faults / sizeof *faults; i++)
            sigdelset(&others, faults[i]);
        pthread_sigmask(SIG_SETMASK, &others, &before);
        for (size_t i = 1; i < count; i++)
            started[i] = pthread_create(threads + i, NULL, work, at + i * nbytes) == 0;
        pthread_sigmask(SIG_SETMASK, &before, NULL);
    }
    for (size_t i = 0; i < count; i++)
        if (!started[i])
            work(at + i * nbytes);
    for (size_t i = 1; i < count; i++)
        if (started[i])
            pthread_join(threads[i], NULL);
}
