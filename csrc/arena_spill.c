/* Files of spilled blocks: made, mapped and removed by slot and generation, in the arena's own spill directory.
 *
 * Runs in every attached process; the operating system's side of the arena, like arena_live.c. A name is used by one
 * generation alone, so a file that nobody removed cannot be taken for a later block's. Space is allocated before
 * the first byte is written: a full disk is an error here, never a SIGBUS there.
 */
#include "arena_live.h"
#include "arena_atomics.h"
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#define NAME_MAX_ 24

static void name_of(char *out, uint32_t slot, uint32_t gen) {
    snprintf(out, NAME_MAX_, "%u-%u", slot, gen);
}

static int map_file(int fd, uint64_t nbytes, int protection, void **at) {
    void *mapped = mmap(NULL, nbytes, protection, MAP_SHARED, fd, 0);
    if (mapped == MAP_FAILED)
        return -errno;
    *at = mapped;
    return 0;
}

static int allocate(int fd, uint64_t nbytes, void **at) {
    if (fchmod(fd, 0600)) /* the umask applied */
        return -errno;
    int rc;
    do
        rc = -SRL_OUTSIDE(posix_fallocate(fd, 0, (off_t)nbytes));
    while (rc == -EINTR);
    return rc ? rc : map_file(fd, nbytes, PROT_READ | PROT_WRITE, at);
}

/* A new file of nbytes > 0, mapped for writing; on an error there is none. */
int srl_spill_make(int dir, uint32_t slot, uint32_t gen, uint64_t nbytes, uint8_t **at) {
    char name[NAME_MAX_];
    name_of(name, slot, gen);
    int fd = SRL_OUTSIDE(openat(dir, name, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600));
    if (fd < 0)
        return -errno;
    int rc = allocate(fd, nbytes, (void **)at);
    if (rc)
        unlinkat(dir, name, 0);
    close(fd);
    return rc;
}

/* The first nbytes > 0 of a file, read-only. -EUCLEAN: it is shorter than its descriptor says; -ENXIO: it is a link,
 * a pipe (whose open would wait for a writer), or whatever else is no regular file. */
int srl_spill_map(int dir, uint32_t slot, uint32_t gen, uint64_t nbytes, const uint8_t **at) {
    char name[NAME_MAX_];
    struct stat s;
    name_of(name, slot, gen);
    int fd = openat(dir, name, O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK);
    if (fd < 0)
        return errno == ELOOP ? -ENXIO : -errno;
    int rc = fstat(fd, &s) ? -errno : 0;
    if (!rc && !S_ISREG(s.st_mode))
        rc = -ENXIO;
    if (!rc && (uint64_t)s.st_size < nbytes)
        rc = -EUCLEAN;
    if (!rc)
        rc = map_file(fd, nbytes, PROT_READ, (void **)at);
    close(fd);
    return rc;
}

void srl_spill_drop(void *live, uint32_t slot, uint32_t gen) {
    char name[NAME_MAX_];
    name_of(name, slot, gen);
    SRL_OUTSIDE(unlinkat(((srl_live *)live)->spill, name, 0));
}
