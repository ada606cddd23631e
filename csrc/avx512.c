/* Copies and crc32c 64 bytes at a time, in one pass: AVX-512 with VPCLMULQDQ (Ice Lake, Zen 4 and later). copy.c
 * and crc32c.c ask srl_wide() first and have their own ways for other machines. SRL_PORTABLE and SRL_NO_AVX512
 * leave this out.
 *
 * The checksum folds: four registers hold a polynomial that is congruent to everything read so far. To move one
 * past the next d bits, each of its 64-bit halves is multiplied by x^(d +- 32) mod P, bit-reflected and shifted by
 * one; what is left at the end goes through the CRC unit.
 */
#include "arena_core.h"
#include <string.h>

#if defined(__x86_64__) && !defined(SRL_PORTABLE) && !defined(SRL_NO_AVX512)
#include <immintrin.h>

#define LINE   64u
#define STRIDE (4 * LINE) /* bytes that the four registers take at a time */
#define AHEAD  1024u      /* bytes that are fetched ahead */
#define RUN    512u       /* bytes of one block before the next one's turn, where there are three */
#define WIDE   __attribute__((target("avx512f,avx512vl,avx512dq,vpclmulqdq,pclmul,sse4.2")))
#define INLINE WIDE __attribute__((always_inline)) static inline

enum stores { NOWHERE, CACHED, STREAMED };

bool srl_wide(void) {
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("vpclmulqdq") &&
           __builtin_cpu_supports("pclmul") && __builtin_cpu_supports("sse4.2");
}

/* Three places side by side keep more of memory busy than one. */
WIDE void srl_wide_stream_three(void *to, const void *from, size_t block) {
    for (size_t at = 0; at < block; at += RUN)
        for (size_t run = at; run < 3 * block; run += block)
            for (size_t i = run; i < run + RUN; i += LINE)
                _mm512_stream_si512((__m512i *)((char *)to + i), _mm512_loadu_si512((const char *)from + i));
}

WIDE void srl_wide_stream(void *to, const void *from, size_t nbytes) {
    char *p = to;
    const char *q = from, *end = q + nbytes / LINE * LINE;
    for (; q < end; p += LINE, q += LINE) {
        _mm_prefetch(q + AHEAD, _MM_HINT_T0);
        _mm512_stream_si512((__m512i *)p, _mm512_loadu_si512(q));
    }
    memcpy(p, q, nbytes % LINE);
}

/* (x^(d + 32) mod P, x^(d - 32) mod P), reflected and shifted by one. */
static const uint64_t PAST_2048[2] = {0x0dcb17aa4, 0x0b9e02b86};
static const uint64_t PAST_512[2] = {0x0740eef02, 0x09e4addf8};
static const uint64_t PAST_128[2] = {0x0f20c0dfe, 0x14cd00bd6};

INLINE __m512i fold(__m512i a, const uint64_t past[2], __m512i next) {
    __m512i k = _mm512_broadcast_i64x2(_mm_loadu_si128((const __m128i *)past));
    return _mm512_ternarylogic_epi64(_mm512_clmulepi64_epi128(a, k, 0x00),
                                     _mm512_clmulepi64_epi128(a, k, 0x11), next, 0x96); /* a ^ b ^ c */
}

INLINE __m128i fold_128(__m128i a, __m128i next) {
    __m128i k = _mm_loadu_si128((const __m128i *)PAST_128);
    return _mm_xor_si128(_mm_xor_si128(_mm_clmulepi64_si128(a, k, 0x00), _mm_clmulepi64_si128(a, k, 0x11)),
                         next);
}

INLINE __m512i take(char *to, const char *from, enum stores stores) {
    __m512i line = _mm512_loadu_si512(from);
    if (stores == CACHED)
        _mm512_storeu_si512(to, line);
    else if (stores == STREAMED)
        _mm512_stream_si512((__m512i *)to, line);
    return line;
}

