/* payload.h: what the payload room does in C. Called by shmrl/payload/_payload.pyx alone, always with the GIL
 * released, in env workers (checks, narrowing, base64) and trainer ranks (gather). Gets pointers and lengths:
 * no names, malloc or Python.
 *
 * Glossary
 *   ids      expert or token ids of one integer type (srl_int_t), C order
 *   row      the k ids of one position and layer
 *   block    one mapped arena block: base and nbytes
 *   copy     srl_copy_t: `rows` pieces of row_nbytes, each a stride behind the last on either side
 *
 * Invariants (checked before the first byte moves, -ERANGE otherwise)
 *   0 <= block < nblocks, and all numbers >= 0
 *   src_offset + (rows - 1) * src_stride + row_nbytes <= nbytes of the block
 *   dst_offset + (rows - 1) * dst_stride + row_nbytes <= nbytes of the destination
 * Every function returns 0 (or a count) or -errno; a failed check reports the position through *where.
 */
#ifndef SRL_PAYLOAD_H
#define SRL_PAYLOAD_H

#include <stddef.h>
#include <stdint.h>

typedef enum {
    SRL_U8 = 1,
    SRL_U16 = 2,
    SRL_U32 = 4,
    SRL_U64 = 8,
    SRL_I8 = -1,
    SRL_I16 = -2,
    SRL_I32 = -4,
    SRL_I64 = -8
} srl_int_t;

typedef struct {
    const uint8_t *base;
    int64_t nbytes;
} srl_block_t;

typedef struct { /* seven int64 words: one row of the descriptor array that assemble.py builds */
    int64_t block, src_offset, src_stride, dst_offset, dst_stride, rows, row_nbytes;
} srl_copy_t;

/* ids in [0, limit) and distinct within each row of k. seen: limit zeroed words of scratch. -EDOM: out of
 * range at flat index *where; -EEXIST: a repeated id there. */
int srl_check_ids(const void *ids, srl_int_t type, int64_t rows, int64_t k, int64_t limit, uint32_t *seen,
                  int64_t *where);

/* dst[i] = src[i] for count ids; dst_nbytes (1, 2 or 4) unsigned. The caller has checked that they fit. */
int srl_narrow(const void *src, srl_int_t type, int64_t count, void *dst, int dst_nbytes);

typedef struct {          /* rows of ids as an engine sent them, and as a block has them */
    const void *source;   /* the ids, or (base64) the text that they are in */
    int64_t skip;         /* base64: bytes before the first row */
    int64_t row_ids, k;   /* ids of a position: some rows of k */
    int64_t limit;        /* ids are below */
    int64_t rows_per_crc; /* positions under one checksum */
    int base64, dst_nbytes;
    srl_int_t type;
} srl_rows_t;

/* Positions first .. first + rows of the source to dst: decoded, checked, narrowed to dst_nbytes, copied, and added to
 * the checksums of the column, in which they lie from `at` on. parts: how many threads share it, of srl_rows_parts;
 * scratch and seen: srl_rows_scratch bytes and `limit` words for each.
 * -EINVAL: no base64 at character *where; -EDOM, -EEXIST: as srl_check_ids, *where from the first id of `first` on. */
int srl_store_rows(const srl_rows_t *r, int64_t first, int64_t rows, uint8_t *dst, int64_t at, uint32_t *crcs,
                   uint8_t *scratch, uint32_t *seen, int64_t parts, int64_t *where);
int64_t srl_rows_scratch(const srl_rows_t *r);
int64_t srl_rows_parts(const srl_rows_t *r, int64_t rows);

/* The sampled id of each row is among its counts[row] kept ids (a count of 0 restricts nothing).
 * -ENOENT: not in row *where. */
int srl_check_kept(const int32_t *kept, const int32_t *counts, const int32_t *sampled, int64_t rows,
                   int64_t *where);

/* Standard base64 with padding. Returns the number of bytes written, or -EINVAL with *where at the first bad
 * character, -ENOSPC if out is too small. */
int64_t srl_base64_decode(const char *text, int64_t length, uint8_t *out, int64_t capacity, int64_t *where);

int srl_sextet(uint8_t c); /* 0..63, or -1 for what is not of base64 */

/* Decodes from the front while all is well -> characters decoded, a multiple of 4. out has length / 4 * 3. */
int64_t srl_decode_front(const char *text, int64_t length, uint8_t *out);

/* Rows of 8 ids from the front that pass srl_check_ids; there may be more of them. */
int64_t srl_good_rows_of_8(const uint8_t *ids, int64_t rows, int64_t limit);

/* All copies, in order. -ERANGE with *where at the first impossible one; then nothing was copied. */
int srl_gather(const srl_block_t *blocks, int64_t nblocks, const srl_copy_t *copies, int64_t count,
               uint8_t *dst, int64_t dst_nbytes, int64_t *where);

/* Set bits of bits[start, stop), least significant bit first within a byte. */
int64_t srl_count_bits(const uint8_t *bits, int64_t start, int64_t stop);

/* out[i] = bit (start + i), one byte each. */
void srl_unpack_bits(const uint8_t *bits, int64_t start, int64_t stop, uint8_t *out);

#endif
