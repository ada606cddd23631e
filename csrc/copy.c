/* Copies into the arena, and the tail of a payload without columns. Runs in whoever writes a block, without
 * the interpreter's lock for large ones.
 *
 * From 256 KiB on stores bypass the caches (1.4 to 2 times glibc's memcpy into memory whose reader comes
 * later), unless the caller says that the reader is next (`hot`). SRL_PORTABLE leaves the intrinsics out.
 */
#include "arena_core.h"
#include <string.h>

#define NT_FROM (256u << 10)
#define RUN     512u /* bytes of one stream before the next one's turn */

_Static_assert(SRL_PAGE % RUN == 0, "a checksum block is a whole number of runs");

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

/* Three checksum blocks side by side, run by run: three streams of reads are 10% faster than one, and the
 * checksum needs them anyway. It fetches a run into the first cache and the copy takes it from there; a loop
 * that does both word by word is five times slower where source and destination are at nearly the same place
 * of a page, since loads then wait for the stores. */
static void copy_three(char *to, const char *from, copy_fn copy, uint32_t *crcs) {
    if (crcs)
        crcs[0] = crcs[1] = crcs[2] = 0;
    for (size_t at = 0; at < SRL_PAGE; at += RUN) {
        if (crcs)
            srl_crc_three(crcs, from + at, SRL_PAGE, RUN);
        for (size_t block = 0; block < 3 * SRL_PAGE; block += SRL_PAGE)
            copy(to + block + at, from + block + at, RUN);
    }
}

/* One pass, one stream: it keeps up with memory. */
static void copy_wide(char *to, const char *from, size_t nbytes, bool streaming, uint32_t *crcs) {
    if (!crcs)
        srl_wide_stream(to, from, nbytes);
    for (size_t at = 0; crcs && at < nbytes; at += SRL_PAGE)
        *crcs++ =
            srl_wide_copy(to + at, from + at, nbytes - at < SRL_PAGE ? nbytes - at : SRL_PAGE, streaming);
}

/* What is streamed or has checksum blocks. crcs: one per checksum block, or NULL. */
static void copy_blocks(char *to, const char *from, size_t nbytes, bool streaming, uint32_t *crcs) {
    if (srl_wide() && !(streaming && (size_t)to % 64)) {
        copy_wide(to, from, nbytes, streaming, crcs);
        return;
    }
    copy_fn copy = streaming ? copy_streaming : copy_plain;
    size_t at = 0;
    for (; nbytes - at >= 3 * SRL_PAGE; at += 3 * SRL_PAGE)
        copy_three(to + at, from + at, copy, crcs ? crcs + at / SRL_PAGE : NULL);
    if (crcs)
        srl_crc_blocks(from + at, nbytes - at, SRL_PAGE, crcs + at / SRL_PAGE);
    copy(to + at, from + at, nbytes - at);
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
    if (from && (streaming || blocks))
        copy_blocks(to, from, nbytes, streaming, blocks ? crcs : NULL);
    else if (from)
        memcpy(to, from, nbytes);
    else if (blocks)
        srl_crc_blocks(to, nbytes, SRL_PAGE, crcs);
    if (streaming)
        fence(); /* before the release store that publishes the bytes */
    if (!blocks) {
        *crc = checksum ? srl_crc32c(0, to, nbytes) : 0;
        return 0;
    }
    uint32_t header[4] = {SRL_TAIL_MAGIC, 0, crc_count(nbytes), 0}, n = SRL_TAIL_HEADER + 4 * header[2];
    memcpy(tail, header, sizeof header);
    *crc = srl_crc32c(0, tail, n);
    return n;
}
