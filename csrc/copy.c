/* Copies into the arena and out of it, and the tail of a payload without columns. Runs in whoever writes or gathers a
 * block, without the interpreter's lock for large ones.
 *
 * From 256 KiB on stores bypass the caches (1.4 to 2 times glibc's memcpy into memory whose reader comes
 * later), unless the caller says that the reader is next (`hot`). SRL_PORTABLE leaves the intrinsics out. From 4 MiB on
 * the work is shared (parts.c).
 */
#include "arena_core.h"
#include <string.h>

#define NT_FROM (256u << 10)
#define RUN     512u /* bytes of one stream before the next one's turn */

static void copy_plain(char *to, const char *from, size_t nbytes) {
    memcpy(to, from, nbytes);
}

#if defined(__x86_64__) && !defined(SRL_PORTABLE)
#include <immintrin.h>

__attribute__((target("avx2"))) static void copy_lines(char *to, const char *from, size_t lines) {
    for (; lines; lines--, to += 64, from += 64) {
        _mm_prefetch(from + RUN, _MM_HINT_T0);
        __m256i x = _mm256_loadu_si256((const __m256i *)from);
        __m256i y = _mm256_loadu_si256((const __m256i *)(from + 32));
        _mm256_stream_si256((__m256i *)to, x);
        _mm256_stream_si256((__m256i *)(to + 32), y);
    }
}

static void copy_streaming(char *to, const char *from, size_t nbytes) {
    size_t head = -(size_t)to & 63;
    if (head > nbytes)
        head = nbytes;
    memcpy(to, from, head);
    size_t lines = (nbytes - head) / 64, body = lines * 64;
    copy_lines(to + head, from + head, lines);
    memcpy(to + head + body, from + head + body, nbytes - head - body);
}

static bool streams(size_t nbytes, bool hot) {
    return !hot && nbytes >= NT_FROM && __builtin_cpu_supports("avx2");
}

static void fence(void) {
    _mm_sfence();
}
#else
#define copy_streaming copy_plain
static bool streams(size_t nbytes, bool hot) {
    return false;
}
static void fence(void) {}
#endif

typedef void (*copy_fn)(char *to, const char *from, size_t nbytes);

/* Three blocks side by side, run by run: three streams of reads are 10% faster than one, and the checksum needs
 * them anyway. It fetches a run into the first cache and the copy takes it from there; a loop that does both word
 * by word is five times slower where source and destination are at nearly the same place of a page, since loads
 * then wait for the stores. block: a whole number of runs. */
static void copy_three(char *to, const char *from, size_t block, copy_fn copy, uint32_t *crcs) {
    if (crcs)
        crcs[0] = crcs[1] = crcs[2] = 0;
    for (size_t at = 0; at < block; at += RUN) {
        if (crcs)
            srl_crc_three(crcs, from + at, block, RUN);
        for (size_t other = 0; other < 3 * block; other += block)
            copy(to + other + at, from + other + at, RUN);
    }
}

/* One block, or less -> its crc. */
static uint32_t copy_one(char *to, const char *from, size_t nbytes, bool wide, bool streaming, copy_fn copy) {
    if (wide)
        return srl_wide_copy(0, to, from, nbytes, streaming && (size_t)to % 64 == 0);
    uint32_t crc = srl_crc32c(0, from, nbytes);
    copy(to, from, nbytes);
    return crc;
}

/* What is streamed or has checksum blocks. crcs: one for each `block` bytes, or NULL: it is streamed then. */
static void copy_blocks(char *to, const char *from, size_t nbytes, size_t block, bool streaming,
                        uint32_t *crcs) {
    bool wide = srl_wide() && !(streaming && (size_t)to % 64);
    copy_fn copy = streaming ? copy_streaming : copy_plain;
    size_t at = 0;
    for (; block % RUN == 0 && !(wide && !streaming) && nbytes - at >= 3 * block; at += 3 * block)
        if (!wide)
            copy_three(to + at, from + at, block, copy, crcs ? crcs + at / block : NULL);
        else if (crcs)
            srl_wide_copy_three(to + at, from + at, block, crcs + at / block);
        else
            srl_wide_stream_three(to + at, from + at, block);
    for (; crcs && at < nbytes; at += block) {
        size_t n = nbytes - at < block ? nbytes - at : block;
        crcs[at / block] = copy_one(to + at, from + at, n, wide, streaming, copy);
    }
    if (!crcs && wide)
        srl_wide_stream(to + at, from + at, nbytes - at);
    else if (!crcs)
        copy(to + at, from + at, nbytes - at);
}

