/* Of three threads the first is had and the others are not, as under a limit of threads. */
#include <errno.h>
#include <pthread.h>

int __real_pthread_create(pthread_t *, const pthread_attr_t *, void *(*)(void *), void *);
int __wrap_pthread_create(pthread_t *thread, const pthread_attr_t *how, void *(*run)(void *), void *with) {
    static int asked;
    return asked++ % 3 ? EAGAIN : __real_pthread_create(thread, how, run, with);
}
