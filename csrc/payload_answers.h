/* payload_answers.h: engine answers as arrays. See payload_answers.c; called by shmrl/payload/_answers.pyx alone. */
#ifndef SRL_PAYLOAD_ANSWERS_H
#define SRL_PAYLOAD_ANSWERS_H

#include <stdint.h>

typedef enum { SRL_CONTENT, SRL_TOKEN_IDS, SRL_MASK, SRL_ROUTED, SRL_PARTS } srl_part_t;

typedef enum {
    SRL_TOKENS,        /* int32 [T] */
    SRL_LOGPROBS,      /* float64 [T], of the sampled tokens */
    SRL_HEAD_COUNTS,   /* int32 [T] */
    SRL_HEAD_IDS,      /* int32 [sum of these] */
    SRL_HEAD_LOGPROBS, /* float32, likewise */
    SRL_KEPT_COUNTS,   /* int32 [T] */
    SRL_KEPT_IDS,      /* int32 [sum of these] */
    SRL_ARRAYS
} srl_array_name_t;

typedef struct {
    char *data;
    int64_t nbytes, room;
} srl_array_t;

typedef struct { /* bytes [start, stop) of the text; stop is 0 where there was none, or null */
    int64_t start, stop;
} srl_span_t;

typedef struct {
    srl_span_t spans[SRL_PARTS];
    srl_array_t arrays[SRL_ARRAYS];
} srl_answer_t;

/* The first choice of an answer -> 0; -EINVAL if it is of a form that this does not know, -ENOMEM. Whatever it
 * returns, the caller frees the arrays. */
int srl_answer_read(const char *text, int64_t length, srl_answer_t *answer);
void srl_answer_free(srl_answer_t *answer);

#endif
