/* Of three threads the first is had and the others are not, as under a limit of threads; some must be asked for. */
#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>

static int asked;

static void none(void) {
    if (asked < 3) {
        printf("only %d threads were asked for\n", asked);
        _Exit(1);
    }
}

__attribute__((constructor)) static void watch(void) {
    atexit(none);
}

int __real_pthread_create(pthread_t *, const pthread_attr_t *, void *(*)(void *), void *);
int __wrap_pthread_create(pthread_t *thread, const pthread_attr_t *how, void *(*run)(void *), void *with) {
    return asked++ % 3 == 0 ? __real_pthread_create(thread, how, run, with) : EAGAIN;
}