/* The first STRIDE of what has this crc before it. */
INLINE void begin(__m512i a[4], uint32_t crc, char *to, const char *from, enum stores stores) {
    for (size_t i = 0; i < 4; i++)
        a[i] = take(to + LINE * i, from + LINE * i, stores);
    a[0] = _mm512_xor_si512(a[0], _mm512_zextsi128_si512(_mm_cvtsi32_si128((int)~crc)));
}

INLINE void fold_next(__m512i a[4], char *to, const char *from, enum stores stores) {
    for (size_t i = 0; i < 4; i++)
        a[i] = fold(a[i], PAST_2048, take(to + LINE * i, from + LINE * i, stores));
}

INLINE uint32_t end(__m512i a[4]) {
    for (size_t i = 1; i < 4; i++)
        a[i] = fold(a[i - 1], PAST_512, a[i]);
    __m128i x = _mm512_castsi512_si128(a[3]);
    x = fold_128(x, _mm512_extracti64x2_epi64(a[3], 1));
    x = fold_128(x, _mm512_extracti64x2_epi64(a[3], 2));
    x = fold_128(x, _mm512_extracti64x2_epi64(a[3], 3));
    uint64_t c = _mm_crc32_u64(0, (uint64_t)_mm_cvtsi128_si64(x));
    return ~(uint32_t)_mm_crc32_u64(c, (uint64_t)_mm_extract_epi64(x, 1));
}

/* nbytes: a multiple of STRIDE, at least one. */
INLINE uint32_t fold_all(uint32_t crc, char *to, const char *from, size_t nbytes, enum stores stores) {
    __m512i a[4];
    begin(a, crc, to, from, stores);
    for (size_t at = STRIDE; at < nbytes; at += STRIDE) {
        for (size_t i = 0; i < 4; i++)
            _mm_prefetch(from + at + LINE * i + AHEAD, _MM_HINT_T0);
        fold_next(a, to + at, from + at, stores);
    }
    return end(a);
}

WIDE uint32_t srl_wide_crc(uint32_t crc, const void *bytes, size_t nbytes) {
    size_t body = nbytes / STRIDE * STRIDE;
    if (body)
        crc = fold_all(crc, NULL, bytes, body, NOWHERE);
    return srl_crc32c(crc, (const char *)bytes + body, nbytes - body);
}

WIDE uint32_t srl_wide_copy(uint32_t crc, void *to, const void *from, size_t nbytes, bool streaming) {
    size_t body = nbytes / STRIDE * STRIDE, rest = nbytes - body;
    if (body)
        crc = streaming ? fold_all(crc, to, from, body, STREAMED) : fold_all(crc, to, from, body, CACHED);
    memcpy((char *)to + body, (const char *)from + body, rest);
    return srl_crc32c(crc, (const char *)from + body, rest);
}

WIDE void srl_wide_copy_three(void *to, const void *from, size_t block, uint32_t *crcs) {
    __m512i a[3][4];
    char *p = to;
    const char *q = from;
    for (size_t i = 0; i < 3; i++)
        begin(a[i], 0, p + i * block, q + i * block, STREAMED);
    for (size_t run = 0; run < block; run += RUN)
        for (size_t i = 0; i < 3; i++)
            for (size_t at = run ? run : STRIDE; at < run + RUN; at += STRIDE)
                fold_next(a[i], p + i * block + at, q + i * block + at, STREAMED);
    for (size_t i = 0; i < 3; i++)
        crcs[i] = end(a[i]);
}

void srl_wide_fence(void) {
    _mm_sfence();
}
#else
bool srl_wide(void) {
    return false;
}
void srl_wide_stream(void *to, const void *from, size_t nbytes) {}
void srl_wide_stream_three(void *to, const void *from, size_t block) {}
void srl_wide_copy_three(void *to, const void *from, size_t block, uint32_t *crcs) {}
uint32_t srl_wide_crc(uint32_t crc, const void *bytes, size_t nbytes) {
    return crc;
}
uint32_t srl_wide_copy(uint32_t crc, void *to, const void *from, size_t nbytes, bool streaming) {
    return crc;
}
void srl_wide_fence(void) {}
#endif
