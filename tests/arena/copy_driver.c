/* srl_fill at every alignment and around every size at which it takes another way, against plain loops.
 *
 * Built by tests/arena/test_copy.py, as the machine has it and with SRL_PORTABLE. Prints "ok", or what differs.
 */
#include "arena_core.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define BIG   (6u * SRL_PAGE + 5) /* streams: six whole blocks, and a rest shorter than a cache line */
#define GUARD 128                 /* bytes around the destination that must stay */

static unsigned char source[BIG + 256], target[2 * BIG];
static uint32_t table[256];

static uint32_t slow_crc(const unsigned char *p, size_t n) {
    uint32_t crc = UINT32_MAX;
    while (n--)
        crc = crc >> 8 ^ table[(crc ^ *p++) & 255];
    return ~crc;
}

static void make_table(void) {
    for (uint32_t i = 0; i < 256; i++) {
        table[i] = i;
        for (int bit = 0; bit < 8; bit++)
            table[i] = table[i] >> 1 ^ (table[i] & 1) * 0x82f63b78u;
    }
}

static void differs(const char *what, size_t n, size_t to, size_t from) {
    printf("%s: %zu bytes to +%zu from +%zu\n", what, n, to, from);
    exit(1);
}

static void check_tail(const unsigned char *p, size_t n, uint32_t tail, uint32_t crc) {
    const unsigned char *end = p + srl_tail_at(n);
    uint32_t blocks = (uint32_t)((n + SRL_PAGE - 1) / SRL_PAGE), stored;
    if (tail != SRL_TAIL_HEADER + 4 * blocks || crc != slow_crc(end, tail))
        differs("tail", n, 0, 0);
    for (uint32_t i = 0; i < blocks; i++) {
        size_t left = n - (size_t)i * SRL_PAGE;
        memcpy(&stored, end + SRL_TAIL_HEADER + 4 * i, 4);
        if (stored != slow_crc(p + (size_t)i * SRL_PAGE, left < SRL_PAGE ? left : SRL_PAGE))
            differs("crc of a block", n, i, 0);
    }
}

static void fill(size_t n, size_t to, size_t from, bool hot, bool checksum) {
    unsigned char *p = target + GUARD + to;
    size_t after = checksum ? srl_plain_tail(n) : 0;
    memset(target, 0xa5, GUARD + to + n + after + GUARD);
    uint32_t crc, tail = srl_fill(p, source + from, n, hot, checksum, &crc);
    if (memcmp(p, source + from, n))
        differs("bytes", n, to, from);
    for (size_t i = 0; i < GUARD; i++)
        if (target[to + i] != 0xa5 || p[n + after + i] != 0xa5)
            differs("guard", n, to, from);
    if (!checksum ? crc || tail : n <= SRL_PAGE && (crc != slow_crc(p, n) || tail))
        differs("crc", n, to, from);
    if (checksum && n > SRL_PAGE)
        check_tail(p, n, tail, crc);
}

/* Rows of a column, with a crc for each `block` bytes; block 0: none, as a gather copies. */
static void copy(size_t n, size_t to, size_t from, size_t block) {
    static uint32_t crcs[2 * BIG / 256];
    unsigned char *p = target + GUARD + to;
    memset(target, 0xa5, GUARD + to + n + GUARD);
    if (block)
        srl_copy_blocks(p, source + from, n, block, crcs);
    else
        srl_copy_around(p, source + from, n);
    if (memcmp(p, source + from, n))
        differs("copied bytes", n, to, from);
    for (size_t i = 0; i < GUARD; i++)
        if (target[to + i] != 0xa5 || p[n + i] != 0xa5)
            differs("guard of a copy", n, to, from);
    for (size_t at = 0; block && at < n; at += block)
        if (crcs[at / block] != slow_crc(p + at, n - at < block ? n - at : block))
            differs("crc of copied rows", n, to, from);
}

int main(void) {
#ifdef SRL_PART
    if (srl_parts(2 * SRL_PART - 1) != 1 || srl_parts(2 * SRL_PART) != 2 || srl_parts(1 << 30) != SRL_CORES)
        differs("parts", 0, 0, 0);
#endif
    static const size_t sizes[] = {0,
                                   1,
                                   63,
                                   64,
                                   65,
                                   4096,
                                   SRL_PAGE - 1,
                                   SRL_PAGE,
                                   SRL_PAGE + 1,
                                   3 * SRL_PAGE - 1,
                                   3 * SRL_PAGE,
                                   4 * SRL_PAGE - 1,
                                   4 * SRL_PAGE,
                                   BIG};
    make_table();
    for (size_t i = 0; i < sizeof source; i++)
        source[i] = (unsigned char)(i * 2654435761u >> 13);
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++)
        for (unsigned how = 0; how < 4; how++)
            for (size_t off = 0; off<64; off += sizes[i]> SRL_PAGE ? 21 : 3)
                fill(sizes[i], off & ~(size_t)7, off * 5 % 64, how & 1, how & 2); /* a tail is aligned to 8 */
    for (size_t off = 0; off < 64; off++) /* the streaming copy takes a destination at any byte */
        fill(BIG, off, 63 - off, false, false);
    static const size_t blocks[] = {0, 256, 512, 1000, 1024, 65280, SRL_PAGE, BIG};
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++)
        for (size_t b = 0; b < sizeof blocks / sizeof *blocks; b++)
            for (size_t off = 0; off<128; off += sizes[i]> SRL_PAGE ? 32 : 16)
                copy(sizes[i], off, off * 5 % 64, blocks[b]);
    for (size_t off = 0; off < 64; off++)
        copy(BIG - off, off, 63 - off, 0);
    puts("ok");
    return 0;
}
