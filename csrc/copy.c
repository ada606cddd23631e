/* Copies into the arena, and the tail of a payload without columns. Runs in whoever writes a block, without
 * the interpreter's lock for large ones.
 *
 * From 256 KiB on stores bypass the caches (1.4 to 2 times glibc's memcpy into memory whose reader comes
 * later), unless the caller says that the reader is next (`hot`).
 */
#include "arena_core.h"
#include <string.h>

#define NT_FROM (256u << 10)

#if defined(__x86_64__)
#include <immintrin.h>

__attribute__((target("avx2"))) static void copy_lines(char *to, const char *from, size_t lines) {
    for (; lines; lines--, to += 64, from += 64) {
        _mm_prefetch(from + 512, _MM_HINT_NTA);
        __m256i x = _mm256_loadu_si256((const __m256i *)from);
        __m256i y = _mm256_loadu_si256((const __m256i *)(from + 32));
        _mm256_stream_si256((__m256i *)to, x);
        _mm256_stream_si256((__m256i *)(to + 32), y);
    }
    _mm_sfence(); /* before the release store that publishes them */
}

static void copy_streaming(char *to, const char *from, size_t nbytes) {
    size_t head = -(size_t)to & 63;
    memcpy(to, from, head);
    size_t lines = (nbytes - head) / 64, body = lines * 64;
    copy_lines(to + head, from + head, lines);
    memcpy(to + head + body, from + head + body, nbytes - head - body);
}

static bool streams(size_t nbytes, bool hot) {
    return !hot && nbytes >= NT_FROM && __builtin_cpu_supports("avx2");
}
#else
static void copy_streaming(char *to, const char *from, size_t nbytes) {
    memcpy(to, from, nbytes);
}
static bool streams(size_t nbytes, bool hot) {
    return false;
}
#endif

/* The checksum reads three pages of the source into the cache, the copy takes them from there. */
static void copy_and_checksum(char *to, const char *from, size_t nbytes, bool hot, uint32_t *crcs) {
    bool streaming = streams(nbytes, hot);
    for (size_t at = 0; at < nbytes; at += 3 * SRL_PAGE, crcs += 3) {
        size_t n = nbytes - at < 3 * SRL_PAGE ? nbytes - at : 3 * SRL_PAGE;
        srl_crc_blocks(from + at, n, SRL_PAGE, crcs);
        if (streaming)
            copy_streaming(to + at, from + at, n);
        else
            memcpy(to + at, from + at, n);
    }
}

static void copy(char *to, const char *from, size_t nbytes, bool hot) {
    if (streams(nbytes, hot))
        copy_streaming(to, from, nbytes);
    else
        memcpy(to, from, nbytes);
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

/* Fills a block without columns from `from` (NULL: it is filled) -> bytes of tail; its crc, or the payload's.
 */
uint32_t srl_fill(void *to, const void *from, uint64_t nbytes, bool hot, bool checksum, uint32_t *crc) {
    *crc = 0;
    if (!checksum || nbytes <= SRL_PAGE) {
        if (from)
            copy(to, from, nbytes, hot);
        if (checksum)
            *crc = srl_crc32c(0, to, nbytes);
        return 0;
    }
    char *tail = (char *)to + srl_tail_at(nbytes);
    uint32_t *crcs = (uint32_t *)(tail + SRL_TAIL_HEADER);
    if (from)
        copy_and_checksum(to, from, nbytes, hot, crcs);
    else
        srl_crc_blocks(to, nbytes, SRL_PAGE, crcs);
    uint32_t header[4] = {SRL_TAIL_MAGIC, 0, crc_count(nbytes), 0}, n = SRL_TAIL_HEADER + 4 * header[2];
    memcpy(tail, header, sizeof header);
    *crc = srl_crc32c(0, tail, n);
    return n;
}
