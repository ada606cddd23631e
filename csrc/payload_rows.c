/* payload_rows.c: ids from where an engine's answer has them to where their block has them, in one pass.
 *
 * A piece of at most 24 KiB is decoded from base64, checked, narrowed and copied to its place with its checksum
 * before the next one is looked at, so that memory is read once and written once; everything between stays in the
 * second cache. The parts are those of payload_ids.c, payload_vector.c, avx512.c and crc32c.c, each of which has a
 * way for every machine.
 */
#include "arena_core.h"
#include "payload.h"

#include <errno.h>
#include <string.h>

#define GROUP       3 /* bytes that four characters stand for */
#define STREAM_FROM (256 << 10)
#define PIECE                                                                                                \
    (24 << 10) /* bytes that are looked at together: text, ids and copies of ids stay in the cache */

/* Bytes at .. at + nbytes of what the text stands for -> where they are, or NULL with *where at a bad character. */
static const uint8_t *decoded(const srl_rows_t *r, int64_t at, int64_t nbytes, uint8_t *scratch,
                              int64_t *where) {
    int64_t first = at / GROUP, last = (at + nbytes + GROUP - 1) / GROUP;
    int64_t written = srl_base64_decode((const char *)r->source + 4 * first, 4 * (last - first), scratch,
                                        GROUP * (last - first), where);
    if (written < at % GROUP + nbytes) { /* a bad character, or padding before the end */
        *where = 4 * first + (written < 0 ? *where : 4 * (last - first) - 1);
        return NULL;
    }
    return scratch + at % GROUP;
}

/* Copies with checksum; streams where that is allowed. */
static uint32_t put(uint32_t crc, uint8_t *to, const uint8_t *from, int64_t nbytes, bool streaming) {
    if (nbytes >= 512 && srl_wide())
        return srl_wide_copy(crc, to, from, (size_t)nbytes, streaming && (uintptr_t)to % 64 == 0);
    memcpy(to, from, (size_t)nbytes);
    return srl_crc32c(crc, from, (size_t)nbytes);
}

/* Bytes of a row where it is, or where it goes, whichever are more. */
static int64_t widest(const srl_rows_t *r) {
    int64_t size = r->type < 0 ? -r->type : r->type;
    return r->row_ids * (size > r->dst_nbytes ? size : r->dst_nbytes);
}

int64_t srl_rows_scratch(const srl_rows_t *r) {
    int64_t row = widest(r), piece = row > PIECE ? row : PIECE;
    return 2 * (piece + 2 * GROUP + 64) / 128 * 128 + 128;
}

static int store_rows(const srl_rows_t *r, int64_t first, int64_t rows, uint8_t *dst, int64_t at,
                      uint32_t *crcs, uint8_t *scratch, uint32_t *seen, int64_t *where) {
    int64_t size = r->type < 0 ? -r->type : r->type, row = r->row_ids * size,
            kept = r->row_ids * r->dst_nbytes;
    int64_t most = widest(r) > PIECE ? 1 : PIECE / widest(r);
    bool streaming = rows * kept >= STREAM_FROM;
    uint8_t *narrow = scratch + srl_rows_scratch(r) / 2;
    for (int64_t done = 0, n; done < rows; done += n) {
        int64_t place = at + done, left = r->rows_per_crc - place % r->rows_per_crc;
        n = rows - done < left ? rows - done : left;
        n = n < most ? n : most;
        const uint8_t *ids = (const uint8_t *)r->source + (first + done) * row;
        if (r->base64 && !(ids = decoded(r, r->skip + (first + done) * row, n * row, scratch, where)))
            return -EINVAL;
        if (size > 1 && (uintptr_t)ids % (uintptr_t)size) { /* decoded behind part of a group */
            memmove(scratch, ids, (size_t)(n * row));
            ids = scratch;
        }
        memset(seen, 0, (size_t)r->limit * sizeof *seen); /* stamps begin again with every call */
        int code = srl_check_ids(ids, r->type, n * r->row_ids / r->k, r->k, r->limit, seen, where);
        if (code) {
            *where += done * r->row_ids;
            return code;
        }
        if (size != r->dst_nbytes) {
            code = srl_narrow(ids, r->type, n * r->row_ids, narrow, r->dst_nbytes);
            if (code)
                return code;
            ids = narrow;
        }
        uint32_t *crc = crcs + place / r->rows_per_crc;
        *crc = put(*crc, dst + done * kept, ids, n * kept, streaming);
    }
    if (streaming)
        srl_wide_fence();
    return 0;
}

struct part {
    const srl_rows_t *r;
    int64_t first, rows, at, where;
    uint8_t *dst, *scratch;
    uint32_t *crcs, *seen;
    int code;
};

static void *store_part(void *arg) {
    struct part *p = arg;
    p->code = store_rows(p->r, p->first, p->rows, p->dst, p->at, p->crcs, p->scratch, p->seen, &p->where);
    return NULL;
}

int64_t srl_rows_parts(const srl_rows_t *r, int64_t rows) {
    int64_t size = r->type < 0 ? -r->type : r->type;
    return (int64_t)srl_parts((uint64_t)(rows * r->row_ids * size));
}

int srl_store_rows(const srl_rows_t *r, int64_t first, int64_t rows, uint8_t *dst, int64_t at, uint32_t *crcs,
                   uint8_t *scratch, uint32_t *seen, int64_t count, int64_t *where) {
    struct part parts[SRL_MOST_PARTS];
    int64_t ahead = at % r->rows_per_crc; /* of the first checksum: no two parts add to the same one */
    int64_t each = ((rows + ahead) / count / r->rows_per_crc + 1) * r->rows_per_crc;
    size_t n = 0;
    for (int64_t done = 0, end; done < rows; done = end) {
        end = done + each - (at + done) % r->rows_per_crc;
        end = end < rows ? end : rows;
        parts[n] = (struct part){.r = r,
                                 .first = first + done,
                                 .rows = end - done,
                                 .at = at + done,
                                 .dst = dst + done * r->row_ids * r->dst_nbytes,
                                 .scratch = scratch + (int64_t)n * srl_rows_scratch(r),
                                 .where = -1,
                                 .crcs = crcs,
                                 .seen = seen + (int64_t)n * r->limit};
        n++;
    }
    srl_each(store_part, parts, sizeof *parts, n);
    for (size_t i = 0; i < n; i++)
        if (parts[i].code) {
            *where = parts[i].where;
            if (parts[i].code != -EINVAL) /* which names a character of the whole text */
                *where += (parts[i].first - first) * r->row_ids;
            return parts[i].code;
        }
    return 0;
}
