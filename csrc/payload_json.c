/* payload_json.c: see payload_json.h. */
#include "payload_json.h"

#include <float.h>
#include <locale.h>
#include <stdlib.h>

enum {
    DEPTH = 64,    /* of what is skipped */
    SHORT = 24,    /* bytes of a string that are looked at one by one */
    LONGEST = 128, /* characters of a number */
    EXACT = 22,    /* powers of ten that a double has exactly */
    EXACT_LONG = 27
};

/* ------------------------------------------------------------------------------------------------------- tokens */

int srl_json_word(srl_json_t *c, const char *wanted) {
    size_t length = strlen(wanted);
    srl_json_space(c);
    if ((size_t)(c->end - c->at) < length || memcmp(c->at, wanted, length) != 0) {
        return 0;
    }
    c->at += length;
    return 1;
}

static int escape(srl_json_t *c) /* behind a backslash */
{
    if (c->at >= c->end) {
        return -EINVAL;
    }
    char kind = *c->at++;
    if (kind != 'u') {
        return kind && strchr("\"\\/bfnrt", kind) ? 0 : -EINVAL;
    }
    for (int i = 0; i < 4; i++, c->at++) {
        if (c->at >= c->end || !memchr("0123456789abcdefABCDEF", *c->at, 22)) {
            return -EINVAL;
        }
    }
    return 0;
}

int srl_json_string(srl_json_t *c, const char **text, int64_t *length) {
    int escapes = 0;
    if (!srl_json_is(c, '"')) {
        return -EINVAL;
    }
    *text = c->at;
    for (;;) {
        const char *near = c->end - c->at > SHORT ? c->at + SHORT : c->end;
        while (c->at < near && *c->at != '"' && *c->at != '\\' && (unsigned char)*c->at >= 0x20) {
            c->at++;
        }
        if (c->at >= c->end) {
            return -EINVAL;
        }
        if (c->at == near) { /* a long one: to its end, or to the first escape */
            const char *quote = memchr(c->at, '"', (size_t)(c->end - c->at));
            if (!quote) {
                return -EINVAL;
            }
            const char *back = memchr(c->at, '\\', (size_t)(quote - c->at));
            const char *stop = back ? back : quote;
            unsigned char control = 0;
            for (const char *p = c->at; p < stop; p++) {
                control |= (unsigned char)((unsigned char)*p < 0x20);
            }
            if (control) {
                return -EINVAL;
            }
            c->at = stop;
        }
        if (*c->at == '"') {
            *length = c->at++ - *text;
            return escapes;
        }
        if (*c->at != '\\') {
            return -EINVAL; /* a control character */
        }
        c->at++;
        escapes = 1;
        if (escape(c)) {
            return -EINVAL;
        }
    }
}

int srl_json_key(srl_json_t *c, const char **text, int64_t *length) {
    int code = srl_json_string(c, text, length);
    if (code < 0 || !srl_json_is(c, ':')) {
        return -EINVAL;
    }
    if (code == 1) {
        *length = -1;
    }
    return 0;
}

/* ------------------------------------------------------------------------------------------------------ numbers */

static locale_t plain; /* "C": the process may have set another one, whose decimal point is a comma */

static __attribute__((constructor)) void make_plain(void) {
    plain = newlocale(LC_ALL_MASK, "C", (locale_t)0);
}

static int digits(srl_json_t *c, uint64_t *m, int *used, int *dropped) {
    const char *from = c->at;
    for (; c->at < c->end && (unsigned char)(*c->at - '0') < 10; c->at++) {
        if (*used < 19) {
            *m = 10 * *m + (uint64_t)(*c->at - '0');
            *used += *m != 0; /* leading zeros say nothing */
        } else {
            (*dropped)++;
        }
    }
    return (int)(c->at - from);
}

static int slowly(const char *text, int64_t length, double *value) {
    char copy[LONGEST + 1], *end;
    if (length > LONGEST || plain == (locale_t)0) {
        return -EINVAL;
    }
    memcpy(copy, text, (size_t)length);
    copy[length] = 0;
    *value = strtod_l(copy, &end, plain);
    return end == copy + length ? 0 : -EINVAL;
}

