/* payload_vector.c: the two passes over every byte of an engine's answer, 32 bytes at a time where there is AVX2, and 64
 * at a time where there is AVX-512 with VBMI.
 *
 * Called by payload_ids.c, which goes on one element at a time from where these stop, and so finds and names
 * what is wrong. SRL_PORTABLE leaves the intrinsics out: both then stop at once. SRL_NO_AVX512 leaves
 * AVX2.
 */
#include "payload.h"

#if defined(__x86_64__) && !defined(SRL_PORTABLE)
#include <immintrin.h>
#define AVX2 __attribute__((target("avx2")))
#define VBMI __attribute__((target("avx512f,avx512bw,avx512vbmi")))

/* 0xff where first <= byte <= last, as signed: a byte of 128 and more is in no range. */
AVX2 static inline __m256i between(__m256i v, char first, char last) {
    return _mm256_and_si256(_mm256_cmpgt_epi8(v, _mm256_set1_epi8((char)(first - 1))),
                            _mm256_cmpgt_epi8(_mm256_set1_epi8((char)(last + 1)), v));
}

/* What to add to the characters from first to last, of which first stands for `value`; they are noted as known. */
AVX2 static inline __m256i shift(__m256i v, char first, char last, char value, __m256i *known) {
    __m256i in = between(v, first, last);
    *known = _mm256_or_si256(*known, in);
    return _mm256_and_si256(in, _mm256_set1_epi8((char)(value - first)));
}

/* Four sextets become three bytes, most significant first; 12 bytes at the front of either half. */
AVX2 static inline __m256i packed(__m256i sextets) {
    __m256i pairs = _mm256_maddubs_epi16(sextets, _mm256_set1_epi16(0x0140));  /* a << 6 | b */
    __m256i triples = _mm256_madd_epi16(pairs, _mm256_set1_epi32(0x00011000)); /* ab << 12 | cd */
    return _mm256_shuffle_epi8(triples,
                               _mm256_setr_epi8(2, 1, 0, 6, 5, 4, 10, 9, 8, 14, 13, 12, -1, -1, -1, -1, 2, 1,
                                                0, 6, 5, 4, 10, 9, 8, 14, 13, 12, -1, -1, -1, -1));
}

AVX2 static int64_t decode(const char *text, int64_t length, uint8_t *out) {
    int64_t i = 0;
    for (; i + 40 <= length; i += 32, out += 24) { /* the second store writes four bytes too many */
        __m256i v = _mm256_loadu_si256((const __m256i *)(text + i)), known = _mm256_setzero_si256();
        __m256i by = shift(v, 'A', 'Z', 0, &known);
        by = _mm256_or_si256(by, shift(v, 'a', 'z', 26, &known));
        by = _mm256_or_si256(by, shift(v, '0', '9', 52, &known));
        by = _mm256_or_si256(by, shift(v, '+', '+', 62, &known));
        by = _mm256_or_si256(by, shift(v, '/', '/', 63, &known));
        if (_mm256_movemask_epi8(known) != -1)
            break;
        __m256i bytes = packed(_mm256_add_epi8(v, by));
        _mm_storeu_si128((__m128i *)out, _mm256_castsi256_si128(bytes));
        _mm_storeu_si128((__m128i *)(out + 12), _mm256_extracti128_si256(bytes, 1));
    }
    return i;
}

#ifndef SRL_NO_AVX512
/* What each of the 128 ASCII characters stands for; 0x80: nothing. */
static const uint8_t *sextets(void) {
    static uint8_t table[128];
    static int ready;
    if (!__atomic_load_n(&ready, __ATOMIC_ACQUIRE)) {
        for (int c = 0; c < 128; c++) {
            int value = srl_sextet((uint8_t)c);
            __atomic_store_n(table + c, (uint8_t)(value < 0 ? 0x80 : value), __ATOMIC_RELAXED);
        }
        __atomic_store_n(&ready, 1, __ATOMIC_RELEASE);
    }
    return table;
}

