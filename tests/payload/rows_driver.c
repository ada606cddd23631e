/* srl_store_rows against plain loops: every type, text or ids, pieces at any place, and what is wrong named by its place. */
#include "arena_core.h"
#include "payload.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#ifndef STEP
#define STEP 1
#endif

static const char *ALPHABET = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
static const srl_int_t TYPES[] = {SRL_U8, SRL_U16, SRL_U32, SRL_U64, SRL_I8, SRL_I16, SRL_I32, SRL_I64};
static const int64_t SHAPES[][2] = {{8, 8}, {384, 8}, {24, 4}, {6, 3}, {5, 5}, {33000, 10}};

static void fail(const char *what, int64_t a, int64_t b) {
    printf("%s: %lld, expected %lld\n", what, (long long)a, (long long)b);
    exit(1);
}

static void expect(const char *what, int64_t got, int64_t wanted) {
    if (got != wanted)
        fail(what, got, wanted);
}

static char *encoded(const uint8_t *bytes,
                     int64_t n) { /* exactly as long as it is: a read behind it is found */
    int64_t groups = (n + 2) / 3;
    char *text = malloc((size_t)(4 * groups));
    for (int64_t g = 0; g < groups; g++) {
        uint32_t v = 0;
        for (int64_t i = 0; i < 3; i++)
            v = v << 8 | (3 * g + i < n ? bytes[3 * g + i] : 0);
        for (int64_t i = 0; i < 4; i++)
            text[4 * g + i] = 3 * g + i > n ? '=' : ALPHABET[v >> (18 - 6 * i) & 63];
    }
    return text;
}

static void set(uint8_t *bytes, int64_t size, int64_t at, int64_t value) {
    memcpy(bytes + at * size, &value, (size_t)size); /* little endian, as the tests' machines are */
}

static uint32_t *summed(const uint8_t *column, int64_t rows, int64_t row, int64_t per) {
    int64_t n = (rows + per - 1) / per;
    uint32_t *crcs = calloc((size_t)n, 4);
    for (int64_t i = 0; i < n; i++)
        crcs[i] = srl_crc32c(0, column + i * per * row,
                             (size_t)((rows - i * per < per ? rows - i * per : per) * row));
    return crcs;
}

static void check(srl_int_t type, const int64_t *shape, int base64, int dst_nbytes, int64_t skip,
                  int64_t rows) {
    int64_t size = type < 0 ? -type : type, row_ids = shape[0], k = shape[1], limit = 100;
    int64_t n = rows * row_ids, kept = row_ids * dst_nbytes;
    uint8_t *raw = calloc((size_t)(skip + n * size), 1), *wanted = calloc((size_t)(rows * kept), 1);
    for (int64_t i = 0; i < n; i++) {
        int64_t id =
            (i / k * 7 + i % k * 9) % limit; /* 9 and 100 have no common divisor: distinct for k <= 100 */
        set(raw + skip, size, i, id);
        set(wanted, dst_nbytes, i, id);
    }
    srl_rows_t r = {.skip = base64 ? skip : 0,
                    .row_ids = row_ids,
                    .k = k,
                    .limit = limit,
                    .rows_per_crc = 17,
                    .base64 = base64,
                    .dst_nbytes = dst_nbytes,
                    .type = type};
    char *text = encoded(raw, skip + n * size);
    r.source = base64 ? (const void *)text : raw + skip;
    int64_t parts = srl_rows_parts(&r, rows);
    uint8_t *scratch = malloc((size_t)(parts * srl_rows_scratch(&r))), *out = malloc((size_t)(rows * kept));
    uint32_t *seen = calloc((size_t)(parts * limit), 4), *sums = calloc((size_t)(rows / 17 + 1), 4);
    int64_t where = -1, cut = rows / 3;
    expect("first piece", srl_store_rows(&r, 0, cut, out, 0, sums, scratch, seen, parts, &where), 0);
    expect("second piece",
           srl_store_rows(&r, cut, rows - cut, out + cut * kept, cut, sums, scratch, seen, parts, &where), 0);
    expect("bytes", memcmp(out, wanted, (size_t)(rows * kept)), 0);
    uint32_t *crcs = summed(wanted, rows, kept, 17);
    expect("checksums", memcmp(crcs, sums, (size_t)((rows + 16) / 17 * 4)), 0);
    if (rows > cut + 1) {
        int64_t bad = (rows - 1) * row_ids + row_ids - 1, first = cut * row_ids;
        set(raw + skip, size, bad, 100);
        free(text);
        text = encoded(raw, skip + n * size);
        r.source = base64 ? (const void *)text : raw + skip;
        expect("too large", srl_store_rows(&r, cut, rows - cut, out, 0, sums, scratch, seen, parts, &where), -EDOM);
        expect("where it is too large", where, bad - first);
        memcpy(raw + skip + bad * size, raw + skip + (bad - 1) * size, (size_t)size);
        free(text);
        text = encoded(raw, skip + n * size);
        r.source = base64 ? (const void *)text : raw + skip;
        expect("repeated", srl_store_rows(&r, cut, rows - cut, out, 0, sums, scratch, seen, parts, &where), -EEXIST);
        expect("where it is repeated", where, bad - first);
        if (base64) {
            int64_t at = (skip + cut * row_ids * size) / 3 * 4 + 5;
            text[at] = '!';
            expect("no base64", srl_store_rows(&r, cut, rows - cut, out, 0, sums, scratch, seen, parts, &where),
                   -EINVAL);
            expect("where it is none", where, at);
        }
    }
    free(raw), free(wanted), free(text), free(scratch), free(out), free(seen), free(sums), free(crcs);
}

int main(void) {
    for (size_t t = 0; t < sizeof TYPES / sizeof *TYPES; t += STEP)
        for (size_t s = 0; s < sizeof SHAPES / sizeof *SHAPES; s++)
            for (int base64 = 0; base64 < 2; base64++)
                for (int dst = 1; dst <= 4; dst *= 2)
                    for (int64_t skip = 0; skip < 5; skip += SHAPES[s][0] > 100 ? 2 : 1)
                        check(TYPES[t], SHAPES[s], base64, dst, skip,
                              SHAPES[s][0] > 1000 ? 3 : 5 + 11 * skip);
    check(SRL_U8, SHAPES[1], 1, 1, 128, 801); /* enough to be streamed */
    printf("ok\n");
    return 0;
}