struct part {
    char *to;
    const char *from;
    size_t nbytes, block;
    bool streaming;
    uint32_t *crcs; /* or NULL */
};

static void *copy_part(void *arg) {
    struct part *p = arg;
    if (p->streaming || p->crcs)
        copy_blocks(p->to, p->from, p->nbytes, p->block, p->streaming, p->crcs);
    else
        memcpy(p->to, p->from, p->nbytes);
    if (p->streaming)
        fence(); /* of this thread's stores, before the release store that publishes the bytes */
    return NULL;
}

/* In as many parts as it is worth, each of whole blocks, by threes where there are so many. */
static void copy_all(char *to, const char *from, size_t nbytes, size_t block, bool streaming,
                     uint32_t *crcs) {
    struct part parts[SRL_MOST_PARTS];
    size_t n = 0, part = nbytes / srl_parts(nbytes), unit = part / 3 < block ? block : 3 * block;
    size_t each = (part / unit + 1) * unit;
    for (size_t at = 0; at < nbytes; at += each)
        parts[n++] = (struct part){to + at, from + at, nbytes - at < each ? nbytes - at : each,
                                   block,   streaming, crcs ? crcs + at / block : NULL};
    srl_each(copy_part, parts, sizeof *parts, n);
}

void srl_copy_blocks(void *to, const void *from, uint64_t nbytes, uint64_t block, uint32_t *crcs) {
    copy_all(to, from, nbytes, block, streams(nbytes, false), crcs);
}

void srl_copy_around(void *to, const void *from, uint64_t nbytes) {
    if (!streams(nbytes, false)) {
        memcpy(to, from, nbytes);
        return;
    }
    size_t head = -(size_t)to & 63;
    memcpy(to, from, head);
    copy_all((char *)to + head, (const char *)from + head, nbytes - head, SRL_PAGE, true, NULL);
}

static uint32_t crc_count(uint64_t nbytes) {
    return (uint32_t)((nbytes + SRL_PAGE - 1) / SRL_PAGE);
}

/* None for one checksum block, whose crc is in the descriptor. */
uint64_t srl_plain_tail(uint64_t nbytes) {
    return nbytes <= SRL_PAGE
               ? 0
               : srl_tail_at(nbytes) - nbytes + SRL_TAIL_HEADER + 4 * (uint64_t)crc_count(nbytes);
}

/* Fills a block without columns from `from` (NULL: it is filled) -> bytes of tail; its crc, or else the payload's. */
uint32_t srl_fill(void *to, const void *from, uint64_t nbytes, bool hot, bool checksum, uint32_t *crc) {
    bool streaming = from && streams(nbytes, hot), blocks = checksum && nbytes > SRL_PAGE;
    char *tail = (char *)to + srl_tail_at(nbytes);
    uint32_t *crcs = (uint32_t *)(tail + SRL_TAIL_HEADER);
    if (from)
        copy_all(to, from, nbytes, SRL_PAGE, streaming, blocks ? crcs : NULL);
    else if (blocks)
        srl_crc_blocks(to, nbytes, SRL_PAGE, crcs);
    if (!blocks) {
        *crc = checksum ? srl_crc32c(0, to, nbytes) : 0;
        return 0;
    }
    uint32_t header[4] = {SRL_TAIL_MAGIC, 0, crc_count(nbytes), 0}, n = SRL_TAIL_HEADER + 4 * header[2];
    memcpy(tail, header, sizeof header);
    *crc = srl_crc32c(0, tail, n);
    return n;
}
