/* payload_ids.c: what is checked and narrowed before ids are stored, and the base64 they arrive in. */
#include "payload.h"

#include <errno.h>

/* A negative id becomes a huge unsigned one, so one comparison covers both ends. `seen[id] == stamp` marks
 * this row's ids; the stamp changes per row, so the scratch is cleared only when it wraps. */
#define CHECK_IDS(T)                                                                                         \
    do {                                                                                                     \
        const T *row = (const T *)ids + first * k;                                                           \
        for (int64_t r = first; r < rows; r++, row += k) {                                                   \
            if (++stamp == 0) {                                                                              \
                for (int64_t i = 0; i < limit; i++)                                                          \
                    seen[i] = 0;                                                                             \
                stamp = 1;                                                                                   \
            }                                                                                                \
            for (int64_t c = 0; c < k; c++) {                                                                \
                uint64_t id = (uint64_t)row[c];                                                              \
                if (id >= (uint64_t)limit) {                                                                 \
                    *where = r * k + c;                                                                      \
                    return -EDOM;                                                                            \
                }                                                                                            \
                if (seen[id] == stamp) {                                                                     \
                    *where = r * k + c;                                                                      \
                    return -EEXIST;                                                                          \
                }                                                                                            \
                seen[id] = stamp;                                                                            \
            }                                                                                                \
        }                                                                                                    \
        return 0;                                                                                            \
    } while (0)

int srl_check_ids(const void *ids, srl_int_t type, int64_t rows, int64_t k, int64_t limit, uint32_t *seen,
                  int64_t *where) {
    uint32_t stamp = 0;
    int64_t first = type == SRL_U8 && k == 8 ? srl_good_rows_of_8(ids, rows, limit) : 0;
    switch (type) {
    case SRL_U8:
        CHECK_IDS(uint8_t);
    case SRL_U16:
        CHECK_IDS(uint16_t);
    case SRL_U32:
        CHECK_IDS(uint32_t);
    case SRL_U64:
        CHECK_IDS(uint64_t);
    case SRL_I8:
        CHECK_IDS(int8_t);
    case SRL_I16:
        CHECK_IDS(int16_t);
    case SRL_I32:
        CHECK_IDS(int32_t);
    case SRL_I64:
        CHECK_IDS(int64_t);
    }
    return -EINVAL;
}

#define NARROW_TO(S, D)                                                                                      \
    do {                                                                                                     \
        const S *from = src;                                                                                 \
        D *to = dst;                                                                                         \
        for (int64_t i = 0; i < count; i++)                                                                  \
            to[i] = (D)from[i];                                                                              \
        return 0;                                                                                            \
    } while (0)

#define NARROW(S)                                                                                            \
    do {                                                                                                     \
        if (dst_nbytes == 1)                                                                                 \
            NARROW_TO(S, uint8_t);                                                                           \
        if (dst_nbytes == 2)                                                                                 \
            NARROW_TO(S, uint16_t);                                                                          \
        if (dst_nbytes == 4)                                                                                 \
            NARROW_TO(S, uint32_t);                                                                          \
        return -EINVAL;                                                                                      \
    } while (0)

int srl_narrow(const void *src, srl_int_t type, int64_t count, void *dst, int dst_nbytes) {
    switch (type) {
    case SRL_U8:
        NARROW(uint8_t);
    case SRL_U16:
        NARROW(uint16_t);
    case SRL_U32:
        NARROW(uint32_t);
    case SRL_U64:
        NARROW(uint64_t);
    case SRL_I8:
        NARROW(int8_t);
    case SRL_I16:
        NARROW(int16_t);
    case SRL_I32:
        NARROW(int32_t);
    case SRL_I64:
        NARROW(int64_t);
    }
    return -EINVAL;
}

int srl_check_kept(const int32_t *kept, const int32_t *counts, const int32_t *sampled, int64_t rows,
                   int64_t *where) {
    for (int64_t r = 0; r < rows; r++) {
        int found = counts[r] == 0;
        for (int32_t i = 0; i < counts[r]; i++)
            found |= kept[i] == sampled[r];
        if (!found) {
            *where = r;
            return -ENOENT;
        }
        kept += counts[r];
    }
    return 0;
}

int srl_sextet(uint8_t c) {
    if (c >= 'A' && c <= 'Z')
        return c - 'A';
    if (c >= 'a' && c <= 'z')
        return c - 'a' + 26;
    if (c >= '0' && c <= '9')
        return c - '0' + 52;
    return c == '+' ? 62 : c == '/' ? 63 : -1;
}

static int64_t first_bad(const char *text, int64_t from, int64_t length) {
    while (from < length && srl_sextet((uint8_t)text[from]) >= 0)
        from++;
    return from;
}

int64_t srl_base64_decode(const char *text, int64_t length, uint8_t *out, int64_t capacity, int64_t *where) {
    int8_t table[256];
    for (int c = 0; c < 256; c++)
        table[c] = (int8_t)srl_sextet((uint8_t)c);
    *where = length;
    if (length % 4 != 0)
        return -EINVAL;
    int64_t padding =
        length > 0 ? (text[length - 1] == '=') + (text[length - 1] == '=' && text[length - 2] == '=') : 0;
    int64_t nbytes = length / 4 * 3 - padding;
    if (nbytes > capacity)
        return -ENOSPC;
    int64_t whole = padding ? length - 4 : length;
    int64_t front = srl_decode_front(text, whole, out);
    out += front / 4 * 3;
    for (int64_t i = front; i < whole; i += 4, out += 3) {
        int a = table[(uint8_t)text[i]], b = table[(uint8_t)text[i + 1]];
        int c = table[(uint8_t)text[i + 2]], d = table[(uint8_t)text[i + 3]];
        if ((a | b | c | d) < 0) { /* one of them is -1 */
            *where = first_bad(text, i, length);
            return -EINVAL;
        }
        out[0] = (uint8_t)(a << 2 | b >> 4);
        out[1] = (uint8_t)(b << 4 | c >> 2);
        out[2] = (uint8_t)(c << 6 | d);
    }
    if (padding) {
        int a = table[(uint8_t)text[whole]], b = table[(uint8_t)text[whole + 1]];
        int c = padding == 2 ? 0 : table[(uint8_t)text[whole + 2]];
        if ((a | b | c) < 0) {
            *where = first_bad(text, whole, length);
            return -EINVAL;
        }
        out[0] = (uint8_t)(a << 2 | b >> 4);
        if (padding == 1)
            out[1] = (uint8_t)(b << 4 | c >> 2);
    }
    return nbytes;
}
