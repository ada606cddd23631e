/* crc32c (Castagnoli): in hardware on x86-64 (SSE4.2) and ARMv8, by table elsewhere. Check value of
 * "123456789": 0xe3069283.
 *
 * Blocks are independent, so three of them go through the unit side by side: its latency is three times its
 * throughput, and no combining step is needed. Machines with AVX-512 fold instead (avx512.c). SRL_PORTABLE leaves
 * the unit out.
 */
#include "arena_core.h"
#include <string.h>

#define LINE      64
#define AHEAD     512  /* bytes of each block that are fetched ahead of the unit */
#define WIDE_FROM 512u /* bytes for which registers of 64 are worth their start */

#if defined(SRL_PORTABLE)
#elif defined(__x86_64__)
#include <nmmintrin.h>
#define HARDWARE         __attribute__((target("sse4.2")))
#define CRC8(crc, byte)  _mm_crc32_u8((uint32_t)(crc), byte)
#define CRC64(crc, word) _mm_crc32_u64(crc, word)
static bool have_hardware(void) {
    return __builtin_cpu_supports("sse4.2");
}
#elif defined(__aarch64__)
#include <arm_acle.h>
#include <sys/auxv.h>
#define HARDWARE         __attribute__((target("+crc")))
#define CRC8(crc, byte)  __crc32cb((uint32_t)(crc), byte)
#define CRC64(crc, word) __crc32cd((uint32_t)(crc), word)
static bool have_hardware(void) {
    return getauxval(AT_HWCAP) & (1 << 7); /* HWCAP_CRC32 */
}
#endif

static uint32_t crc_table(uint32_t crc, const uint8_t *p, size_t n) {
    static uint32_t table[256];
    static int ready;
    if (!__atomic_load_n(&ready, __ATOMIC_ACQUIRE)) {
        for (uint32_t i = 0; i < 256; i++) {
            uint32_t c = i;
            for (int bit = 0; bit < 8; bit++)
                c = c & 1 ? c >> 1 ^ 0x82f63b78u : c >> 1;
            __atomic_store_n(table + i, c,
                             __ATOMIC_RELAXED); /* two threads may both do it: the same values */
        }
        __atomic_store_n(&ready, 1, __ATOMIC_RELEASE);
    }
    while (n--)
        crc = crc >> 8 ^ table[(crc ^ *p++) & 255];
    return crc;
}

#ifdef HARDWARE
static inline uint64_t word_at(const uint8_t *p) {
    uint64_t w;
    memcpy(&w, p, 8);
    return w;
}

HARDWARE static uint32_t crc_hardware(uint32_t crc, const uint8_t *p, size_t n) {
    uint64_t c = crc;
    for (; n >= 8; n -= 8, p += 8)
        c = CRC64(c, word_at(p));
    while (n--)
        c = CRC8(c, *p++);
    return (uint32_t)c;
}

HARDWARE static void three_hardware(uint32_t *crc, const uint8_t *p, size_t block, size_t n) {
    uint64_t a = ~crc[0], b = ~crc[1], c = ~crc[2];
    const uint8_t *q = p + block, *r = q + block;
    for (; n >= LINE; n -= LINE, p += LINE, q += LINE, r += LINE) {
        __builtin_prefetch(p + AHEAD);
        __builtin_prefetch(q + AHEAD);
        __builtin_prefetch(r + AHEAD);
        for (size_t i = 0; i < LINE; i += 8) {
            a = CRC64(a, word_at(p + i));
            b = CRC64(b, word_at(q + i));
            c = CRC64(c, word_at(r + i));
        }
    }
    crc[0] = ~crc_hardware((uint32_t)a, p, n);
    crc[1] = ~crc_hardware((uint32_t)b, q, n);
    crc[2] = ~crc_hardware((uint32_t)c, r, n);
}
#endif

uint32_t srl_crc32c(uint32_t crc, const void *bytes, size_t nbytes) {
    if (nbytes >= WIDE_FROM && srl_wide())
        return srl_wide_crc(crc, bytes, nbytes);
#ifdef HARDWARE
    if (have_hardware())
        return ~crc_hardware(~crc, bytes, nbytes);
#endif
    return ~crc_table(~crc, bytes, nbytes);
}

void srl_crc_three(uint32_t *crc, const void *bytes, size_t block, size_t n) {
    const char *p = bytes;
#ifdef HARDWARE
    if (have_hardware()) {
        three_hardware(crc, bytes, block, n);
        return;
    }
#endif
    for (int i = 0; i < 3; i++, p += block)
        crc[i] = srl_crc32c(crc[i], p, n);
}

void srl_crc_blocks(const void *bytes, size_t nbytes, size_t block, uint32_t *out) {
    const char *p = bytes;
    bool three = !srl_wide();
    for (; three && nbytes >= 3 * block; nbytes -= 3 * block, p += 3 * block, out += 3) {
        out[0] = out[1] = out[2] = 0;
        srl_crc_three(out, p, block, block);
    }
    for (; nbytes; p += block, out++) {
        size_t n = nbytes < block ? nbytes : block;
        *out = srl_crc32c(0, p, n);
        nbytes -= n;
    }
}