VBMI static int64_t decode_64(const char *text, int64_t length, uint8_t *out) {
    const __m512i low = _mm512_loadu_si512(sextets()), high = _mm512_loadu_si512(sextets() + 64);
    uint8_t order[64] = {0}; /* of the 16 groups of three bytes, most significant first */
    for (uint8_t i = 0; i < 48; i++)
        order[i] = (uint8_t)(i / 3 * 4 + 2 - i % 3);
    const __m512i pack = _mm512_loadu_si512(order);
    int64_t i = 0;
    for (; i + 64 <= length; i += 64, out += 48) {
        _mm_prefetch(text + i + 1024, _MM_HINT_T0);
        __m512i v = _mm512_loadu_si512(text + i), x = _mm512_permutex2var_epi8(low, v, high);
        if (_mm512_movepi8_mask(_mm512_or_si512(v, x)))
            break;
        x = _mm512_maddubs_epi16(x, _mm512_set1_epi16(0x0140));  /* a << 6 | b */
        x = _mm512_madd_epi16(x, _mm512_set1_epi32(0x00011000)); /* ab << 12 | cd */
        _mm512_mask_storeu_epi8(out, (1ull << 48) - 1, _mm512_permutexvar_epi8(pack, x));
    }
    return i;
}

/* Eight rows at a time. Each id beside its neighbours 1 to 4 further round the row: every pair of eight meets. */
VBMI static int64_t distinct_64(const uint8_t *ids, int64_t rows, int64_t limit) {
    const __m512i most = _mm512_set1_epi8((char)(limit > 255 ? 255 : limit - 1));
    int64_t r = 0;
    for (; r + 8 <= rows; r += 8) {
        __m512i v = _mm512_loadu_si512(ids + 8 * r);
        __mmask64 bad = _mm512_cmpgt_epu8_mask(v, most);
        bad |= _mm512_cmpeq_epi8_mask(v, _mm512_rol_epi64(v, 8));
        bad |= _mm512_cmpeq_epi8_mask(v, _mm512_rol_epi64(v, 16));
        bad |= _mm512_cmpeq_epi8_mask(v, _mm512_rol_epi64(v, 24));
        bad |= _mm512_cmpeq_epi8_mask(v, _mm512_rol_epi64(v, 32));
        if (bad)
            break;
    }
    return r;
}

static int vbmi(void) {
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vbmi");
}
#endif

/* Each id beside its neighbours 1 to 4 further round the row: every pair of eight meets. */
AVX2 static int64_t distinct(const uint8_t *ids, int64_t rows, int64_t limit) {
    const __m256i own = _mm256_setr_epi8(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4,
                                         5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const __m256i seven = _mm256_set1_epi8(7), eight = _mm256_set1_epi8(8);
    const __m256i most = _mm256_set1_epi8((char)(limit > 255 ? 255 : limit - 1));
    int64_t r = 0;
    for (; r + 4 <= rows; r += 4) {
        __m256i v = _mm256_loadu_si256((const __m256i *)(ids + 8 * r)), bad = _mm256_setzero_si256();
        for (char by = 1; by <= 4; by++) {
            __m256i turned = _mm256_and_si256(_mm256_add_epi8(own, _mm256_set1_epi8(by)), seven);
            turned = _mm256_or_si256(turned, _mm256_and_si256(own, eight));
            bad = _mm256_or_si256(bad, _mm256_cmpeq_epi8(v, _mm256_shuffle_epi8(v, turned)));
        }
        __m256i small = _mm256_cmpeq_epi8(_mm256_max_epu8(v, most), most);
        if (_mm256_movemask_epi8(_mm256_andnot_si256(bad, small)) != -1)
            break;
    }
    return r;
}

int64_t srl_decode_front(const char *text, int64_t length, uint8_t *out) {
#ifndef SRL_NO_AVX512
    if (vbmi())
        return decode_64(text, length, out);
#endif
    return __builtin_cpu_supports("avx2") ? decode(text, length, out) : 0;
}

int64_t srl_good_rows_of_8(const uint8_t *ids, int64_t rows, int64_t limit) {
    if (limit <= 0)
        return 0;
#ifndef SRL_NO_AVX512
    if (vbmi())
        return distinct_64(ids, rows, limit);
#endif
    return __builtin_cpu_supports("avx2") ? distinct(ids, rows, limit) : 0;
}
#else
int64_t srl_decode_front(const char *text, int64_t length, uint8_t *out) {
    return 0;
}

int64_t srl_good_rows_of_8(const uint8_t *ids, int64_t rows, int64_t limit) {
    return 0;
}
#endif