/* m * 10^exponent, rounded once, where that is certain; 0 then. */
static int quickly(uint64_t m, int exponent, double *value) {
    static const double tens[EXACT + 1] = {1e0,  1e1,  1e2,  1e3,  1e4,  1e5,  1e6,  1e7,
                                           1e8,  1e9,  1e10, 1e11, 1e12, 1e13, 1e14, 1e15,
                                           1e16, 1e17, 1e18, 1e19, 1e20, 1e21, 1e22};
    if (m < 1ull << 53 && exponent >= -EXACT && exponent <= EXACT) {
        *value = exponent < 0 ? (double)m / tens[-exponent] : (double)m * tens[exponent];
        return 0;
    }
#if LDBL_MANT_DIG == 64
    static const long double long_tens[EXACT_LONG + 1] = {
        1e0L,  1e1L,  1e2L,  1e3L,  1e4L,  1e5L,  1e6L,  1e7L,  1e8L,  1e9L,  1e10L, 1e11L, 1e12L, 1e13L,
        1e14L, 1e15L, 1e16L, 1e17L, 1e18L, 1e19L, 1e20L, 1e21L, 1e22L, 1e23L, 1e24L, 1e25L, 1e26L, 1e27L};
    if (exponent >= -EXACT_LONG && exponent <= EXACT_LONG) {
        long double wide =
            exponent < 0 ? (long double)m / long_tens[-exponent] : (long double)m * long_tens[exponent];
        uint64_t bits;
        memcpy(&bits, &wide, sizeof bits);
        int below =
            (int)(bits & 0x7FF); /* what a double has no room for; near a half it might round the other way */
        if (below < 0x3FF || below > 0x401) {
            *value = (double)wide;
            return 0;
        }
    }
#endif
    return -EINVAL;
}

int srl_json_number(srl_json_t *c, double *value, int64_t *integer) {
    srl_json_space(c);
    const char *text = c->at;
    uint64_t m = 0;
    int used = 0, dropped = 0, behind = 0, exponent = 0, whole = 1;
    int negative = c->at < c->end && *c->at == '-';
    c->at += negative;
    const char *first = c->at;
    int count = digits(c, &m, &used, &dropped);
    if (!count || (count > 1 && *first == '0')) {
        return -EINVAL;
    }
    if (c->at < c->end && *c->at == '.') {
        c->at++;
        whole = 0;
        behind = digits(c, &m, &used, &dropped);
        if (!behind) {
            return -EINVAL;
        }
    }
    if (c->at < c->end && (*c->at == 'e' || *c->at == 'E')) {
        uint64_t power = 0;
        int ignored = 0, of_power = 0;
        c->at++;
        whole = 0;
        int down = c->at < c->end && *c->at == '-';
        c->at += c->at < c->end && (*c->at == '-' || *c->at == '+');
        if (!digits(c, &power, &of_power, &ignored)) {
            return -EINVAL;
        }
        exponent = ignored || power > 100000 ? 100000 : (int)power;
        exponent = down ? -exponent : exponent;
    }
    *integer = whole && !negative && !dropped && m <= INT32_MAX ? (int64_t)m : -1;
    if (!dropped && quickly(m, exponent - behind, value) == 0) {
        *value = negative ? -*value : *value;
        return 0;
    }
    return slowly(text, c->at - text, value);
}

/* ------------------------------------------------------------------------------------------------------ skipping */

static int skip_members(srl_json_t *c, int depth) {
    const char *text;
    int64_t length;
    int more, first = 1;
    for (; (more = srl_json_another(c, '}', first)) == 1; first = 0) {
        if (srl_json_key(c, &text, &length) || srl_json_skip(c, depth)) {
            return -EINVAL;
        }
    }
    return more;
}

static int skip_items(srl_json_t *c, int depth) {
    int more, first = 1;
    for (; (more = srl_json_another(c, ']', first)) == 1; first = 0) {
        if (srl_json_skip(c, depth)) {
            return -EINVAL;
        }
    }
    return more;
}

int srl_json_skip(srl_json_t *c, int depth) {
    const char *text;
    int64_t length;
    double value;
    srl_json_space(c);
    if (c->at >= c->end || depth == DEPTH) {
        return -EINVAL;
    }
    switch (*c->at) {
    case '{':
        c->at++;
        return skip_members(c, depth + 1);
    case '[':
        c->at++;
        return skip_items(c, depth + 1);
    case '"':
        return srl_json_string(c, &text, &length) < 0 ? -EINVAL : 0;
    case 't':
        return srl_json_word(c, "true") ? 0 : -EINVAL;
    case 'f':
        return srl_json_word(c, "false") ? 0 : -EINVAL;
    case 'n':
        return srl_json_word(c, "null") ? 0 : -EINVAL;
    default:
        return srl_json_number(c, &value, &length);
    }
}
