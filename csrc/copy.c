/* Copies into the arena. Runs in whoever writes a block, without the interpreter's lock for large ones.
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

void srl_copy(void *to, const void *from, size_t nbytes, bool hot) {
    if (streams(nbytes, hot))
        copy_streaming(to, from, nbytes);
    else
        memcpy(to, from, nbytes);
}

/* The checksum reads three pages of the source into the cache, the copy takes them from there. */
void srl_copy_crc(void *to, const void *from, size_t nbytes, bool hot, uint32_t *crcs) {
    bool streaming = streams(nbytes, hot);
    for (size_t at = 0; at < nbytes; at += 3 * SRL_PAGE, crcs += 3) {
        size_t n = nbytes - at < 3 * SRL_PAGE ? nbytes - at : 3 * SRL_PAGE;
        srl_crc_blocks((const char *)from + at, n, SRL_PAGE, crcs);
        if (streaming)
            copy_streaming((char *)to + at, (const char *)from + at, n);
        else
            memcpy((char *)to + at, (const char *)from + at, n);
    }
}
