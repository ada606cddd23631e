/* payload_gather.c: the one copy of a payload's life, from mapped blocks into the trainer's staging buffer.
 */
#include "arena_core.h"
#include "payload.h"

#include <errno.h>
#include <string.h>

/* One side of a copy lies inside [0, nbytes). Written with divisions, so that no sum can overflow. */
static int fits(int64_t offset, int64_t stride, const srl_copy_t *copy, int64_t nbytes) {
    if (offset < 0 || stride < 0 || copy->row_nbytes < 0 || copy->row_nbytes > nbytes ||
        offset > nbytes - copy->row_nbytes)
        return 0;
    if (stride == 0)
        return copy->rows == 1;
    return copy->rows - 1 <= (nbytes - copy->row_nbytes - offset) / stride;
}

static int is_valid(const srl_block_t *blocks, int64_t nblocks, const srl_copy_t *copy, int64_t dst_nbytes) {
    if (copy->rows < 0 || copy->block < 0 || copy->block >= nblocks)
        return 0;
    if (copy->rows == 0)
        return 1;
    return fits(copy->src_offset, copy->src_stride, copy, blocks[copy->block].nbytes) &&
           fits(copy->dst_offset, copy->dst_stride, copy, dst_nbytes);
}

static void copy_rows(const uint8_t *src, uint8_t *dst, const srl_copy_t *copy) {
    if (copy->src_stride == copy->row_nbytes && copy->dst_stride == copy->row_nbytes) {
        srl_copy_around(dst, src, (uint64_t)(copy->rows * copy->row_nbytes));
        return;
    }
    for (int64_t row = 0; row < copy->rows; row++)
        memcpy(dst + row * copy->dst_stride, src + row * copy->src_stride, (size_t)copy->row_nbytes);
}

int srl_gather(const srl_block_t *blocks, int64_t nblocks, const srl_copy_t *copies, int64_t count,
               uint8_t *dst, int64_t dst_nbytes, int64_t *where) {
    for (int64_t i = 0; i < count; i++)
        if (!is_valid(blocks, nblocks, &copies[i], dst_nbytes)) {
            *where = i;
            return -ERANGE;
        }
    for (int64_t i = 0; i < count; i++)
        if (copies[i].rows > 0 && copies[i].row_nbytes > 0)
            copy_rows(blocks[copies[i].block].base + copies[i].src_offset, dst + copies[i].dst_offset,
                      &copies[i]);
    return 0;
}

int64_t srl_count_bits(const uint8_t *bits, int64_t start, int64_t stop) {
    int64_t count = 0;
    while (start < stop && start % 8 != 0) {
        count += (bits[start / 8] >> (start % 8)) & 1;
        start++;
    }
    for (; stop - start >= 64; start += 64) {
        uint64_t word;
        memcpy(&word, bits + start / 8, sizeof word);
        count += __builtin_popcountll(word);
    }
    for (; start < stop; start++)
        count += (bits[start / 8] >> (start % 8)) & 1;
    return count;
}

void srl_unpack_bits(const uint8_t *bits, int64_t start, int64_t stop, uint8_t *out) {
    for (int64_t i = start; i < stop; i++)
        *out++ = (bits[i / 8] >> (i % 8)) & 1;
}
