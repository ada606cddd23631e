/* payload_json.h: what a reader of one known form of JSON needs: its tokens, numbers rounded as Python rounds them, and a
 * way past everything else. Strict: -EINVAL for whatever is not JSON, and for a few things that are (depth, length).
 */
#ifndef SRL_PAYLOAD_JSON_H
#define SRL_PAYLOAD_JSON_H

#include <errno.h>
#include <stdint.h>
#include <string.h>

typedef struct { /* where a reader is in its text */
    const char *at, *end, *start;
} srl_json_t;

static inline void srl_json_space(srl_json_t *c) {
    while (c->at < c->end && (*c->at == ' ' || *c->at == '\n' || *c->at == '\t' || *c->at == '\r')) {
        c->at++;
    }
}

static inline int srl_json_is(srl_json_t *c, char wanted) {
    srl_json_space(c);
    if (c->at < c->end && *c->at == wanted) {
        c->at++;
        return 1;
    }
    return 0;
}

/* After `{` or `[` and after each item: whether another item comes. first: none was there yet. -EINVAL for neither. */
static inline int srl_json_another(srl_json_t *c, char close, int first) {
    if (srl_json_is(c, close)) {
        return 0;
    }
    return first || srl_json_is(c, ',') ? 1 : -EINVAL;
}

static inline int srl_json_same(const char *text, int64_t length, const char *wanted) {
    return length == (int64_t)strlen(wanted) && memcmp(text, wanted, (size_t)length) == 0;
}

/* Whether this literal comes; then it is behind the reader. */
int srl_json_word(srl_json_t *c, const char *wanted);

/* A string's characters as they stand, between its quotes -> 1 if some of them are escapes, 0, -EINVAL. */
int srl_json_string(srl_json_t *c, const char **text, int64_t *length);

/* A key and its colon. length is -1 where it has escapes: what it says is not known then. */
int srl_json_key(srl_json_t *c, const char **text, int64_t *length);

/* A number. integer: its value where it is written as one, -1 otherwise or where it is negative or beyond int32. */
int srl_json_number(srl_json_t *c, double *value, int64_t *integer);

/* Past any value. depth: of what it is in. */
int srl_json_skip(srl_json_t *c, int depth);

#endif
