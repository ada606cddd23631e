/* Large pieces of work in parts, on several idle cores at once: copies, and ids that are decoded and checked. One core
 * has a third to a tenth of a host's memory bandwidth.
 *
 * Threads live for one call: none is left for a fork to lose or an exit to wait for. They take no signals but those of
 * their own faults. Where one cannot be had (a limit of threads), the caller does its part.
 */
#include "arena_core.h"
#include <fcntl.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <unistd.h>

#ifndef SRL_PART
#define SRL_PART                                                                                             \
    (2u << 20) /* bytes of a part, at least: starting a thread takes as long as copying 0.5 MiB */
#endif

#ifdef SRL_CORES /* of a test, whatever machine it runs on */
static size_t cores(void) {
    return SRL_CORES;
}
#else
/* Of the machine: a thread that waits for its turn behind others would hold up the whole. 2 us. */
static size_t idle_cores(void) {
    char text[64]; /* "0.52 0.58 0.59 3/602 12345": three are running, we among them */
    int fd = open("/proc/loadavg", O_RDONLY | O_CLOEXEC);
    ssize_t n = fd < 0 ? 0 : read(fd, text, sizeof text - 1);
    if (fd >= 0)
        close(fd);
    text[n < 0 ? 0 : n] = 0;
    long running, all = sysconf(_SC_NPROCESSORS_ONLN);
    return sscanf(text, "%*s %*s %*s %ld/", &running) == 1 && running < all ? (size_t)(all - running) : 0;
}

/* That we may use, and nobody else does: this one and idle ones. */
static size_t cores(void) {
    cpu_set_t ours;
    size_t most = sched_getaffinity(0, sizeof ours, &ours) ? 1 : (size_t)CPU_COUNT(&ours);
    size_t idle = most > 1 ? idle_cores() : 0;
    return idle + 1 < most ? idle + 1 : most;
}
#endif

size_t srl_parts(uint64_t nbytes) {
    if (nbytes < 2 * SRL_PART)
        return 1;
    size_t n = nbytes / SRL_PART < SRL_MOST_PARTS ? nbytes / SRL_PART : SRL_MOST_PARTS, most = cores();
    return n < most ? n : most;
}

void srl_each(void *(*work)(void *), void *parts, size_t nbytes, size_t count) {
    pthread_t threads[SRL_MOST_PARTS];
    bool started[SRL_MOST_PARTS] = {false};
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
